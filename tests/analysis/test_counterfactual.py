from __future__ import annotations

from pathlib import Path

import pytest

from analysis.counterfactual import counterfactual
from analysis.records import read_run
from analysis.run import Run
from analysis.summary import analyze
from tests.fakes.runs import EAGER, Compile, FakeArm, FakeRun, write_run


def made(folder: Path, *, compiles: int, duration_s: float = 600.0, seed: int = 1) -> Run:
    found = [Compile(at_s=40.0 + 90.0 * number, seconds=4.0) for number in range(compiles)]
    arms = (EAGER, FakeArm(name="compiled", compiles=found))
    return Run.of(read_run(write_run(folder, FakeRun(arms=arms, duration_s=duration_s, rate=6.0, seed=seed))))


def test_the_intervals_hold_the_estimates(tmp_path: Path) -> None:
    run = made(tmp_path, compiles=6)
    for metric in ("ttft", "e2e"):
        found = counterfactual(run, "compiled", metric)
        assert found.low_ms < found.without_ms < found.high_ms
        assert found.explained_pct > 50.0
        assert 0.0 <= found.explained_low_pct < found.explained_pct < found.explained_high_pct <= 100.0


def test_without_stalls_nothing_is_explained_and_no_limit_is_made_up(tmp_path: Path) -> None:
    found = counterfactual(made(tmp_path, compiles=0), "compiled", "e2e")
    assert found.explained_pct == 0.0
    assert found.explained_low_pct != found.explained_low_pct, "no number"
    assert found.low_ms < found.without_ms < found.high_ms


def test_too_few_requests_set_no_upper_limit(tmp_path: Path) -> None:
    found = counterfactual(made(tmp_path, compiles=0, duration_s=20.0), "compiled", "e2e")
    assert found.high_ms != found.high_ms, "no number"


def test_the_interval_holds_the_quantile_of_the_same_run_without_compiles(tmp_path: Path) -> None:
    hits = 0
    for seed in range(3):
        clean = counterfactual(made(tmp_path / f"a{seed}", compiles=0, duration_s=600.0, seed=seed), "compiled", "ttft")
        stalled = counterfactual(
            made(tmp_path / f"b{seed}", compiles=3, duration_s=600.0, seed=seed), "compiled", "ttft"
        )
        hits += stalled.low_ms <= clean.without_ms <= stalled.high_ms
    assert hits == 3


def test_every_request_and_every_excursion_has_a_cause(tmp_path: Path) -> None:
    arms = (EAGER, FakeArm(name="compiled", compiles=[Compile(at_s=100, seconds=5), Compile(at_s=200, seconds=5)]))
    summary = analyze(write_run(tmp_path, FakeRun(arms=arms, duration_s=300.0, rate=6.0)))
    row = next(row for row in summary["arms"] if row["name"] == "compiled")
    causes = row["compile"]["causes"]
    assert list(causes) == ["recompiled", "queued behind a compile", "slowed by one", "other"]
    assert sum(cause["requests"] for cause in causes.values()) == row["requests"]
    held = {name: cause["seconds"] for name, cause in causes.items()}
    assert held["other"] == 0.0
    assert causes["queued behind a compile"]["requests"] > 20
    assert sum(held.values()) == pytest.approx(
        held["recompiled"] + held["queued behind a compile"] + held["slowed by one"]
    )
    # what was queued for seconds took longer than its length explains
    assert causes["queued behind a compile"]["excursions"] > 20
    assert causes["queued behind a compile"]["excess_s"] > 20.0
