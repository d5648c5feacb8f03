"""docs/schema: what the published schema promises, and that no summary holds what it does not describe."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from analysis.summary import summary as summaries
from analysis.summary.summary import SCHEMA, analyze
from tests.fakes.runs import FakeRun, write_run
from tests.fakes.summary_schema import FOLDER, PUBLISHED, hold

GOLDEN = Path(__file__).resolve().parents[2] / "golden"


def golden(name: str) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((GOLDEN / name / "summary.json").read_text(encoding="utf-8"))
    return summary


def subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    for item in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from subschemas(item)
    if isinstance(schema, dict):
        yield schema


def test_it_is_a_schema_and_carries_its_version() -> None:
    Draft202012Validator.check_schema(PUBLISHED)
    assert PUBLISHED["$id"] == f"urn:tailgate:schema:summary:{SCHEMA}"
    assert PUBLISHED["properties"]["schema"]["const"] == SCHEMA == golden("demo")["schema"]
    assert [path.name for path in FOLDER.glob("*.json")] == [f"summary-{SCHEMA}.schema.json"]


@pytest.mark.parametrize("name", ["demo", "rollout"])
def test_a_golden_summary_is_as_published(name: str) -> None:
    hold(golden(name), name)


def test_every_number_says_what_it_is() -> None:
    unsaid = [
        key
        for schema in subschemas(PUBLISHED)
        for key, item in (schema.get("properties") or {}).items()
        if {"number", "integer"} & set(item.get("type", ())) or item.get("type") in ("number", "integer")
        if not item.get("description")
    ]
    assert unsaid == []


def test_a_summary_with_a_key_more_breaks_the_test_that_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = summaries._summary
    monkeypatch.setattr(summaries, "_summary", lambda *args: real(*args) | {"surprise": 1})
    directory = write_run(tmp_path / "run", FakeRun(duration_s=60.0, rate=2.0, gates={"draws": 99}))
    with pytest.raises(AssertionError, match="surprise"):
        analyze(directory)
