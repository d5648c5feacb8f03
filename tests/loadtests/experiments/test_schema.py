"""The schema of experiments is current, and takes what `tailgate run` takes."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import jsonschema
import pytest

from tailgate.loadtests.experiments.files import builtin_names, builtin_text
from tailgate.loadtests.experiments.model import json_schema

SCHEMA = Path(__file__).resolve().parents[3] / "docs" / "schema" / "experiment.schema.json"
VALIDATOR = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8")))


def test_the_schema_is_that_of_the_models() -> None:
    assert SCHEMA.read_text(encoding="utf-8") == json_schema(), "run `make schema`"


@pytest.mark.parametrize("name", builtin_names())
def test_a_built_in_experiment_is_valid(name: str) -> None:
    assert [error.message for error in VALIDATOR.iter_errors(tomllib.loads(builtin_text(name)))] == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("duration_s", "duration"),
        ('preset = "eager"', 'preset = "fast"'),
        ("rate = ", 'rate = "x" # '),
    ],
)
def test_a_wrong_key_or_value_is_not_valid(old: str, new: str) -> None:
    text = builtin_text("demo").replace(old, new)
    assert text != builtin_text("demo")
    assert not VALIDATOR.is_valid(tomllib.loads(text))
