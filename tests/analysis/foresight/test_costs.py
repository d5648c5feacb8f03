"""When an arm pays for its start, and the energy of a token."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from analysis.foresight.costs import NEVER, BreakEven, Capacity, Span, Start, break_evens, weigh
from analysis.foresight.energies import step_energies
from analysis.judging.judgement import judge
from analysis.records.run_records import read_run
from analysis.run.run import Run
from analysis.settings.rollout import Rollout
from tests.analysis.judging.test_load_steps import SETTLE_S, STEP_S, write_search
from tests.fakes.resources import sample, tell

SECOND = 1_000_000_000
START = Start(serving_s=300.0, warmup_s=290.0)
LOAD = Rollout(load_rps=200.0)


def held(seen: float | None, low: float | None = None, high: float | None = None, trials: int = 2) -> Capacity:
    """Return what one replica holds; without limits the search was exact."""
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


@pytest.mark.parametrize("rollout", [LOAD, Rollout()])
@pytest.mark.parametrize("own", [8.0, 5.0])
def test_an_arm_that_is_no_faster_never_pays(own: float, rollout: Rollout) -> None:
    found = weighed(held(own), held(8.0), rollout)
    assert found.hours == found.requests == Span(low=NEVER, seen=NEVER, high=NEVER)
    assert "It never pays" in found.reason


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


KNEES = {"eager": 20.0, "new": 50.0}
STEP_RATES = [[8, 16], [16, 32]]
CARDS = {"eager": "cuda:0", "new": "cuda:1"}


def searched(folder: Path, **columns: Any) -> Path:
    directory = tell(write_search(folder / "run", KNEES, STEP_RATES), devices=CARDS)
    return sample(directory, "device", "cuda:0", {"power_w": 300.0} | columns)


def test_a_token_takes_the_power_of_the_card_over_the_tokens_of_the_step(tmp_path: Path) -> None:
    run = Run.of(read_run(searched(tmp_path)))
    steps = step_energies(run)
    assert [(step.arm, step.trial, step.rate) for step in steps] == [
        ("eager", number, rate) for number, rates in enumerate(STEP_RATES, 1) for rate in rates
    ]
    each = run.requests.output_tokens[0]
    for step in steps:
        assert step.watts == pytest.approx(300.0)
        assert step.tokens == pytest.approx(step.rate * (STEP_S - SETTLE_S) * each, rel=0.05)
        assert step.token_j == pytest.approx(300.0 / (step.rate * each), rel=0.05)
