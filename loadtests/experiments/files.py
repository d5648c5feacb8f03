"""The files of experiments: TOML, the experiments of the package, what an experiment names, and the output folder."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from tailgate.analysis.records import documents
from tailgate.servers.complaint import ConfigError, did_you_mean

FILE_KEYS = ("tls_ca", "tls_certificate", "tls_key")
_NAME_FILES = (*FILE_KEYS, "trace", "texts", "tokenizer", "artifact", "log")
_BUILTIN = resources.files("tailgate.loadtests") / "experiments"


def read_toml(path: Path, what: str = "experiment") -> str:
    """Return the text of the file, which messages call `what`. Raises ConfigError for one that cannot be read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f'{what} "{path}" cannot be read ({why}): give a TOML file in UTF-8') from None


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Return the table that `text` holds. Raises ConfigError, which begins with `where`, for what no setting can be."""
    if "\\u0000" in text or "\\U00000000" in text:
        raise ConfigError(f"{where} holds a NUL character: remove it")
    try:
        return documents.parse_toml(text)
    except ValueError as error:
        wrong = str(error).replace("not valid TOML: Cannot overwrite a value", "a key is set twice")
        place = re.search(r"at line (\d+)", wrong)
        line = ": " + text.split("\n")[int(place[1]) - 1].strip() if place else ""
        raise ConfigError(f"{where}: {wrong}: correct it there{line}") from None


def table_of(table: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the table [key], empty where there is none. Another value there raises ConfigError."""
    value = table.get(key, {})
    if not isinstance(value, dict):
        raise ConfigError(f"{key} is {value!r}: give a table [{key}]")
    return value


def builtin_names() -> list[str]:
    """Return the experiments that come with the package."""
    return sorted(item.name.removesuffix(".toml") for item in _BUILTIN.iterdir() if item.name.endswith(".toml"))


def builtin_text(name: str) -> str:
    """Return the TOML of the one called `name`."""
    return (_BUILTIN / f"{name}.toml").read_text(encoding="utf-8")


def text_of(source: str | Path) -> tuple[Path, str]:
    """Return the path and the TOML of the experiment in a file, or of the built-in one of that name."""
    path = Path(source)
    if path.is_file():
        return path, read_toml(path)
    name = str(source)
    if name in builtin_names():
        return Path(), builtin_text(name)
    if (path / "experiment.toml").is_file():
        raise ConfigError(f'experiment "{source}" is a run directory: give {path / "experiment.toml"} to run it again')
    what = "is a directory" if path.is_dir() else "does not exist"
    known = [*builtin_names(), *map(str, path.parent.glob("*.toml") if path.parent.is_dir() else ())]
    raise ConfigError(
        f'experiment "{source}" {what}: {did_you_mean(path.stem if path.stem in known else name, known)}give a TOML '
        f"file (`tailgate init` writes one) or a built-in name ({', '.join(builtin_names())})"
    )


def description(name: str) -> str:
    """Return what the one called `name` is for: the first line of its TOML."""
    return builtin_text(name).partition("\n")[0].removeprefix("# ")


def template(name: str) -> str:
    """Return a part of the file that `tailgate init` writes, with values in braces."""
    return (_BUILTIN / "templates" / f"{name}.toml").read_text(encoding="utf-8")


def resolve_files(table: dict[str, Any], folder: Path) -> None:
    """Make the files that `table` names relative to `folder` absolute: the load generator runs in another folder."""
    for name in ("model", "traffic", "security", "splitter", "parity", "arms"):
        if name in table:
            table[name] = resolved(name, table[name], folder)


def resolved(key: str, value: Any, folder: Path) -> Any:
    """Return the value at the dotted path `key`, its files absolute. A tokenizer that is no file is a hub's."""
    if isinstance(value, dict):
        return {name: resolved(f"{key}.{name}", item, folder) for name, item in value.items()}
    if isinstance(value, list):
        return [resolved(f"{key}[{index}]", item, folder) for index, item in enumerate(value)]
    name = key.rpartition(".")[2].partition("[")[0]
    if not isinstance(value, str) or not value:
        return value
    if name not in _NAME_FILES and not (key.endswith("model.id") and value.startswith(("./", "../"))):
        return value
    path = folder / os.path.expanduser(value)  # noqa: PTH111 (an unknown home stays as it is)
    return (
        str(path.resolve()) if name != "tokenizer" or os.path.lexists(path) or value.startswith((".", "~")) else value
    )


def check_makeable(folder: Path, option: str = "--out") -> None:
    """Raise ConfigError unless the folder, or the one that it would be made in, can be written to. Leave nothing."""
    place = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not place.is_dir():
        raise ConfigError(f'{option} "{folder}" cannot be made ("{place}" is no folder): give a folder that can')
    try:
        tempfile.TemporaryDirectory(dir=place).cleanup()  # permissions alone say nothing of /proc, or to root
    except OSError:
        raise ConfigError(f'{option} "{place}" is not writable: give a folder that is') from None
