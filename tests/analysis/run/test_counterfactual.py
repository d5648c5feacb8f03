from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.records.run_records import read_run
from analysis.run.backlog import with_backlog
from analysis.run.counterfactual import counterfactual
from analysis.run.run import Run
from analysis.run.spikes import attribute
from analysis.summary.summary import analyze
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
        assert found.least_ms < found.without_ms < found.most_ms
        assert found.explained_pct > 50.0
        assert 0.0 <= found.explained_low_pct < found.explained_pct < found.explained_high_pct <= 100.0


def test_without_stalls_nothing_is_explained_and_no_limit_is_made_up(tmp_path: Path) -> None:
    found = counterfactual(made(tmp_path, compiles=0), "compiled", "e2e")
    assert found.explained_pct == 0.0
    assert found.explained_low_pct != found.explained_low_pct, "no number"
    assert found.low_ms < found.without_ms < found.high_ms
    assert found.least_ms == found.without_ms == found.most_ms, "nothing was replayed, so nothing is open"


def test_too_few_requests_set_no_upper_limit(tmp_path: Path) -> None:
    found = counterfactual(made(tmp_path, compiles=0, duration_s=20.0), "compiled", "e2e")
    assert found.high_ms != found.high_ms, "no number"


def test_every_request_and_every_excursion_has_a_cause(tmp_path: Path) -> None:
    arms = (EAGER, FakeArm(name="compiled", compiles=[Compile(at_s=100, seconds=5), Compile(at_s=200, seconds=5)]))
    summary = analyze(write_run(tmp_path, FakeRun(arms=arms, duration_s=300.0, rate=6.0)))
    row = next(row for row in summary["arms"] if row["name"] == "compiled")
    causes = row["compile"]["causes"]
    assert list(causes) == ["recompiled", "queued behind a compile", "slowed by one", "in the backlog of one", "other"]
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


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"server_columns": False}, "queue_ns"),
        ({"open_loop": False}, "the load waited for the server"),
        ({"telemetry": False, "config": {"compile": {"enabled": True}}}, "no compile events are recorded"),
    ],
    ids=["no server times", "closed loop", "no telemetry"],
)
def test_where_the_queue_cannot_be_replayed_the_quantile_is_withdrawn(
    change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    arm = FakeArm(name="compiled", compiles=[Compile(at_s=40.0, seconds=4.0)], config=change.pop("config", {}))
    folder = write_run(tmp_path, replace(FakeRun(arms=(EAGER, arm), duration_s=120.0), **change))
    found = counterfactual(Run.of(read_run(folder)), "compiled", "e2e")
    assert reason in (found.withdrawn or "")
    assert math.isnan(found.without_ms)
    assert math.isnan(found.most_ms)
    row = next(row for row in analyze(folder)["arms"] if row["name"] == "compiled")
    assert row["compile"]["p99_e2e_ms_without"] is None
    assert reason in row["compile"]["without_withdrawn"]


def test_an_arm_without_stalls_is_itself_whatever_is_not_recorded(tmp_path: Path) -> None:
    folder = write_run(tmp_path, FakeRun(duration_s=120.0, server_columns=False, open_loop=False))
    found = counterfactual(Run.of(read_run(folder)), "eager", "e2e")
    assert found.withdrawn is None
    assert found.least_ms == found.without_ms == found.most_ms > 0


def test_stalls_that_no_event_accounts_for_withdraw_the_quantile(tmp_path: Path) -> None:
    compiles = [Compile(at_s=40.0 + 20.0 * number, seconds=4.0) for number in range(4)]
    folder = write_run(tmp_path, FakeRun(arms=(EAGER, FakeArm(name="compiled", compiles=compiles)), duration_s=140.0))
    records = read_run(folder)
    assert records.events is not None
    assert counterfactual(Run.of(records), "compiled", "e2e").withdrawn is None
    half = replace(records, events=records.events.slice(0, records.events.num_rows - 2))
    assert "in no recorded event" in (counterfactual(Run.of(half), "compiled", "e2e").withdrawn or "")


def test_requests_that_failed_behind_a_compile_leave_a_range_and_no_number(tmp_path: Path) -> None:
    run = made(tmp_path, compiles=1, duration_s=200.0)
    requests = run.requests
    behind = (run.of_arm("compiled")) & (run.attribution.stall_ms > 1000)
    assert behind.sum() > 12
    failed = replace(requests, ok=requests.ok & ~behind, failed=behind, e2e_ms=np.where(behind, 6e4, requests.e2e_ms))
    attribution = with_backlog(failed, run.events, attribute(failed, run.events))
    found = counterfactual(replace(run, requests=failed, attribution=attribution), "compiled", "e2e")
    assert "failed or were cut off behind a compile" in (found.withdrawn or "")
    assert math.isnan(found.without_ms)
    assert found.least_ms < 3_000 < 60_000 <= found.most_ms
