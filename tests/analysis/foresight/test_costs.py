"""When an arm pays: GPUs for a load, the start against what is saved, and the interval of the search all the way."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from analysis.foresight.costs import NEVER, BreakEven, Capacity, Span, Start, break_even_rows, break_evens, weigh
from analysis.judging.judgement import judge
from analysis.records.run_records import read_run
from analysis.run.run import Run
from analysis.settings.rollout import Rollout
from analysis.summary.summary import analyze
from tests.analysis.judging.test_load_steps import write_search
from tests.fakes.runs import EAGER, FakeArm, FakeRun, write_run

SECOND = 1_000_000_000
START = Start(serving_s=300.0, warmup_s=290.0)
LOAD = Rollout(load_rps=200.0)


def held(seen: float | None, low: float | None = None, high: float | None = None, trials: int = 2) -> Capacity:
    """What one replica holds; without limits the search was exact."""
    exact = low is None and high is None
    span = Span(low=seen, seen=seen, high=seen) if exact else Span(low=low, seen=seen, high=high)
    return Capacity(source="search", rps=span, trials=trials)


def weighed(own: Capacity, control: Capacity | None, rollout: Rollout = LOAD, **more: Any) -> BreakEven:
    facts = {"start": START, "verdict": "PASS"} | more
    return weigh("new", own=own, control=control, rollout=rollout, **facts)


def test_gpus_are_whole_replicas_and_pay_by_those_that_are_saved() -> None:
    found = weighed(held(16.0), held(9.0), Rollout(load_rps=200.0, gpus_per_replica=2))
    assert found.gpus.seen == 2 * math.ceil(200 / 16)
    assert found.start_gpu_s.seen == 26 * 300
    saved = 2 * math.ceil(200 / 9) - 26
    assert found.saved.seen == saved
    assert found.hours.seen == pytest.approx(26 * 300 / saved / 3600)
    assert found.requests.seen == pytest.approx(found.hours.seen * 3600 * 200)


def test_without_a_load_one_replica_pays_by_the_request() -> None:
    found = weighed(held(16.0), held(8.0), Rollout())
    assert found.gpus == Span()
    assert found.saved.seen == pytest.approx(1 / 8 - 1 / 16)
    assert found.requests.seen == pytest.approx(300 / (1 / 8 - 1 / 16))
    assert found.hours.seen == pytest.approx(found.requests.seen / 16 / 3600)
    assert weighed(held(16.0), held(8.0), Rollout(gpus_per_replica=4)).requests.seen == found.requests.seen


@pytest.mark.parametrize("rollout", [LOAD, Rollout()])
@pytest.mark.parametrize("own", [8.0, 5.0])
def test_an_arm_that_is_no_faster_never_pays(own: float, rollout: Rollout) -> None:
    found = weighed(held(own), held(8.0), rollout)
    assert found.hours == found.requests == Span(low=NEVER, seen=NEVER, high=NEVER)
    assert "It never pays" in found.reason


def test_a_faster_arm_that_saves_no_whole_gpu_never_pays_at_that_load() -> None:
    assert weighed(held(16.0), held(8.0), Rollout(load_rps=7.0)).hours.seen == NEVER


def test_the_limits_are_the_far_ends_of_both_intervals() -> None:
    own, control = held(16.0, 12.0, 20.0), held(8.0, 7.0, 10.0)
    found = weighed(own, control)
    ends = [
        weighed(held(mine), held(theirs)) for mine, theirs in itertools.product((12.0, 16.0, 20.0), (7.0, 8.0, 10.0))
    ]
    assert found.saved.low == min(end.saved.seen or 0.0 for end in ends)
    assert found.saved.high == max(end.saved.seen or 0.0 for end in ends)
    assert found.hours.low == min(end.hours.seen or 0.0 for end in ends)
    assert found.hours.high == max(end.hours.seen or 0.0 for end in ends)
    assert (found.hours.low or 0) < (found.hours.seen or 0) < (found.hours.high or 0) < NEVER


def test_overlapping_intervals_leave_never_open() -> None:
    found = weighed(held(10.0, 7.0, 13.0), held(8.0, 7.0, 10.0))
    assert (found.hours.seen or 0.0) < NEVER
    assert found.hours.high == NEVER
    assert "latest never" in found.reason
    slower = weighed(held(7.0, 6.0, 13.0), held(8.0, 7.0, 10.0))
    assert slower.hours.seen == NEVER
    assert "As seen its start is never paid" in slower.reason


def test_an_open_end_of_the_search_stays_open() -> None:
    found = weighed(held(16.0, 12.0, None), held(8.0, 7.0, 10.0))
    assert (found.gpus.low, found.hours.low) == (None, None)
    assert found.hours.high is not None
    blind = weighed(held(None, None, None), held(8.0))
    assert blind.saved == Span()
    assert "not known" in blind.reason


def test_a_start_that_was_not_recorded_leaves_the_price_unknown() -> None:
    found = weighed(held(16.0), held(8.0), start=Start())
    assert (found.hours.seen, found.start_gpu_s.seen) == (None, None)
    assert "not recorded" in found.reason
    assert weighed(held(7.0), held(8.0), start=Start()).hours.seen == NEVER, "what saves nothing needs no price"


def test_a_request_costs_the_gpus_that_carry_the_load_busy_or_not() -> None:
    priced = Rollout(load_rps=200.0, gpu_hour_price=3.6, currency="EUR")
    row = weighed(held(16.0, 12.0, 20.0), held(8.0), priced, tokens=50.0)
    (found,) = break_even_rows([row], priced)["arms"]
    each = [gpus / 200.0 * 1e3 * 3.6 / 3600 for gpus in (10, 13, 17)]
    assert list(found["cost"]["per_1000_requests"].values()) == pytest.approx(each)
    assert found["cost"]["per_million_tokens"]["seen"] == pytest.approx(each[1] * 1000 / 50)
    (free,) = break_even_rows([row], LOAD)["arms"]
    assert free["cost"] is None


def test_without_a_load_a_request_costs_its_share_of_a_replica_at_its_limit() -> None:
    priced = Rollout(gpu_hour_price=3.6, gpus_per_replica=2)
    (found,) = break_even_rows([weighed(held(16.0, 12.0, None), held(8.0), priced)], priced)["arms"]
    assert found["cost"]["per_1000_requests"] == {
        "low": None,
        "seen": pytest.approx(2 / 16),
        "high": pytest.approx(2 / 12),
    }
    assert found["cost"]["per_million_tokens"] == dict.fromkeys(("low", "seen", "high")), "answers were not counted"


def test_what_fails_its_gates_says_so() -> None:
    assert "It is FAIL by its gates" in weighed(held(16.0), held(8.0), verdict="FAIL").reason
    assert "by its gates" not in weighed(held(16.0), held(8.0), verdict="PASS").reason


def test_one_start_decides_nothing() -> None:
    once = Capacity(source="search", rps=Span(seen=16.0), trials=1)
    found = weighed(once, held(8.0))
    assert "new is seen to hold 16 requests/s in one start, which decides nothing" in found.reason
    assert (found.gpus.low, found.gpus.seen, found.gpus.high) == (None, 13, None)
    nothing = weighed(Capacity(source="search", rps=Span(), trials=1), held(8.0))
    assert "is seen to hold none of its loads in one start" in nothing.reason


# --- From records -----------------------------------------------------------------------------------------------------


def started(seconds: float) -> dict[str, Any]:
    items = {"process": 1.0, "import": 2.0, "load": 1.0, "prefill batch 1 × length 32, context 32": seconds}
    return {
        "items_ns": {name: int(value * SECOND) for name, value in items.items()},
        "memory_bytes": {"device_peak": 2**30},
    }


RATES = [[4.0, 8.0, 16.0, 32.0], [7.0, 10.0, 12.0, 18.0]]


def test_a_search_weighs_every_arm_against_the_control(tmp_path: Path) -> None:
    folder = write_search(
        tmp_path / "run", {"eager": 9, "new": 17}, RATES, startup={"eager": started(1), "new": started(300)}
    )
    run = Run.of(read_run(folder))
    control, new = break_evens(run, judge(run), LOAD)
    assert (control.control, control.source, control.hours) == (True, "search", Span())
    assert new.start == Start(serving_s=304.0, warmup_s=300.0, compile_s=None, memory_bytes=2**30)
    assert (control.rps.seen, new.rps.seen) == (8, 16)
    assert (control.gpus.seen, new.gpus.seen) == (25, 13)
    assert new.hours.seen == pytest.approx(13 * 304 / 12 / 3600)


@pytest.mark.parametrize("starts", [1, 2])
def test_an_arm_has_an_interval_where_the_frontier_gives_it_one(tmp_path: Path, starts: int) -> None:
    """The two are of the same steps: where the frontier leaves an arm open, nothing is weighed as if it were known."""
    summary = analyze(write_search(tmp_path / "run", {"eager": 9, "new": 17}, RATES[:starts]))
    surely = {row["arm"]: row for row in summary["frontier"]["arms"]}
    for row in summary["break_even"]["arms"]:
        assert (row["rps"]["low"] is None) == (surely[row["arm"]]["low_rps"] is None) == (starts == 1)
        assert row["rps"]["seen"] is not None
        if starts > 1:
            assert surely[row["arm"]]["low_rps"] < row["rps"]["low"] < row["rps"]["high"], "of all arms at once, or one"


def test_replicas_share_what_an_arm_holds(tmp_path: Path) -> None:
    arms = [{"name": name, "replicas": [f"{name}-0", f"{name}-1"], "config": {}} for name in ("eager", "new")]
    run = Run.of(read_run(write_search(tmp_path / "run", {"eager": 9, "new": 17}, RATES, arms=arms)))
    found = break_evens(run, judge(run), LOAD)
    assert [row.rps.seen for row in found] == [4, 8]


def test_the_summary_of_a_search_has_it_and_that_of_a_plain_run_only_if_asked(tmp_path: Path) -> None:
    search = analyze(write_search(tmp_path / "search", {"eager": 9, "new": 17}, RATES))
    assert [row["arm"] for row in search["break_even"]["arms"]] == ["eager", "new"]
    folder = write_run(tmp_path / "plain", FakeRun(duration_s=120, slo={"p99_ttft_ms": 2000}))
    assert "break_even" not in analyze(folder)
    with (folder / "experiment.toml").open("a") as file:
        file.write("[rollout]\nload_rps = 50\n")
    assert analyze(folder)["break_even"]["load_rps"] == 50


@pytest.mark.parametrize(
    ("limit", "known", "said"),
    [(2000, ("low",), "it holds at least that"), (20, ("high",), "it holds less"), (None, (), "is not known")],
)
def test_without_a_search_only_what_was_offered_is_known(
    tmp_path: Path, limit: float | None, known: tuple[str, ...], said: str
) -> None:
    slo = {} if limit is None else {"p99_ttft_ms": limit}
    run = Run.of(read_run(write_run(tmp_path / "run", FakeRun(duration_s=150, slo=slo))))
    for row in break_evens(run, judge(run), LOAD):
        ends = {name: getattr(row.rps, name) for name in ("low", "seen", "high")}
        assert {name for name, value in ends.items() if value is not None} == set(known)
        assert all(value == pytest.approx(4.0, rel=0.05) for value in ends.values() if value is not None)
        assert said in row.reason
        assert (row.saved, row.hours) == (Span(), Span())


def test_an_arm_without_a_request_is_unknown_and_no_traceback(tmp_path: Path) -> None:
    arms = (EAGER, FakeArm(name="compiled", weight=0.0))
    run = Run.of(read_run(write_run(tmp_path / "run", FakeRun(duration_s=60, design="split", arms=arms))))
    found = break_evens(run, judge(run), Rollout())
    assert [row.source for row in found] == ["unknown", "unknown"]
    rows = break_even_rows(found, Rollout())
    assert rows["arms"][1]["hours"] == {"low": None, "seen": None, "high": None}


def test_never_is_a_word_in_the_summary() -> None:
    rows = break_even_rows([weighed(held(5.0), held(8.0))], LOAD)
    assert rows["arms"][0]["hours"] == {"low": "never", "seen": "never", "high": "never"}
