"""What the files of a run show once it is over."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.faults.arrangement import SECRETS

_TRACEBACK = b"Traceback (most recent call last)"
_IGNORED = re.compile(rb"Exception ignored in [^\n]*\n" + re.escape(_TRACEBACK))


def summaries(folder: Path) -> tuple[Mapping[str, Any] | str, ...]:
    """Every summary.json in the folder, or why it cannot be read."""
    return tuple(_summary(path) for path in sorted(folder.rglob("summary.json")))


def leaks(folders: Iterable[Path], commands: Iterable[str]) -> tuple[str, ...]:
    """The files and command lines that hold a secret."""
    places = [(str(path), content) for path, content in _files(folders)]
    places += [(f"the command line {command[:60]!r}", command.encode()) for command in commands]
    return tuple(
        f"{where} ({name})"
        for where, content in places
        for name, secret in SECRETS.items()
        if secret.encode() in content
    )


def tracebacks(folders: Iterable[Path]) -> tuple[str, ...]:
    """The files that hold a traceback, but for what the fake server outside the run says, and for what Python tells of
    a program that ends all the same, as Locust does when it is asked to end twice."""
    return tuple(
        str(path)
        for path, content in _files(folders)
        if _TRACEBACK in _IGNORED.sub(b"", content) and path.name != "server.err"
    )


def _files(folders: Iterable[Path]) -> Iterator[tuple[Path, bytes]]:
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not path.is_symlink():
                yield path, path.read_bytes()


def _summary(path: Path) -> Mapping[str, Any] | str:
    try:
        content: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return content
    except (OSError, ValueError) as error:
        return f"{path.name}: {error}"
