from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc

from servers.clock import now_ns
from servers.config import ArmConfig, CompileConfig, ModelConfig
from servers.rpc import telemetry_pb2
from tests.fakes.patience import PATIENCE_S
from tests.servers.front.test_serve import ENGINE, REPOSITORY, Replica, ask, start, wait_warm


def test_an_engine_that_cannot_start_is_told_and_exits_1(tmp_path: Path) -> None:
    replica = start(
        tmp_path, ArmConfig(name="wrong", engine=ENGINE, compile=CompileConfig(enabled=True, backend="telepathy"))
    )
    last = wait_warm(replica)[-1]
    assert last.stage == "failed"
    assert "telepathy" in last.detail
    assert replica.process.wait(timeout=PATIENCE_S) == 1


def test_what_a_replica_asks_itself_is_recorded_nowhere(tmp_path: Path) -> None:
    arm = ArmConfig.from_preset("compiled-naive", engine=ENGINE)
    arm = replace(arm, compile=replace(arm.compile, backend="eager"))
    replica = start(tmp_path, arm)
    assert wait_warm(replica)[-1].stage == "serving"
    counters = replica.counters()
    compiles = [
        event.compile
        for event in watched(replica, telemetry_pb2.WatchRequest(compile_events=True, steps=True, progress=True))
        if event.WhichOneof("event") in ("compile", "steps")
    ]
    assert {key: counters[key] for key in ("requests", "tokens", "steps", "in_flight")} == dict.fromkeys(
        ("requests", "tokens", "steps", "in_flight"), 0
    )
    assert len(compiles) == counters["compile_events"]
    assert compiles
    assert not any(event.phase == "serving" or event.request_ids for event in compiles)


def test_a_compile_is_told_before_it_is_over_and_its_event_follows(tmp_path: Path) -> None:
    arm = ArmConfig.from_preset("compiled-naive", engine=ENGINE)
    replica = start(tmp_path, replace(arm, compile=replace(arm.compile, backend="eager")))
    wait_warm(replica)
    watch = replica.telemetry.Watch(telemetry_pb2.WatchRequest(compile_events=True, under_way=True), timeout=60)
    told = ((now_ns(), event) for event in watch)
    call = replica.inference.Generate(ask(tokens=17, max_tokens=2))
    begun_ns, begun = next((at_ns, event.under_way) for at_ns, event in told if event.under_way.phase == "serving")
    assert (begun.kind, begun.end_ns, begun.batch_id >= 0) == ("compile", 0, True)
    assert begun.shape.startswith("prefill")
    over = next(event.under_way for _, event in told if event.WhichOneof("event") == "under_way")
    assert (over.start_ns, over.compile_id) == (begun.start_ns, begun.compile_id)
    assert begun_ns < over.end_ns, "although the compile holds its interpreter"
    event = next(event.compile for _, event in told if event.compile.phase == "serving")
    assert event.compile_id == begun.compile_id
    assert event.start_ns < over.end_ns, "its event is of the same time"
    assert event.end_ns > begun.start_ns
    list(call)
    watch.cancel()


def watched(replica: Replica, request: telemetry_pb2.WatchRequest) -> Iterator[telemetry_pb2.TelemetryEvent]:
    """What is retained, and then nothing more: the replica idles."""
    with contextlib.suppress(grpc.RpcError):
        yield from replica.telemetry.Watch(request, timeout=1.0)


def test_a_model_without_a_tokenizer_is_a_one_line_error(tmp_path: Path) -> None:
    arm = ArmConfig(engine=ENGINE, model=ModelConfig(id=str(tmp_path / "nowhere")))
    (tmp_path / "arm.json").write_text(json.dumps(arm.to_dict()))
    command = [sys.executable, "-m", "servers.front.serve", "--config", str(tmp_path / "arm.json")]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=60, check=False)
    assert ended.returncode == 2
    assert "nowhere" in ended.stderr
    assert "Traceback" not in ended.stderr
