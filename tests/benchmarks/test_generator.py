"""The load contest and the splitter's cost in small, and arms with planted faults."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from benchmarks.command import run_command
from benchmarks.contest import ROOT, Cores, NullProcess, Work, run
from benchmarks.null_server import Pace
from benchmarks.observed import Emitted, Observed, own_error, stream_figures
from benchmarks.planted_arm import plant, planted_in
from benchmarks.splitter import WAYS, opened
from servers.clock import now_ns
from servers.complaint import ConfigError
from servers.engine.engine import Engine
from servers.engine.runner import ModelRunner
from servers.rpc import inference_pb2_grpc
from servers.rpc.inference_pb2 import GenerateRequest

ANYWHERE = Cores(server=None, load=None)


@pytest.mark.parametrize("contestant", ["bare", "tailgate"])
def test_a_contestant_sees_the_tokens_of_a_few_streams(contestant: str, tmp_path: Path) -> None:
    server = ("--tokens-per-s", "20")
    work = Work(streams=5, ramp_s=0.2, tokens=40, server=server, window_s=0.5, settle_s=0.3)
    outcome = run(contestant, work, folder=tmp_path / "run", cores=ANYWHERE)
    figures = stream_figures(outcome.seen, outcome.sent, start_ns=outcome.start_ns, end_ns=outcome.end_ns)
    assert 30 < figures["sent"] <= 55
    assert figures["delivered"] > 0.5
    assert 0 <= figures["p50_lag_ms"] < 1000


MS = 1_000_000


def observed(**columns: list[int]) -> Observed:
    count = len(columns["sent"])
    zeros = [0] * count
    plain = {name: np.array(columns.get(name, zeros), np.int64) for name in ("scheduled", "sent", "end", "answer")}
    return Observed(
        names=np.array([f"r{number}" for number in range(count)]),
        ok=np.array(columns.get("ok", [1] * count), np.int64),
        stamps=np.array(columns.get("stamps", []), np.int64),
        counts=np.array(columns.get("counts", zeros), np.int64),
        **plain,
    )


def emitted(streams: int, tokens: int) -> Emitted:
    """Streams in phase 0 of 2, a tick each 10 ms, from 1 s on; every stream starts with the first tick."""
    ticks = np.arange(2 * tokens, dtype=np.int64)
    return Emitted(
        ticks=ticks,
        emits=1000 * MS + ticks * 10 * MS,
        names=np.array([f"r{number}" for number in range(streams)]),
        first_ticks=np.zeros(streams, np.int64),
        tokens=np.full(streams, tokens, np.int64),
        phases=2,
    )


def test_lag_is_the_stamp_less_the_servers_send_time() -> None:
    sent = emitted(1, 10)
    stamps = [1000 * MS + 20 * MS * k + (3 * MS if k == 4 else 1 * MS) for k in range(10)]
    figures = stream_figures(observed(sent=[0], stamps=stamps, counts=[10]), sent, start_ns=0, end_ns=10**12)
    assert figures["sent"] == 10
    assert figures["delivered"] == 1.0
    assert figures["p50_lag_ms"] == 1.0
    assert figures["max_lag_ms"] == 3.0


def test_tokens_that_do_not_come_are_late_until_the_window_ends() -> None:
    sent = emitted(1, 10)
    stamps = [1000 * MS + 20 * MS * k for k in range(5)]
    figures = stream_figures(observed(sent=[0], stamps=stamps, counts=[5]), sent, start_ns=1000 * MS, end_ns=1200 * MS)
    assert figures["delivered"] == 0.5
    assert figures["max_lag_ms"] == 100.0


def test_own_error_is_late_start_and_delivery_and_not_the_server() -> None:
    seen = observed(
        scheduled=[0, 100 * MS], sent=[1 * MS, 100 * MS], answer=[52 * MS, 151 * MS],
        end=[54 * MS, 152 * MS],
    )  # fmt: skip
    figures = own_error(seen, start_ns=0, end_ns=10**9)
    assert figures["due"] == 2
    assert figures["answered"] == 1.0
    assert figures["max_own_ms"] == 3.0
    assert figures["p50_late_ms"] == 0.5
    assert figures["p50_delivery_ms"] == 1.5


@contextmanager
def null(folder: Path, *options: str) -> Iterator[NullProcess]:
    with NullProcess(options, folder=folder, cores=ANYWHERE) as server:
        yield server


@contextmanager
def stub_of(server: NullProcess) -> Iterator[inference_pb2_grpc.InferenceStub]:
    with grpc.insecure_channel(server.address, options=(("grpc.enable_http_proxy", 0),)) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def test_every_tick_comes_after_the_one_before_and_each_round_has_all_phases() -> None:
    pace = Pace(20.0, base_ns=1000)
    assert pace.phases == 50
    assert pace.due_ns(pace.phases) == 1000 + 50_000_000
    for at_ns in (1000, 999_999, 1_001_000, 12_345_678):
        tick = pace.after(at_ns)
        assert pace.due_ns(tick - 1) <= at_ns < pace.due_ns(tick)


def test_a_grpc_client_gets_paced_tokens_with_their_send_times(tmp_path: Path) -> None:
    with null(tmp_path, "--tokens-per-s", "200") as server, stub_of(server) as stub:
        call = stub.Generate(GenerateRequest(request_id="one", max_tokens=40))
        chunks = list(call)
        trailing = dict(call.trailing_metadata())
        report = server.request(f"report {tmp_path / 'server.npz'}")
    emits = [chunk.emit_ns[0] for chunk in chunks]
    assert len(emits) == 40
    assert emits == sorted(emits)
    assert 0.15 < (emits[-1] - emits[0]) / 1e9 < 0.5
    assert trailing["tailgate-output-tokens"] == "40"
    assert int(trailing["tailgate-recv-ns"]) <= emits[0] <= int(trailing["tailgate-end-ns"]) <= now_ns()
    sent = Emitted.read(tmp_path / "server.npz")
    assert sent.names.tolist() == ["one"]
    assert sent.at(sent.first_ticks[0] + sent.phases * np.arange(40)).tolist() == emits
    assert report["requests"] == report["answered"] == 1


@pytest.mark.parametrize("name", WAYS)
def test_a_way_passes_answers_and_their_metadata_on(name: str, tmp_path: Path) -> None:
    with NullProcess((), folder=tmp_path, cores=ANYWHERE) as server:
        folder = tmp_path / "way"
        folder.mkdir()
        with opened(name, server.address, folder=folder, cores=ANYWHERE) as way:
            before = way.cpu_s()
            with grpc.insecure_channel(way.address, options=(("grpc.enable_http_proxy", 0),)) as channel:
                call = inference_pb2_grpc.InferenceStub(channel).Generate(GenerateRequest(max_tokens=3), timeout=10)
                assert sum(len(chunk.token_ids) for chunk in call) == 3
                assert dict(call.trailing_metadata())["tailgate-output-tokens"] == "3"
            assert (way.cpu_s() > before) == (name != "direct")


SCRIPTS = ("analysis.py", "generator.py", "judging.py", "splitter.py")


def test_every_script_starts_from_anywhere_by_its_path(tmp_path: Path) -> None:
    commands = [[sys.executable, str(ROOT / "benchmarks" / script), "--help"] for script in SCRIPTS]
    processes = [
        subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    errors = {script: process.communicate()[1] for script, process in zip(SCRIPTS, processes, strict=True)}
    assert errors == dict.fromkeys(SCRIPTS, "")


def test_bad_usage_is_one_line_and_the_result_another(capsys: pytest.CaptureFixture[str]) -> None:
    def measure(arguments: object) -> dict[str, object]:
        if arguments:
            raise ConfigError("two\nlines")
        return {"ok": False}

    assert run_command("some.py", measure, ["bad"]) == 2
    assert run_command("some.py", measure, []) == 1
    captured = capsys.readouterr()
    assert captured.out == '{"ok": false}\n'
    assert captured.err.startswith("benchmarks/some.py: two")
    assert captured.err.count("\n") == 1


class Clock:
    """Time that passes when somebody waits for it, and a millisecond at every look."""

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
