"""Each setting is as old as the oldest run that is kept, or somebody decided what it was before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from analysis.records.added_settings import ADDED
from loadtests.experiments.reading import load
from loadtests.experiments.writing import to_table


def keys_of(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        if key == "arms":
            for arm in value:
                found |= keys_of({name: arm[name] for name in ("shapes", "compile", "model", "engine") if name in arm})
        elif isinstance(value, Mapping):
            found |= keys_of(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def test_what_was_before_is_the_default_of_today() -> None:
    defaults = keys_of(to_table(load("case-ab")))
    assert {key: defaults.get(key) for key in ADDED} == dict(ADDED)
