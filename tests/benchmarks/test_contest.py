from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.contest import ContestError, Cores, Process, Work, run, write_schedule
from benchmarks.lag import completions_per_s, own_error, stream_figures
from benchmarks.observed import Plan
from loadtests.traffic.schedule import Schedule

ANYWHERE = Cores(server=None, load=None)


def plan(mode: str, **fields: object) -> Plan:
    return Plan(mode=mode, address="", out="", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("contestant", ["stock", "bare", "tailgate"])
def test_a_contestant_sees_the_tokens_of_a_few_streams(contestant: str, tmp_path: Path) -> None:
    work = Work(
        plan=plan("streams", streams=5, ramp_s=0.2, tokens=40),
        server=("--tokens-per-s", "20"),
        window_s=0.5,
        settle_s=0.3,
    )
    outcome = run(contestant, work, folder=tmp_path / "run", cores=ANYWHERE)
    figures = stream_figures(outcome.seen, outcome.sent, start_ns=outcome.start_ns, end_ns=outcome.end_ns)
    assert 30 < figures["sent"] <= 55
    assert figures["delivered"] > 0.5
    assert 0 <= figures["p50_lag_ms"] < 1000
    assert outcome.server["refused"] == 0


@pytest.mark.parametrize("contestant", ["stock", "bare", "tailgate"])
def test_a_contestant_keeps_an_easy_schedule(contestant: str, tmp_path: Path) -> None:
    work = Work(plan=plan("open", rate=50.0), window_s=1.0, settle_s=0.2)
    outcome = run(contestant, work, folder=tmp_path / "run", cores=ANYWHERE)
    figures = own_error(outcome.seen, start_ns=outcome.start_ns, end_ns=outcome.end_ns)
    assert 20 < figures["due"] < 90
    assert figures["answered"] > 0.9
    assert outcome.generator.get("started", 0) == (len(outcome.seen.names) if contestant == "tailgate" else 0)


@pytest.mark.parametrize("contestant", ["bare", "tailgate"])
def test_a_closed_loop_goes_on_until_it_is_stopped(contestant: str, tmp_path: Path) -> None:
    work = Work(plan=plan("closed", users=4), window_s=0.5, settle_s=0.2)
    outcome = run(contestant, work, folder=tmp_path / "run", cores=ANYWHERE)
    assert completions_per_s(outcome.seen, start_ns=outcome.start_ns, end_ns=outcome.end_ns) > 20


def test_a_process_that_ended_says_why(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such luck')"]
    with Process("peer", command, folder=tmp_path, cores=ANYWHERE, core=None) as process:
        process.finish(20.0)
        with pytest.raises(ContestError, match=r"peer ended with 1: no such luck"):
            process.check()


def test_a_process_that_does_not_end_is_named_and_gone_with_its_block(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    never = pytest.raises(ContestError, match=r"peer did not end within 0\.1 s")
    with Process("peer", command, folder=tmp_path, cores=ANYWHERE, core=None) as process, never:
        process.finish(0.1)
    with pytest.raises(ContestError, match="ended with -9"):
        process.check()


def test_a_plan_for_streams_is_a_schedule_that_starts_them_evenly(tmp_path: Path) -> None:
    work = Work(plan=plan("streams", streams=10, ramp_s=1.0, tokens=7), window_s=2.0)
    write_schedule(work.plan, work, tmp_path / "schedule.arrow")
    schedule = Schedule.read(tmp_path / "schedule.arrow")
    assert np.diff(schedule.offset_ns).tolist() == [100_000_000] * 9
    assert set(schedule.ints("max_tokens").tolist()) == {7}


def test_a_plan_for_arrivals_has_their_rate(tmp_path: Path) -> None:
    work = Work(plan=plan("open", rate=2000.0, seconds=5.0, seed=3), window_s=2.0)
    write_schedule(work.plan, work, tmp_path / "schedule.arrow")
    schedule = Schedule.read(tmp_path / "schedule.arrow")
    assert abs(len(schedule) - 10_000) < 500
    gaps = np.diff(schedule.offset_ns)
    assert abs(gaps.std() / gaps.mean() - 1) < 0.05
