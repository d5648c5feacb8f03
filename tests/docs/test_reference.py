"""The reference is complete, and the schema of experiments takes what `tailgate run` takes and pages show."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from docs.generate import QUESTIONS, pages
from tailgate.analysis.judging.verdict import KIND_ORDER
from tailgate.loadtests.experiments.files import builtin_names, builtin_text

ROOT = Path(__file__).resolve().parents[2]
PAGES = pages()
WRITTEN = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in ROOT.glob("docs/**/*.md")}
SCHEMA = json.loads(PAGES["schema/experiment.schema.json"])
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
_BLOCK = re.compile(r"^```toml\n(.*?)^```$", re.M | re.S)
# What makes an arm of a table that an example shows by itself.
_EXTERNAL = {"name": "server", "address": "x:1", "model_name": "m"}


def wrong(table: dict[str, Any]) -> list[str]:
    return [error.message for error in VALIDATOR.iter_errors(table)]


def test_every_key_is_described() -> None:
    tables = {"Experiment": SCHEMA, **SCHEMA["$defs"]}
    keys = {f"{table}.{key}": value for table, part in tables.items() for key, value in part["properties"].items()}
    assert [key for key, value in keys.items() if not value.get("description")] == []


def test_every_kind_of_gate_has_its_question() -> None:
    assert {item.kind for item in QUESTIONS} == set(KIND_ORDER)
    golden = json.loads((ROOT / "tests/golden/demo/summary.json").read_text(encoding="utf-8"))
    for gate in golden["gates"]:
        assert any(gate["gate"].startswith(item.gate) for item in QUESTIONS), gate["gate"]


@pytest.mark.parametrize("name", builtin_names())
def test_a_built_in_experiment_is_valid(name: str) -> None:
    assert wrong(tomllib.loads(builtin_text(name))) == []


@pytest.mark.parametrize(
    "text", [pytest.param(text, id=page) for page, text in (WRITTEN | PAGES).items() if "```toml" in text]
)
def test_examples_on_a_page_are_valid(text: str) -> None:
    for block in _BLOCK.findall(text):
        table = {"name": "example", "traffic": {"rate": 1.0}, **tomllib.loads(block)}
        if isinstance(arm := table.get("arms"), dict):
            kind = next((key for key in ("openai", "oip") if key in arm), None)
            table["arms"] = [{**arm, **({"preset": "eager"} if kind is None else {**_EXTERNAL, "kind": kind})}]
        assert wrong(table) == [], block


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("duration_s", "duration"),
        ('preset = "eager"', 'preset = "fast"'),
        ("rate = ", 'rate = "x" # '),
        ("p99_", "p0_"),
    ],
)
def test_a_wrong_key_or_value_is_not_valid(old: str, new: str) -> None:
    text = builtin_text("demo").replace(old, new)
    assert text != builtin_text("demo")
    assert wrong(tomllib.loads(text))
