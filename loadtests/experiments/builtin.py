"""The experiments that come with the package."""

from __future__ import annotations

from importlib import resources

_FOLDER = resources.files("loadtests") / "experiments"


def builtin_names() -> list[str]:
    """Their names."""
    return sorted(item.name.removesuffix(".toml") for item in _FOLDER.iterdir() if item.name.endswith(".toml"))


def builtin_text(name: str) -> str:
    """The TOML of the one called `name`."""
    return (_FOLDER / f"{name}.toml").read_text(encoding="utf-8")
