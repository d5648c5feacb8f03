"""The quick part of `python -m benchmarks.simulation.backlog`: a run or two of each kind of server, fixed seeds."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.simulation.backlog import CASES, Judged, judge, live, share

QUICK = {
    "load 80 %": 2,
    "load 95 %": 1,
    "stalls of 20 s": 1,
    "six close together": 2,
    "collections": 1,
    "private stalls": 2,
    "host stalls": 1,
    "bursts that jam": 1,
    "steps": 1,
    "steps that grow": 1,
    "rows bound by memory": 1,
    "static batches": 1,
    "static batches, load 60 %": 1,
    "two replicas": 1,
    "no stalls reported": 1,
}


@pytest.fixture(scope="module")
def runs() -> list[Judged]:
    return [judge(CASES[name], seed) for name, seeds in QUICK.items() for seed in range(seeds)]


def test_spikes_that_compiles_caused_are_put_down_to_them_and_no_others(runs: list[Judged]) -> None:
    caused, called, right = (sum(getattr(run, name) for run in runs) for name in ("caused", "called", "right"))
    assert caused >= 40
    assert share(right, caused) >= 0.94
    assert share(right, called) >= 0.98


def test_spikes_of_other_causes_are_there_to_be_mistaken() -> None:
    judged = judge(CASES["private stalls"], 0)
    assert judged.spikes > judged.caused > 0


def test_requests_in_a_backlog_are_known_and_their_seconds_add_up(runs: list[Judged]) -> None:
    delayed, called = (sum(getattr(run, name) for run in runs) for name in ("delayed", "delayed_called"))
    assert share(called, delayed) >= 0.9
    direct, whole, judged = (sum(getattr(run, name) for run in runs) for name in ("direct_s", "delay_s", "judged_s"))
    assert direct < 0.5 * whole, "most of the delay is backlog"
    assert 0.85 * whole <= judged <= 1.1 * whole


def test_the_range_of_p99_without_compiles_holds_the_truth(runs: list[Judged]) -> None:
    for place in (0, 1):
        held = [run.held[place] for run in runs]
        assert None not in held
        assert np.mean([bool(one) for one in held]) >= 0.9


@pytest.mark.parametrize("name", ["client times alone", "shortest first"])
def test_nothing_is_said_of_p99_without_compiles_where_the_queue_cannot_be_replayed(name: str) -> None:
    assert judge(CASES[name], 0).held == (None, None)


def test_the_truth_is_a_delay_that_compiles_alone_made() -> None:
    lived = live(CASES["private stalls"], 1)
    assert (lived.e2e_delay_ms > -1e-6).all(), "in a queue that keeps its order nobody gains by a stall"
    assert (lived.e2e_delay_ms >= lived.direct_ms - 1e-6).all()
    first = min(event.start_ns for event in lived.run.events)
    before = lived.run.requests.end_ns < first
    assert before.any()
    assert np.abs(lived.e2e_delay_ms[before]).max() < 1e-6
