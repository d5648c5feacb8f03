"""The files of experiments: those that come with the package, and those that an experiment names."""

from __future__ import annotations

from collections.abc import Mapping
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


def resolve_files(table: Mapping[str, Any], folder: Path) -> None:
    """What `table` names relative to `folder` is absolute: the load generator runs in another folder. A tokenizer that
    is no file is a hub's."""
    named: list[tuple[str, Any]] = [(name, table.get(name)) for name in ("traffic", "security", "splitter")]
    arms = table.get("arms")
    for index, arm in enumerate(arms if isinstance(arms, list) else ()):
        if isinstance(arm, dict):
            where = f"arms[{index}]"
            named += [(where, arm), *((f"{where}.{kind}", arm.get(kind)) for kind in ("openai", "oip"))]
    for where, part in named:
        for key in (*FILE_KEYS, "trace", "conversations", "tokenizer"):
            if isinstance(part, dict) and isinstance(name := part.get(key), str) and name:
                path = folder / expanded(name, f"{where}.{key}")
                if key != "tokenizer" or path.exists() or name.startswith((".", "~")):
                    part[key] = str(path.resolve())
