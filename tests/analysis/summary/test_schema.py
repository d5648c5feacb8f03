"""docs/schema: what the published schema promises, and that no summary holds what it does not describe."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from analysis.frontier.step_times import StepCell
from analysis.judging.rates import RATES
from analysis.records.event_kinds import EVENT_KINDS
from analysis.run.memory import FIGURES
from analysis.run.references import FIGURES as REFERENCE_FIGURES
from analysis.run.spikes import CAUSES
from analysis.settings.metrics import JUDGED_METRICS
from analysis.summary import summary as summaries
from analysis.summary.summary import EXIT_CODES, SCHEMA, analyze, write_summary
from tests.fakes.runs import FakeRun, write_run
from tests.fakes.summary_schema import FOLDER, PUBLISHED, closed, faults, hold, hold_file

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
# Where a run may say more than is described: what machines, replicas and measurements name themselves.
OPEN = {
    ("environment",),
    ("environment", "cpu"),
    ("environment", "clock"),
    ("parity", "control", "figures"),
    ("parity", "arms", "measured", "figures"),
    ("bed", "machines"),
}


def golden(name: str) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((GOLDEN / name / "summary.json").read_text(encoding="utf-8"))
    return summary


def subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    for item in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from subschemas(item)
    if isinstance(schema, dict):
        yield schema


def objects(value: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Every object in `value` with the keys that lead to it; of a list only the first."""
    if isinstance(value, list):
        yield from objects(value[0], place) if value else ()
    elif isinstance(value, dict):
        yield place, value
        for key, item in value.items():
            yield from objects(item, (*place, key))


def firsts(value: Any) -> Any:
    """`value` with the first item of every list alone."""
    if isinstance(value, list):
        return [firsts(item) for item in value[: 4 if value and not isinstance(value[0], (dict, list)) else 1]]
    return {key: firsts(item) for key, item in value.items()} if isinstance(value, dict) else value


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


def test_a_key_that_is_not_described_is_found_wherever_it_is() -> None:
    known = firsts(golden("demo"))
    places = [place for place, _ in objects(known)]
    assert len(places) > 60
    named = 0
    for index, place in enumerate(places):
        changed = copy.deepcopy(known)
        list(objects(changed))[index][1]["surprise"] = [{"deep": 1}]
        found = list(faults(changed))
        if place in OPEN:
            assert found == [], place
        else:
            named += "surprise" in found[0] if found else 0
            assert found, place
    assert named > 40, "the fault names the key"


def test_a_reader_with_an_older_copy_passes_over_what_was_added() -> None:
    changed = golden("demo") | {"added": 1}
    changed["arms"][0]["added"] = {"key": None}
    changed["events"][0]["kind"] = "relink"
    Draft202012Validator(PUBLISHED).validate(changed)
    assert len(list(faults(changed))) == 3


def test_a_summary_with_a_key_more_breaks_the_test_that_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = summaries._summary
    monkeypatch.setattr(summaries, "_summary", lambda *args: real(*args) | {"surprise": 1})
    directory = write_run(tmp_path / "run", FakeRun(duration_s=60.0, rate=2.0, gates={"draws": 99}))
    with pytest.raises(AssertionError, match="surprise"):
        analyze(directory)


def test_what_another_process_wrote_is_looked_at_too(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_summary(golden("demo") | {"surprise": 1}, path)
    with pytest.raises(AssertionError, match="surprise"):
        hold_file(path)
    path.write_text("{", encoding="utf-8")
    hold_file(path)
    path.unlink()


def vocabulary(*keys: str) -> list[Any]:
    """The values that the schema lists at this place."""
    schema: Any = PUBLISHED
    for key in keys:
        schema = schema[key]
    values: list[Any] = schema.get("enum") or schema["examples"]
    return values


def test_its_vocabularies_are_those_of_the_code() -> None:
    top, defs = ("properties",), ("$defs",)
    assert set(vocabulary(*top, "events", "items", "properties", "kind")) == set(EVENT_KINDS)
    assert set(vocabulary(*defs, "metric")) == set(JUDGED_METRICS)
    assert set(vocabulary(*defs, "verdict")) == set(EXIT_CODES)
    assert set(vocabulary(*top, "exit_code")) == set(EXIT_CODES.values())
    assert set(vocabulary(*defs, "cause")) == set(CAUSES)
    assert set(vocabulary(*top, "rates", "items", "properties", "rate")) == set(RATES)
    arm = (*top, "arms", "items", "properties")
    assert set(vocabulary(*arm, "memory", "propertyNames")) == set(FIGURES)
    references = (*top, "bed", "properties", "references", "items", "properties")
    assert set(vocabulary(*references, "figures", "propertyNames")) == set(REFERENCE_FIGURES)
    cells = PUBLISHED["properties"]["frontier"]["properties"]["step_times"]["properties"]["cells"]["items"]
    assert set(cells["required"]) == {*StepCell.__slots__, "ratios"}


def test_closing_leaves_open_what_says_so() -> None:
    assert closed({"required": [], "additionalProperties": True})["additionalProperties"] is True
    assert closed({"required": []})["additionalProperties"] is False
