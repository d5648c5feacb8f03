"""The folder that holds other tools' result files as one run: which files, of which arms, and that it is free."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path

from analysis.imports.vllm import Named, checksums, write_run
from servers.complaint import ConfigError

_LONGEST_NAME = 60


def names_results(texts: Sequence[str]) -> bool:
    """Whether the words of a command line name result files, as NAME=FILE, and no run directories."""
    return any("=" in text and not Path(text).is_dir() for text in texts)


def run_of_results(texts: Sequence[str], *, out: str = "") -> Path:
    """A run directory made of the files that `texts` name, the arm named first as its control.

    It is `out`, or else a folder next to the first file, which is named after the files' contents. ConfigError for
    words that name no file and for a folder that is there already, RecordError for files that are no results.
    """
    files = [_named(text) for text in texts]
    if len({arm for arm, _ in files}) < 2:
        raise ConfigError(
            f'"{files[0][0]}" is the only arm: give the results of two, such as eager=a.json compiled=b.json'
        )
    folder = Path(out) if out else files[0][1].parent / f"results-{_digits(files)}"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f'"{folder}" exists: give a new --out, or judge it again with tailgate analyze {folder}')
    write_run(folder, files)
    return folder


def _named(text: str) -> Named:
    name, given, file = text.partition("=")
    if not given:
        raise ConfigError(
            f'"{text}" names no arm: give each result file as NAME=FILE, and no run directory beside them'
        )
    if not name or len(name) > _LONGEST_NAME or not name.isprintable():
        raise ConfigError(f'"{text}" has no name of an arm in front: give 1 to {_LONGEST_NAME} printable characters')
    if not Path(file).is_file():
        raise ConfigError(f'result file "{file}" does not exist: give one that {name} was measured in')
    return name, Path(file)


def _digits(files: Sequence[Named]) -> str:
    named = [[arm, checksum] for (arm, _), checksum in zip(files, checksums(files), strict=True)]
    return f"{zlib.crc32(json.dumps(named).encode()):08x}"
