from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from analysis.blackbox.agreement import agreement_of, is_explained
from analysis.blackbox.firstseen import SlowFirst
from analysis.blackbox.stalls import COMPILE, UNKNOWN, Stall
from analysis.blackbox.view import Outside
from analysis.run.spikes import CompileEvent
from analysis.summary.summary import analyze
from tests.fakes.runs import EAGER, Compile, FakeArm, FakeRun, write_run

S = 1_000_000_000


def stall(start_s: float, seconds: float, cause: str = COMPILE, *, trial: int = 1, replica: str = "new-0") -> Stall:
    return Stall(
        arm="new",
        trial=trial,
        replica=replica,
        start_ns=int(start_s * S),
        end_ns=int((start_s + seconds) * S),
        cause=cause,
        chance=0.0,
        begun=True,
        trigger=-1,
        shape=-1,
        chance_new=0.1,
        chance_as_long=0.1,
        longest=0.5,
        work_s=0.0,
        requests=np.zeros(1, dtype=np.int64),
    )


def outside(*stalls: Stall) -> Outside:
    slow = SlowFirst(first=0, others=0, p_value=1.0, excess_ms=math.nan)
    return Outside(arm="new", stalls=stalls, p_value=0.001, watches=(), slow=slow, shapes_known=True)


def event(start_s: float, seconds: float, *, serving: bool = True, kind: str = "recompile") -> CompileEvent:
    return CompileEvent(
        event_id=f"{start_s}",
        trial=1,
        arm="new",
        replica="new-0",
        kind=kind,
        start_ns=int(start_s * S),
        end_ns=int((start_s + seconds) * S),
        serving=serving,
        stalls=kind != "eager_fallback",
        request_ids=(),
        row={},
    )


def test_stalls_and_compiles_that_overlap_are_the_same() -> None:
    found = agreement_of(outside(stall(10.02, 2.0), stall(50.0, 1.0)), [event(10, 2), event(30, 3)], [4, 4])
    assert (found.telemetry, found.seen, found.called, found.missed, found.extra) == (2, 1, 1, 1, 1)
    assert found.onset_error_ms == pytest.approx(20.0)


def test_a_stall_that_was_seen_and_not_called_is_missed() -> None:
    found = agreement_of(outside(stall(10, 2, UNKNOWN)), [event(10, 2)], [4])
    assert (found.seen, found.called, found.missed, found.extra) == (1, 0, 1, 0)


def test_compiles_at_one_time_are_one_and_one_stall_may_hold_several() -> None:
    events = [event(10, 2), event(11, 0.5), event(12.01, 2)]
    found = agreement_of(outside(stall(10.01, 4)), events, [4, 4, 4])
    assert (found.telemetry, found.called) == (2, 2)
    assert found.onset_error_ms == pytest.approx(10.0), "to the first of them"


def test_a_stall_that_only_touches_a_compile_is_another() -> None:
    found = agreement_of(outside(stall(12.0, 2)), [event(10, 2.02)], [4])
    assert (found.called, found.extra) == (0, 1)


def test_compiles_that_nobody_waited_for_or_that_are_too_short_are_not_asked_for() -> None:
    events = [event(10, 2), event(20, 0.1), event(30, 2, serving=False), event(40, 2, kind="eager_fallback")]
    assert agreement_of(outside(), events, [0, 4, 4, 4]).telemetry == 0


def test_a_call_during_a_short_compile_is_not_extra() -> None:
    assert agreement_of(outside(stall(20, 0.3)), [event(20, 0.1)], [3]).extra == 0


def test_other_trials_and_replicas_do_not_meet() -> None:
    for other in (stall(10, 2, trial=2), stall(10, 2, replica="new-1")):
        found = agreement_of(outside(other), [event(10, 2)], [4])
        assert (found.called, found.extra) == (0, 1)


def test_nothing_agrees_with_nothing() -> None:
    found = agreement_of(outside(), [], [])
    assert (found.telemetry, found.extra) == (0, 0)
    assert math.isnan(found.onset_error_ms)


def test_the_summary_holds_telemetry_against_what_shows_outside(tmp_path: Path) -> None:
    arms = (EAGER, FakeArm(name="compiled", compiles=[Compile(at_s=100, seconds=3), Compile(at_s=200, seconds=3)]))
    summary = analyze(write_run(tmp_path, FakeRun(arms=arms, duration_s=300.0, rate=8.0)))
    rows = {row["name"]: row["blackbox"] for row in summary["arms"]}
    assert rows["compiled"]["agreement"]["telemetry"] == 2
    assert rows["compiled"]["agreement"]["missed"] == 2 - rows["compiled"]["agreement"]["called"]
    assert rows["eager"]["agreement"] is None, "an arm without events has nothing to agree with"


@pytest.mark.parametrize(
    ("events", "explained"),
    [
        ([], False),
        ([event(10.0, 3.0)], True),
        ([event(11.2, 1.8)], True),
        ([event(12.0, 1.0)], False),
        ([event(10.0, 1.0), event(11.0, 0.8, serving=False)], True),
        ([event(10.0, 3.0, kind="background_compile")], False),
        ([event(5.0, 3.0)], False),
    ],
    ids=["none", "all of it", "more than half", "less", "two, one of a warm-up", "in the background", "before it"],
)
def test_a_stall_is_explained_by_compiles_that_last_for_most_of_it(events: list[CompileEvent], explained: bool) -> None:
    assert is_explained(stall(10.0, 3.0), events) is explained


def test_compiles_of_another_replica_explain_no_stall() -> None:
    assert not is_explained(stall(10.0, 3.0, replica="new-1"), [event(10.0, 3.0)])
