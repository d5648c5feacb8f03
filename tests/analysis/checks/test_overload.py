"""Overload and interference, on simulated servers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.simulation.fleet import SLOTS, Fleet, fleet
from tailgate.analysis.arrays import Floats
from tailgate.analysis.checks import overload
from tailgate.analysis.checks.check import Check
from tailgate.analysis.checks.overload import Load, load_of
from tailgate.analysis.checks.traffic import slowdown_during
from tailgate.analysis.judging.judgement import Judgement, judge
from tests.fakes.runs import EAGER, Compile, FakeArm, FakeRun, run_in, write_run


def slowed(factor, *, seed=0, requests=1200, seconds=600.0):
    rng = np.random.default_rng(seed)
    inside = np.zeros(600)
    for start in range(20, 600, 60):
        inside[start : start + 4] = 1.0
    starts = np.sort(rng.uniform(0, seconds, requests))
    drift = 0.2 * np.sin(starts / 40.0)
    excess = drift + 0.3 * rng.standard_normal(requests) + np.log(factor) * inside[starts.astype(int)]
    return slowdown_during(excess, starts, inside, bin_s=1.0, rng=rng)


def test_a_control_that_slows_while_others_compile_is_seen():
    factor, p_value = slowed(1.6)
    assert factor == pytest.approx(1.6, rel=0.1)
    assert p_value is not None
    assert p_value <= 0.05


def test_a_control_that_drifts_by_itself_is_no_interference():
    found = [slowed(1.0, seed=seed) for seed in range(60)]
    assert sum((factor or 0.0) > 1.1 and (p_value or 1.0) <= 0.05 for factor, p_value in found) <= 5


def test_interference_is_unknown_from_too_few_requests():
    assert slowed(1.6, requests=12) == (None, None)


def test_interference_adds_up_over_trials(tmp_path: Path) -> None:
    arms = (EAGER, FakeArm(name="compiled", compiles=[Compile(at_s=30, seconds=2)]))
    checks = judged(tmp_path, arms=arms, trials=6, duration_s=90, rate=1, interference=3.0).checks
    assert [check.ok for check in checks if check.check == "interference"] == [False]


SEEDS = range(4)
FINE = {
    "calm": SLOTS,
    "calm for 90 s": replace(SLOTS, duration_s=90.0),
    "a rate that wanders": replace(SLOTS, cox=0.2),
    "busy for 80 % of the time": replace(SLOTS, rate=8.0, cox=0.2),
    "jams": replace(SLOTS, rate=6.0, cox=0.6),
    "stalls of the host": replace(SLOTS, host_stalls=6),
    "compiles": replace(SLOTS, compile_s=8.0, new_shapes=6),
    "compiles in 90 s": replace(SLOTS, duration_s=90.0, compile_s=8.0, new_shapes=3),
    "stalls of its own": replace(SLOTS, private_stalls=8),
}
OVERLOADED = {
    "a fifth too much": replace(SLOTS, rate=12.0),
    "a fifth too much for 20 minutes": replace(SLOTS, rate=12.0, duration_s=1200.0),
    "half too much": replace(SLOTS, rate=15.0),
    "half too much for 90 s": replace(SLOTS, rate=15.0, duration_s=90.0),
    "three times too much": replace(SLOTS, rate=30.0, duration_s=300.0),
    "a fifth too much, with compiles": replace(SLOTS, rate=12.0, compile_s=8.0, new_shapes=6),
}


def loads(made: Fleet, seed: int) -> list[Load | None]:
    found = []
    for (replica,) in fleet(made, np.random.default_rng(seed)):
        served = replica.served
        answered = np.ones(len(served.end_s), dtype=np.bool_)
        found.append(load_of(served.arrival_s, served.end_s, answered, ~answered, seconds=made.duration_s))
    return found


@pytest.mark.parametrize("name", FINE)
def test_passing_jams_are_no_overload(name: str) -> None:
    found = [one for seed in SEEDS for one in loads(FINE[name], seed)]
    assert [one for one in found if one is not None and one.overloaded] == []
    assert sum(one is not None for one in found) >= len(found) // 2


@pytest.mark.parametrize("name", OVERLOADED)
def test_more_than_a_server_can_serve_is_overload(name: str) -> None:
    made = OVERLOADED[name]
    for seed in SEEDS:
        for one in loads(made, seed):
            assert one is not None
            assert one.overloaded
            assert one.offered_rps == pytest.approx(made.rate, rel=0.15)
            assert one.answered_rps == pytest.approx(10.0, rel=0.2)


def test_one_jam_that_has_not_drained_at_the_end_is_no_overload() -> None:
    rng = np.random.default_rng(1)
    calm, jam = rng.uniform(0.0, 600.0, 2400), rng.uniform(540.0, 560.0, 800)
    start = np.sort(np.concatenate([calm, jam]))
    found = load_of(*_served(start, slots=16, work_s=1.6), seconds=600.0)
    assert found is not None
    assert not found.overloaded


def _served(
    start: Floats, *, slots: int, work_s: float, queue: int = 10**9, deadline_s: float = 1e9
) -> tuple[Floats, Floats, np.ndarray, np.ndarray]:
    """Return (start, end, answered, shed) of a server with `queue` for waiting requests and a deadline."""
    free = np.zeros(slots)
    end, answered = np.empty(len(start)), np.zeros(len(start), dtype=np.bool_)
    begun: list[float] = []
    for index, at in enumerate(start):
        slot = int(free.argmin())
        begin = max(at, free[slot])
        if begin > at and sum(other > at for other in begun[-queue - 1 :]) >= queue:
            end[index] = at
        elif begin + work_s > at + deadline_s:
            end[index] = at + deadline_s
            free[slot] = max(free[slot], min(begin + work_s, end[index]))
        else:
            end[index] = free[slot] = begin + work_s
            answered[index] = True
            begun.append(begin)
    return start, end, answered, ~answered


@pytest.mark.parametrize("limit", [{"queue": 32}, {"queue": 200}, {"deadline_s": 10.0}, {"deadline_s": 60.0}])
@pytest.mark.parametrize("rate", [13, 20, 40])
def test_requests_that_are_shed_throughout_are_overload(limit: dict[str, float], rate: int) -> None:
    start = np.sort(np.random.default_rng(rate).uniform(0.0, 300.0, 300 * rate))
    found = load_of(*_served(start, slots=16, work_s=1.6, **limit), seconds=300.0)  # type: ignore[arg-type]
    assert found is not None
    assert found.overloaded


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5])
def test_requests_that_hang_on_a_quick_server_are_no_overload(share: float) -> None:
    rng = np.random.default_rng(2)
    start = np.sort(rng.uniform(0.0, 300.0, 1200))
    hung = rng.uniform(size=1200) < share
    end = start + np.where(hung, 60.0, 1.6)
    found = load_of(start, end, ~hung, hung, seconds=300.0)
    assert found is not None
    assert not found.overloaded


def test_the_load_of_too_few_requests_is_unknown() -> None:
    none = np.zeros(0)
    assert load_of(none, none, none.astype(bool), none.astype(bool), seconds=300.0) is None
    few = np.linspace(0.0, 299.0, 29)
    everything = np.ones(29, dtype=np.bool_)
    assert load_of(few, few + 1.0, everything, ~everything, seconds=300.0) is None


@pytest.mark.parametrize(
    ("first_s", "last_s", "overloaded"),
    [(1.0, 30.0, True), (25.0, 60.0, True), (1.0, 4.0, False), (12.0, 12.0, False), (1.0, 1.0, False)],
)
def test_a_trial_too_short_for_windows_shows_an_overload_by_answers_that_outlast_it(
    first_s: float, last_s: float, overloaded: bool
) -> None:
    start = np.linspace(0.0, 20.0, 60)
    everything = np.ones(60, dtype=np.bool_)
    found = load_of(start, start + np.linspace(first_s, last_s, 60), everything, ~everything, seconds=20.0)
    assert found is not None
    assert found.overloaded == overloaded
    assert found.answered_rps == pytest.approx(60 / (20.0 + last_s))


CALM = Load(offered_rps=12.0, answered_rps=12.0, overloaded=False)
OVER = Load(offered_rps=12.0, answered_rps=9.96, overloaded=True)


@pytest.fixture
def checks_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], list[Check]]:
    """Return a function that checks the loads of arms, of which eager is the control."""

    def found(loads: dict[str, Any]) -> list[Check]:
        monkeypatch.setattr(overload, "_loads", lambda run, arm: loads[arm])
        treatments = [arm for arm in loads if arm != "eager"]
        run = SimpleNamespace(control="eager", treatments=treatments, reported_open_loop=True)
        return list(overload.overload.find(SimpleNamespace(run=run)))  # type: ignore[arg-type]

    return found


def test_an_overload_names_the_rates_of_both_arms(checks_of: Callable[[dict[str, Any]], list[Check]]) -> None:
    (found,) = checks_of({"eager": [OVER], "compiled": [replace(OVER, answered_rps=10.3)]})
    assert (found.ok, found.arm) == (False, "compiled")
    words = ("eager and compiled", "12 requests/s", "9.96 and 10.3", "1 of 1 trial")
    assert [word for word in words if word not in found.reason] == []
    assert "8 requests/s" in found.remedy


@pytest.mark.parametrize(
    ("loads", "arms"),
    [
        ({"eager": [CALM], "compiled": [OVER]}, []),  # its own weakness, and a FAIL
        ({"eager": [OVER], "compiled": [CALM]}, []),
        ({"eager": [None], "compiled": [OVER]}, []),
        ({"eager": [OVER, CALM, CALM], "compiled": [OVER, CALM, CALM]}, []),
        ({"eager": [OVER, OVER, CALM], "compiled": [OVER, OVER, CALM]}, ["compiled"]),
        ({"eager": [OVER, None, CALM], "compiled": [OVER, OVER, CALM]}, ["compiled"]),
        ({"eager": [OVER], "compiled": [OVER], "naive": [CALM]}, ["compiled"]),
        ({"eager": [OVER], "compiled": [OVER], "naive": [OVER]}, ["compiled", "naive"]),
    ],
)
def test_arms_are_overloaded_together_with_the_control(
    loads: dict[str, Any], arms: list[str | None], checks_of: Callable[[dict[str, Any]], list[Check]]
) -> None:
    assert [found.arm for found in checks_of(loads) if not found.ok] == arms


def judged(path: Path, **run: Any) -> Judgement:
    return judge(run_in(write_run(path / "run", FakeRun(**run))))


@pytest.mark.parametrize(("limit_ms", "seconds", "verdict"), [(2000, 660, "FAIL"), (600_000, 360, "INCONCLUSIVE")])
def test_a_run_that_overloaded_both_arms_reports_that_first(
    tmp_path: Path, limit_ms: int, seconds: int, verdict: str
) -> None:
    arms = (replace(EAGER, holds_rps=3.3), FakeArm(name="compiled", holds_rps=3.4))
    judgement = judged(tmp_path, arms=arms, duration_s=seconds, slo={"p99_ttft_ms": limit_ms})
    assert judgement.overall == verdict
    assert judgement.headline.startswith("eager and compiled were overloaded")
    assert "2.6 requests/s" in judgement.headline
    assert next(check for check in judgement.checks if not check.ok).check == "overload"
    assert "A run of about" not in judgement.advice.text
    latency = [gate for gate in judgement.gates if gate.kind == "noninferiority"]
    assert {(gate.verdict, "overload" in gate.blocked_by) for gate in latency} == {("INCONCLUSIVE", True)}


def test_one_overloaded_arm_fails_and_the_load_is_not_blamed(tmp_path: Path) -> None:
    compiles = [Compile(at_s=60.0 + 90.0 * number, seconds=9.0) for number in range(3)]
    arms = (EAGER, FakeArm(name="compiled", compiles=compiles, holds_rps=3.3))
    judgement = judged(tmp_path, arms=arms, duration_s=360)
    assert judgement.overall == "FAIL"
    assert "overloaded" not in judgement.headline
