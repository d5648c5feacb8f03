"""Each setting is as old as the oldest run that is kept, or somebody decided what it was before."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from analysis.records.added_settings import ADDED
from loadtests.experiments.reading import load
from loadtests.experiments.writing import to_table

OLDEST = Path(__file__).parents[3] / "benchmarks/results/h200-llama-3.2-1b-from-outside/experiment.toml"
# Where and how often, and tables that runs may differ in or lack, as joining knows.
APART = ("bed.", "rollout.", "security.")
# Open: whoever adds a setting lists it among ADDED with what was done before, or here if that is not known or not one
# value. Then runs that lack it are joined with others by --allow-different alone.
UNKNOWN = ("slo.", "goodput.", "compile.options.", "compile.dynamic")


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


def test_a_new_setting_is_decided_on() -> None:
    older = keys_of(tomllib.loads(OLDEST.read_text(encoding="utf-8")))
    new = set(keys_of(to_table(load("demo")))) - set(older)
    assert {key for key in new if key not in ADDED and not key.startswith((*APART, *UNKNOWN))} == set()


def test_what_was_before_is_the_default_of_today() -> None:
    defaults = keys_of(to_table(load("case-ab")))
    assert {key: defaults.get(key) for key in ADDED} == dict(ADDED)
