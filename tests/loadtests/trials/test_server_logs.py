"""Logs of servers are followed during a trial: a file that grows, and a program that prints."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from analysis.records.schemas import COMPILE_EVENTS
from analysis.records.tables import read_table
from loadtests.external.compile_lines import CompileLog
from loadtests.trials.context import TrialContext
from loadtests.trials.server_logs import ServerLogs
from loadtests.trials.telemetry import Collector
from servers.clock import now_ns
from tests.fakes.patience import wait_for
from tests.fakes.trial_context import external_trial
from tests.loadtests.external.test_telemetry import GRAPH, IN_DETAIL, MONITOR, ONCE, RECOMPILE, VERBOSE
from tests.loadtests.external.test_telemetry import TRITON_COMPILE_LINES as TRITON

STATS = "(APIServer pid=1) INFO 11-25 22:58:30 [loggers.py:273] Engine 000: Running: 3 reqs, Waiting: 0 reqs"


def write(path: Path, *lines: str) -> None:
    with path.open("a") as file:
        file.write("".join(f"{line}\n" for line in lines))


def followed(trial: TrialContext, during: Callable[[ServerLogs], None]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The events that were recorded while `during` ran, and what trial.json says of the log."""
    collector = Collector(trial.folder, trial=1, status=trial.status)
    logs = ServerLogs(trial, collector)
    try:
        during(logs)
    finally:
        logs.stop(hurry=True)
        logs.stop(hurry=True)
        collector.stop()
    [facts] = trial.facts.arms[1]["told"]["logs"]
    return read_table(trial.folder / "compile_events.arrow", COMPILE_EVENTS)[0].to_pylist(), facts


def test_a_file_tells_of_what_is_compiled_from_now_on(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    write(log, VERBOSE, GRAPH, MONITOR)
    trial = external_trial(tmp_path / "trial-01", {"log": str(log)})
    before_ns = now_ns()

    def during(logs: ServerLogs) -> None:
        write(log, STATS, GRAPH, IN_DETAIL)
        wait_for(lambda: trial.status.replicas["vllm-0"].compiles == 2)
        trial.facts.start_ns = before_ns
        write(log, IN_DETAIL, *RECOMPILE)

    rows, facts = followed(trial, during)
    assert [(row["event_id"], row["kind"], row["phase"]) for row in rows] == [
        ("1-vllm-0-log-0", "compile", None),
        ("1-vllm-0-log-1", "jit", None),
        ("1-vllm-0-log-2", "jit", "serving"),
        ("1-vllm-0-log-3", "recompile", "serving"),
    ]
    assert {(row["trial"], row["arm"], row["replica"]) for row in rows} == {(1, "vllm", "vllm-0")}
    graph, kernel, _, recompile = rows
    assert graph["shape"] == "(1, 8192)"
    assert graph["end_ns"] - graph["start_ns"] == 12_340_000_000
    assert before_ns <= graph["end_ns"] <= now_ns()
    assert (kernel["frame"], kernel["start_ns"]) == ("Triton _fwd_kernel", kernel["end_ns"])
    assert recompile["reason"].startswith("0/3: tensor 'x' size mismatch")
    tells = "torch.compile, and kernels of Triton, CuTeDSL and TileLang; recompiles of Dynamo"
    assert facts == {"replica": "vllm-0", "lines": 8, "events": 4, "tells": tells, "blind_spots": []}


def test_a_program_tells_by_what_it_prints_and_what_it_leaves_out_is_said(tmp_path: Path) -> None:
    code = f"import time; print({TRITON!r}, flush=True); time.sleep(600)"
    trial = external_trial(tmp_path / "trial-01", {"log_command": [sys.executable, "-c", code]}, replicas=2)
    # One log for two replicas: whose compile it was is not known.
    rows, facts = followed(trial, lambda logs: wait_for(lambda: (trial.logs / "vllm.log").stat().st_size > 0))
    assert [(row["event_id"], row["replica"], row["frame"]) for row in rows] == [
        ("1-vllm-log-0", None, "Triton _fwd_kernel")
    ]
    assert facts["blind_spots"] == [ONCE]
    assert any(ONCE in note for note in trial.status.notes)


def test_compiles_that_a_program_tells_of_the_past_are_not_of_the_trial(tmp_path: Path) -> None:
    old = GRAPH.replace("22:58:35", "20:00:00")
    code = f"import time; print({old!r}, {STATS!r}, {IN_DETAIL!r}, sep=chr(10), flush=True); time.sleep(600)"
    trial = external_trial(tmp_path / "trial-01", {"log_command": [sys.executable, "-c", code]})
    rows, facts = followed(trial, lambda logs: wait_for(lambda: trial.status.replicas["vllm-0"].compiles == 1))
    assert [row["kind"] for row in rows] == ["jit"]
    assert (facts["lines"], facts["events"]) == (3, 1)


def test_a_program_that_ends_and_a_log_that_rests_are_blind_spots(tmp_path: Path) -> None:
    trial = external_trial(tmp_path / "trial-01", {"log_command": [sys.executable, "-c", "raise SystemExit(3)"]})

    def during(logs: ServerLogs) -> None:
        wait_for(lambda: not any(thread.name == "log-vllm-0" for thread in threading.enumerate()))

    rows, facts = followed(trial, during)
    assert rows == []
    assert facts["blind_spots"] == [
        "no line of it is known to be of vLLM, SGLang or PyTorch",
        "no line of it came during the trial",
        "its command ended with exit code 3 before the trial did",
    ]


def test_a_log_that_cannot_be_read_on_does_not_pass_for_a_quiet_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stumble(self: CompileLog, line: str, arrived_ns: int) -> None:
        raise UnicodeError("odd line")

    monkeypatch.setattr(CompileLog, "take", stumble)
    log = tmp_path / "vllm.log"
    write(log, VERBOSE, MONITOR)
    trial = external_trial(tmp_path / "trial-01", {"log": str(log)})

    def during(logs: ServerLogs) -> None:
        write(log, STATS)
        wait_for(lambda: not any(thread.name == "log-vllm-0" for thread in threading.enumerate()))

    _, facts = followed(trial, during)
    assert "it could not be read on (UnicodeError: odd line)" in facts["blind_spots"]
