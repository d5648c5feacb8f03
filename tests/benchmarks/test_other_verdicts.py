from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from benchmarks.case import OTHERS, judged_cases
from benchmarks.other_verdicts import markdown, other_verdicts

KEPT: Mapping[str, Any] = json.loads(OTHERS.read_text(encoding="utf-8"))


def rows(case: str) -> list[Mapping[str, Any]]:
    return [row for row in KEPT["rows"] if row["case"] == case]


def test_what_other_rules_say_is_what_was_kept() -> None:
    document = other_verdicts(judged_cases())
    assert markdown(document) == markdown(KEPT)
    for row, kept in zip(document["rows"], KEPT["rows"], strict=True):
        for rule, said in row["rules"].items():
            figures, before = ({**one, "verdict": 0, "class": 0} for one in (said, kept["rules"][rule]))
            assert figures == pytest.approx(before, rel=2e-3, abs=1e-3)
        assert {**row, "rules": None} == {**kept, "rules": None}
    assert {**document, "rows": None} == {**KEPT, "rows": None}


def test_every_case_whose_gates_compare_latencies_is_there() -> None:
    compared = set()
    for name, (_, verdict) in judged_cases().items():
        if any(gate["gate"].startswith("noninferiority") for gate in verdict["gates"]):
            compared.add(name)
    assert {row["case"] for row in KEPT["rows"]} == compared


def test_rules_see_neither_the_requests_that_failed_nor_why() -> None:
    for row in rows("naive"):
        assert row["requests"]["naive"] == {"sent": 251, "completed": 179, "failed": 72, "without_end": 0}
        assert row["rules"]["kayenta_requests"]["points"] == 179
        assert row["rules"]["kayenta_minutes"] == {
            **row["rules"]["kayenta_minutes"],
            "verdict": "PASS",
            "points": 1,  # nothing ended in the other two minutes
            "control_points": 3,
        }
        assert row["tailgate"]["overall"] == "FAIL"


def test_beside_the_rules_stands_the_verdict_on_the_arm_and_not_on_the_run() -> None:
    verdicts = {row["arm"]: row["tailgate"]["overall"] for row in rows("planted-decode-h200")}
    assert verdicts == {"decode-plus-5": "INCONCLUSIVE", "decode-plus-10": "INCONCLUSIVE", "decode-plus-20": "FAIL"}


def test_trials_in_a_cold_start_leave_nothing_to_compare() -> None:
    for row in rows("staged-heavy-neighbour"):
        assert {said["verdict"] for said in row["rules"].values()} == {"cannot say"}
