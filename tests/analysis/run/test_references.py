from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from analysis.run.references import references_of


def trial(*rows: dict[str, Any], number: int = 1) -> Any:
    """A trial whose references are the rows."""
    return SimpleNamespace(number=number, info={"references": [{"host": "run", **row} for row in rows]})


def python_of(*trials: Any) -> list[float | None]:
    return [row.figures.get("python_ms") for row in references_of(trials)]


def test_python_that_ran_on_every_processor_is_of_the_host_whichever_card_was_measured() -> None:
    rows = [
        {"device": f"cuda:{card}", "when": when, "python_ms": ms, "launch_us": 6.0 + card, "processors": 32}
        for when, card, ms in (("before", 0, 8.0), ("before", 1, 18.0), ("after", 0, 10.0), ("after", 1, 10.0))
    ]
    assert python_of(trial(*rows)) == pytest.approx([12.0, 12.0, 10.0, 10.0])
    assert [row.figures["launch_us"] for row in references_of([trial(*rows)])] == [6.0, 7.0, 6.0, 7.0]


def test_trials_are_not_taken_together() -> None:
    rows = [{"device": "cuda:0", "when": "before", "python_ms": ms, "processors": 32} for ms in (8.0, 12.0)]
    assert python_of(trial(rows[0]), trial(rows[1], number=2)) == pytest.approx([8.0, 12.0])


def test_a_card_that_could_not_be_measured_takes_nothing_from_the_other() -> None:
    rows = [
        {"device": "cuda:0", "when": "before", "python_ms": 8.0, "processors": 32},
        {"device": "cuda:1", "when": "before", "error": "taken"},
    ]
    assert python_of(trial(*rows)) == [pytest.approx(8.0), None]
