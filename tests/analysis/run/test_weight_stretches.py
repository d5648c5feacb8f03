"""Which requests belong to which weights, and what the sample ratio says of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.judging.checks.traffic import check_shares_by_stretch
from analysis.judging.judgement import judge
from analysis.records.run_records import read_run
from analysis.records.weight_journal import BY_HAND, WeightChange, append
from analysis.run.run import Run
from analysis.run.weight_stretches import weight_stretches
from analysis.summary.summary import analyze
from tests.fakes.runs import SECOND, FakeRun, start_of, write_run

HALF = FakeRun(design="split", duration_s=600, rate=4, gates={"draws": 99}, trials=2)
START = WeightChange(at_ns=start_of(2) - SECOND, weights={"eager": 1, "compiled": 1}, why="as configured", trial=2)


def by_hand(at_s: float, **weights: int) -> WeightChange:
    at_ns = start_of(2) + int(at_s * SECOND)
    return WeightChange(
        at_ns=at_ns, done_ns=at_ns + SECOND, weights=weights, why="it was otherwise", action=BY_HAND, trial=2
    )


def changed(path: Path, *changes: WeightChange) -> Run:
    directory = write_run(path / "run", HALF)
    for item in changes:
        append(directory, item)
    return Run.of(read_run(directory))


def test_requests_around_a_change_are_of_neither_stretch_and_other_trials_are_their_own(tmp_path: Path) -> None:
    run = changed(tmp_path, START, by_hand(300, eager=3, compiled=1))
    first, before, after = weight_stretches(run)
    assert (first.weights, before.weights, after.weights) == (
        {"eager": 1, "compiled": 1},
        {"eager": 1, "compiled": 1},
        {"eager": 3, "compiled": 1},
    )
    sent, trial = run.requests.sent_ns, run.requests.trial
    assert set(trial[first.rows]) == {1}
    assert sent[before.rows].max() < start_of(2) + 299.75 * SECOND
    assert sent[after.rows].min() >= start_of(2) + 301 * SECOND
    apart = len(run.requests) - sum(int(item.rows.sum()) for item in (first, before, after))
    assert 0 < apart < 30


def test_weights_that_were_set_by_hand_are_no_fault(tmp_path: Path) -> None:
    run = changed(tmp_path, START, by_hand(300, eager=2, compiled=2))
    (check,) = [item for item in judge(run).checks if item.check == "sample ratio"]
    assert check.ok, check.reason


def test_changes_of_weights_are_in_the_summary(tmp_path: Path) -> None:
    run = changed(tmp_path, START, by_hand(300, eager=2, compiled=2))
    changes = analyze(run.records.directory)["weights"]["changes"]
    assert [(row["action"], row["offset_s"], row["trial"]) for row in changes] == [
        ("start", -1, 2),
        ("set by hand", 300, 2),
    ]


def test_a_stretch_that_does_not_keep_its_weights_is_a_fault(tmp_path: Path) -> None:
    run = changed(tmp_path, START, by_hand(300, eager=9, compiled=1))
    (check,) = [item for item in judge(run).checks if item.check == "sample ratio"]
    assert not check.ok
    assert "sessions in stretch 3 (expected " in check.reason


@pytest.mark.parametrize(
    ("stretches", "ok"),
    [
        ([], True),
        ([({"a": 0, "b": 0}, {"a": 1, "b": 1})], True),
        ([({"a": 99, "b": 1}, {"a": 99, "b": 1})], True),
        ([({"a": 5, "b": 2}, {"a": 99, "b": 1})], True),  # two of seven at 1 %: p = .002, twice
        ([({"a": 100, "b": 1}, {"a": 1, "b": 0})], False),
        ([({"a": 50, "b": 50}, {"a": 1, "b": 1}), ({"a": 50, "b": 50}, {"a": 9, "b": 1})], False),
    ],
)
def test_shares_are_held_to_the_weights_of_their_stretch(
    stretches: list[tuple[dict[str, int], dict[str, float]]], ok: bool
) -> None:
    assert check_shares_by_stretch(stretches).ok is ok
