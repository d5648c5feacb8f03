"""The files of experiments: those that come with the package, and those that an experiment names."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from loadtests.experiments.toml_limits import expanded

FILE_KEYS = ("tls_ca", "tls_certificate", "tls_key", "tls_client_ca", "token_file")
_BUILTIN = resources.files("loadtests") / "experiments"


def builtin_names() -> list[str]:
    """The experiments that come with the package."""
    return sorted(item.name.removesuffix(".toml") for item in _BUILTIN.iterdir() if item.name.endswith(".toml"))


def builtin_text(name: str) -> str:
    """The TOML of the one called `name`."""
    return (_BUILTIN / f"{name}.toml").read_text(encoding="utf-8")


def resolve_files(table: dict[str, Any], folder: Path) -> None:
    """What `table` names relative to `folder` is absolute: the load generator runs in another folder."""
    for name in ("traffic", "security", "splitter", "parity", "arms"):
        if name in table:
            table[name] = resolved(name, table[name], folder)


def resolved(key: str, value: Any, folder: Path) -> Any:
    """The value at the dotted path `key`, its files absolute. A tokenizer that is no file is a hub's."""
    if isinstance(value, dict):
        return {name: resolved(f"{key}.{name}", item, folder) for name, item in value.items()}
    if isinstance(value, list):
        return [resolved(f"{key}[{index}]", item, folder) for index, item in enumerate(value)]
    name = key.rpartition(".")[2].partition("[")[0]
    if (
        name not in (*FILE_KEYS, "trace", "texts", "tokenizer", "artifact", "log")
        or not isinstance(value, str)
        or not value
    ):
        return value
    path = folder / expanded(value, key)
    return str(path.resolve()) if name != "tokenizer" or path.exists() or value.startswith((".", "~")) else value
