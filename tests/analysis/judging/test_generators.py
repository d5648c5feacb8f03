"""The generator refuses to pretend: each way in which it can fall short makes a run INCONCLUSIVE."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from analysis.judging.generators import check_generators
from analysis.records.run_records import read_run, shifted
from analysis.summary.summary import analyze
from tests.fakes.runs import FakeRun, write_run

ACCOUNT: dict[str, Any] = {
    "worker": 0,
    "planned": 600,
    "finished": 600,
    "records": {"written": 600, "dropped": 0, "waiting_bytes": 0},
    "lag_ms": {"p50": 0.2, "p99": 1.0, "max": 3.0},
    "loop_lag_ms": {"p50": 0.2, "p99": 1.0, "max": 3.0},
    "cpu": {"mean": 0.3, "max": 0.5, "busy_s": 0.0, "of_s": 600.0},
    "clock": None,
    "error": None,
    "complete": True,
}


def check(name: str, **changes: Any) -> Any:
    accounts = [{**ACCOUNT, "trial": 1, "rows": 600, **changes}]
    return next(
        item
        for item in check_generators(accounts, [{"trial": 1, "load_processes": 1}], limit_ms=50)
        if item.check == name
    )


CLOCK = {"offset_ns": 5, "exchanges": 30, "worst_uncertainty_ns": 1_000_000, "host": "b", "applied": True}


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        (
            "load processes",
            {"lost": "it no longer answers", "complete": False, "rows": 40},
            "Load process 0 is lost (it no longer answers): 40 of 600 planned requests are recorded.",
        ),
        (
            "load processes",
            {"complete": False, "rows": 40, "error": "no disk"},
            "Load process 0 was cut off (no disk): 40 of 600 planned requests are recorded.",
        ),
        ("load processes", {"rows": 599}, "Load process 0 ended 600 requests and 599 are recorded."),
        (
            "dropped records",
            {"records": {"written": 597, "dropped": 3}},
            "3 records were dropped, 3 of them by load process 0, because the disk or the process could not keep up.",
        ),
        (
            "token times",
            {"loop_lag_ms": {"p99": 60.0}},
            "In 1 % of the time load process 0 looked 60.0 ms late or more at what had come, limit 50 ms.",
        ),
        (
            "generator CPU",
            {"cpu": {"busy_s": 31.0, "of_s": 600.0}},
            "load process 0 used up its core in 31 of 600 s, limit 30 s.",
        ),
        (
            "clocks",
            {"clock": {**CLOCK, "worst_uncertainty_ns": 51_000_000}},
            "The clock of load process 0 on b is known to ± 51.0 ms, limit 50 ms: "
            "which compile met which of its requests is uncertain.",
        ),
        (
            "clocks",
            {"clock": {**CLOCK, "exchanges": 0}},
            "The clock of load process 0 on b was not compared with the master's.",
        ),
    ],
)
def test_each_shortcoming_is_told(name: str, changes: dict[str, Any], reason: str) -> None:
    assert check(name).ok if name != "clocks" else check(name, clock=CLOCK).ok
    failed = check(name, **changes)
    assert (failed.ok, failed.reason) == (False, reason)
    assert failed.remedy
    assert "noninferiority" in failed.affects


def test_a_load_process_that_left_no_account_is_missed() -> None:
    (failed,) = check_generators([], [{"trial": 2, "load_processes": 3}], limit_ms=50)
    assert (failed.ok, failed.value) == (False, 3.0)
    assert failed.reason == "Trial 2 has accounts of 0 of 3 load processes."


def test_a_moment_of_full_load_and_a_shared_clock_are_no_shortcoming() -> None:
    assert check("generator CPU", cpu={"busy_s": 2.0, "of_s": 15.0}).ok
    assert check("clocks", clock={"same": True, "exchanges": 0}).ok


def test_accounts_of_older_runs_are_not_held_to_what_they_do_not_say() -> None:
    old = {"worker": 0, "planned": 5, "lag_ms": {"p99": 1.0}, "complete": True, "trial": 1}
    assert list(check_generators([old], [{"trial": 1}], limit_ms=50)) == []


def whole_run(directory: Path) -> tuple[Path, dict[str, Any]]:
    write_run(directory, FakeRun(rate=8.0, gates={"draws": 499}))
    folder = directory / "trial-01"
    rows = read_run(directory).requests.num_rows
    info = json.loads((folder / "trial.json").read_text())
    (folder / "trial.json").write_text(json.dumps({**info, "load_processes": 1}))
    files = list(folder.glob("requests*.arrow"))
    assert len(files) == 1
    files[0].rename(folder / "requests-0.arrow")
    account = {**ACCOUNT, "planned": rows, "finished": rows, "records": {"written": rows, "dropped": 0}}
    (folder / "generator-0.json").write_text(json.dumps(account))
    return folder, account


Spoil = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.mark.parametrize(
    ("spoil", "blocked"),
    [
        (lambda account: account, None),
        (lambda account: {**account, "lost": "gone", "complete": False}, "load processes"),
        (lambda account: {**account, "finished": account["finished"] + 1}, "load processes"),
        (lambda account: {**account, "records": {"dropped": 1}}, "dropped records"),
        (lambda account: {**account, "lag_ms": {"p99": 51.0}}, "generator lag"),
        (lambda account: {**account, "loop_lag_ms": {"p99": 51.0}}, "token times"),
        (lambda account: {**account, "cpu": {"busy_s": 60.0, "of_s": 600.0}}, "generator CPU"),
        (lambda account: {**account, "clock": {**CLOCK, "worst_uncertainty_ns": 10**9}}, "clocks"),
    ],
)
def test_a_run_that_would_pass_is_inconclusive_for_it(spoil: Spoil, blocked: str | None, tmp_path: Path) -> None:
    folder, account = whole_run(tmp_path / "run")
    (folder / "generator-0.json").write_text(json.dumps(spoil(account)))
    summary = analyze(tmp_path / "run")
    assert summary["overall"] == ("PASS" if blocked is None else "INCONCLUSIVE")
    failed = {row["check"] for row in summary["validity"] if not row["ok"]}
    assert failed == (set() if blocked is None else {blocked})


def test_records_brought_over_from_another_host_are_judged_on_the_runs_clock(tmp_path: Path) -> None:
    folder, account = whole_run(tmp_path / "run")
    before = read_run(tmp_path / "run").requests
    clock = {**CLOCK, "offset_ns": 3_200_000_000, "applied": False}
    (folder / "generator-0.json").write_text(json.dumps({**account, "clock": clock}))
    after = read_run(tmp_path / "run").requests
    assert after.equals(pa.Table.from_batches([shifted(batch, 3_200_000_000) for batch in before.to_batches()]))
    assert after.column("token_ns").equals(before.column("token_ns"))
    assert not after.column("end_ns").equals(before.column("end_ns"))
    (folder / "generator-0.json").write_text(json.dumps({**account, "clock": {**clock, "applied": True}}))
    assert read_run(tmp_path / "run").requests.equals(before)
