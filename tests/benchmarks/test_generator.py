"""The load contest in small, and arms with planted faults."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pyarrow as pa
import pytest
import torch

from benchmarks.command import MeasurementError
from benchmarks.generator import ROOT, Work, null_server, own_error, run, sent_by_server, stream_figures
from benchmarks.null_server import Pace
from benchmarks.planted_arm import plant, planted_in
from benchmarks.simulation.records import request_table
from tailgate.servers.clock import now_ns
from tailgate.servers.engine.engine import Engine
from tailgate.servers.engine.runner import ModelRunner
from tailgate.servers.rpc import inference_pb2_grpc
from tailgate.servers.rpc.inference_pb2 import GenerateRequest


@pytest.mark.parametrize("splitter", [False, True])
def test_the_load_process_sees_the_tokens_of_a_few_streams(splitter: bool, tmp_path: Path) -> None:
    work = Work(streams=5, ramp_s=0.2, tokens_per_s=20.0, window_s=0.5, settle_s=0.3)
    figures = run(work, folder=tmp_path / "run", splitter=splitter)
    assert 30 < figures["sent"] <= 70
    assert figures["delivered"] > 0.5
    assert 0 <= figures["p50_lag_ms"] < 1000


MS = 1_000_000


def observed(stamps: list[int]) -> pa.Table:
    return request_table(np.array([0]), request_id=["r0"], token_ns=[stamps])


# One stream, a token each 20 ms, from 1 s on.
SENT = {"r0": 1000 * MS + np.arange(10) * 20 * MS}


def test_lag_is_the_stamp_less_the_servers_send_time() -> None:
    stamps = [1000 * MS + 20 * MS * k + (3 * MS if k == 4 else 1 * MS) for k in range(10)]
    figures = stream_figures(observed(stamps), SENT, (0, 10**12))
    assert figures["sent"] == 10
    assert figures["delivered"] == 1.0
    assert figures["p50_lag_ms"] == 1.0
    assert figures["max_lag_ms"] == 3.0


def test_tokens_that_do_not_come_are_late_until_the_window_ends() -> None:
    stamps = [1000 * MS + 20 * MS * k for k in range(5)]
    figures = stream_figures(observed(stamps), SENT, (1000 * MS, 1200 * MS))
    assert figures["delivered"] == 0.5
    assert figures["max_lag_ms"] == 100.0
    with pytest.raises(MeasurementError, match="no token was sent in the window and came"):
        stream_figures(observed(stamps), {"other": SENT["r0"]}, (1000 * MS, 1200 * MS))


def test_own_error_is_late_start_and_delivery_and_not_the_server() -> None:
    seen = request_table(
        np.array([1 * MS, 100 * MS]),
        scheduled_ns=[0, 100 * MS],
        server_end_ns=[52 * MS, 151 * MS],
        end_ns=[54 * MS, 152 * MS],
    )
    figures = own_error(seen, (0, 10**9))
    assert figures["due"] == 2
    assert figures["answered"] == 1.0
    assert figures["max_own_ms"] == 3.0
    assert figures["p50_late_ms"] == 0.5
    assert figures["p50_delivery_ms"] == 1.5


def test_every_tick_comes_after_the_one_before_and_each_round_has_all_phases() -> None:
    pace = Pace(20.0, base_ns=1000)
    assert pace.phases == 50
    assert pace.due_ns(pace.phases) == 1000 + 50_000_000
    for at_ns in (1000, 999_999, 1_001_000, 12_345_678):
        tick = pace.after(at_ns)
        assert pace.due_ns(tick - 1) <= at_ns < pace.due_ns(tick)


def test_a_grpc_client_gets_paced_tokens_with_their_send_times(tmp_path: Path) -> None:
    with (
        null_server(tmp_path, 200.0, core=None) as address,
        grpc.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel,
    ):
        call = inference_pb2_grpc.InferenceStub(channel).Generate(GenerateRequest(request_id="one", max_tokens=40))
        chunks = list(call)
        trailing = dict(call.trailing_metadata())
    emits = [chunk.emit_ns[0] for chunk in chunks]
    assert len(emits) == 40
    assert emits == sorted(emits)
    assert 0.15 < (emits[-1] - emits[0]) / 1e9 < 0.5
    assert trailing["tailgate-output-tokens"] == "40"
    assert int(trailing["tailgate-recv-ns"]) <= emits[0] <= int(trailing["tailgate-end-ns"]) <= now_ns()
    assert sent_by_server(tmp_path / "server.npz")[0]["one"].tolist() == emits


SCRIPTS = ("analysis.py", "case.py", "gallery.py", "claims.py", "generator.py", "judging.py", "peer.py")


def test_every_script_starts_from_anywhere_by_its_path(tmp_path: Path) -> None:
    commands = [[sys.executable, str(ROOT / "benchmarks" / script), "--help"] for script in SCRIPTS]
    processes = [
        subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    errors = {script: process.communicate()[1] for script, process in zip(SCRIPTS, processes, strict=True)}
    assert errors == dict.fromkeys(SCRIPTS, "")


class Clock:
    """Time that passes while code sleeps, and a millisecond at every reading."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def perf_counter(self) -> float:
        self._now_s += 0.001
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of an engine whose steps take 10 ms, which plant() changes until the test is over."""
    clock = Clock()

    def advance(engine: Any) -> Any:
        clock.sleep(0.01)
        return (["a token"],)

    monkeypatch.setattr("benchmarks.planted_arm.time", clock)
    monkeypatch.setattr(Engine, "advance", advance)
    monkeypatch.setattr(ModelRunner, "memory_bytes", lambda runner: {})
    return clock


def step_s(clock: Clock) -> float:
    began_s = clock.perf_counter()
    Engine.advance(None)  # type: ignore[arg-type]
    return clock.perf_counter() - began_s


def test_an_arm_has_the_faults_that_are_planted_in_it() -> None:
    words = ["serve", "--replica", "decode-plus-5-1", "--port", "0"]
    assert planted_in("slow:decode=2;decode-plus-5:decode=1.05,memory=1.3", words) == {"decode": 1.05, "memory": 1.3}
    assert planted_in("slow:decode=2", words) == {}
    assert planted_in("slow:decode=2", ["serve"]) == {}
    assert planted_in("decode=1.1", words) == planted_in("decode=1.1", ["serve"]) == {"decode": 1.1}
    assert planted_in("", words) == {}


def test_steps_last_as_much_longer_as_planted(clock: Clock) -> None:
    plant({"decode": 3.0})
    assert step_s(clock) == pytest.approx(0.036, abs=0.005)


def test_the_engine_stops_once_in_a_while(clock: Clock) -> None:
    plant({"stall_s": 2.0, "every_s": 300.0})
    assert step_s(clock) < 0.1
    clock.sleep(300.0)
    assert step_s(clock) == pytest.approx(2.0, abs=0.1)
    assert step_s(clock) < 0.1


@pytest.mark.usefixtures("clock")
def test_memory_is_held_once_and_only_where_it_is_planted(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[float] = []
    monkeypatch.setattr("benchmarks.planted_arm._weight", lambda runner, times: made.append(times))
    runner: Any = SimpleNamespace(device=torch.device("cpu"))
    plant({"decode": 1.1})
    ModelRunner.memory_bytes(runner)
    assert made == []
    plant({"memory": 1.3})
    ModelRunner.memory_bytes(runner)
    ModelRunner.memory_bytes(runner)
    assert made == [1.3]
