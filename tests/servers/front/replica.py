"""A replica in processes of its own, as its users meet it: real gRPC and a tiny model."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tailgate.servers.clock import now_ns
from tailgate.servers.config import ArmConfig, EngineConfig, ModelConfig
from tailgate.servers.rpc import inference_pb2, inference_pb2_grpc, telemetry_pb2, telemetry_pb2_grpc
from tests.fakes.processes import PATIENCE_S, wait_for

REPOSITORY = Path(__file__).resolve().parents[3]
ENGINE = EngineConfig(slots=2, max_queue=3, max_prompt_tokens=32, max_new_tokens=4096, drain_grace_s=20, threads=1)
ENCODER = ModelConfig(id="random:bert-tiny", task="embed", dtype="float32", device="cpu")
ENCODER_ENGINE = EngineConfig(slots=4, max_queue=3, max_prompt_tokens=48, threads=1, drain_grace_s=20)
STARTED: list[subprocess.Popen[str]] = []


@dataclass
class Replica:
    process: subprocess.Popen[str]
    port: int
    channel: grpc.Channel
    started_ns: int
    metrics_port: int | None = None
    further_ports: tuple[int, ...] = ()

    @property
    def inference(self) -> inference_pb2_grpc.InferenceStub:
        return inference_pb2_grpc.InferenceStub(self.channel)

    @property
    def telemetry(self) -> telemetry_pb2_grpc.TelemetryStub:
        return telemetry_pb2_grpc.TelemetryStub(self.channel)

    def health(self) -> int:
        stub = health_pb2_grpc.HealthStub(self.channel)
        status: int = stub.Check(health_pb2.HealthCheckRequest(service="tailgate.v1.Inference")).status
        return status

    def counters(self) -> dict[str, int]:
        return dict(self.telemetry.Snapshot(telemetry_pb2.SnapshotRequest()).counters)

    def wait_until_idle(self) -> None:
        wait_for(lambda: not self.counters()["in_flight"])

    def wait_warm(self, **call: Any) -> list[telemetry_pb2.Progress]:
        """The progress until the replica serves or has failed."""
        seen = []
        for event in self.telemetry.Watch(telemetry_pb2.WatchRequest(), timeout=240, **call):
            if event.WhichOneof("event") == "progress":
                seen.append(event.progress)
            if event.progress.stage in ("serving", "failed"):
                break
        return seen

    def steps(self, count: int) -> list[telemetry_pb2.StepRecord]:
        """The first `count` steps."""
        seen: list[telemetry_pb2.StepRecord] = []
        for event in self.telemetry.Watch(telemetry_pb2.WatchRequest(), timeout=PATIENCE_S):
            seen += event.steps.records
            if len(seen) >= count:
                break
        return seen

    def retained(self) -> Iterator[telemetry_pb2.TelemetryEvent]:
        """The events so far, of an idle replica."""
        with contextlib.suppress(grpc.RpcError):
            yield from self.telemetry.Watch(telemetry_pb2.WatchRequest(), timeout=1.0)

    @property
    def engine(self) -> int:
        """The process id of the engine."""
        (engine,) = engines_of(self.process)
        return engine

    def end(self) -> None:
        end(self.process)
        self.channel.close()


def engines_of(process: subprocess.Popen[str]) -> list[int]:
    """The engine of a replica's process, without what removes its temporary folder."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]


def end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        for child in engines_of(process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)  # an engine that SIGSTOP stopped would remain
        process.kill()
        process.wait()


def start(
    folder: Path, arm: ArmConfig, *arguments: str, module: tuple[str, ...] = ("tailgate.servers.front.serve",)
) -> Replica:
    config, log = folder / f"{arm.name}.json", folder / f"{arm.name}.log"
    config.write_text(json.dumps(arm.to_dict()))
    started_ns = now_ns()
    process = subprocess.Popen(
        [sys.executable, "-m", *module, "--config", str(config), "--json", *arguments],
        stdout=subprocess.PIPE,
        stderr=log.open("w"),
        text=True,
        cwd=REPOSITORY,
    )
    STARTED.append(process)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, log.read_text()
    said = json.loads(line)
    channel = grpc.insecure_channel(f"127.0.0.1:{said['port']}")
    return Replica(process, said["port"], channel, started_ns, said.get("metrics_port"), said.get("further_ports", ()))


def start_fake(folder: Path, how: str, *arguments: str, engine: EngineConfig = ENGINE) -> Replica:
    """A replica whose engine is a fake, for what the front alone does."""
    return start(folder, ArmConfig(name=how, engine=engine), *arguments, module=("tests.fakes.engine", how))


@pytest.fixture(autouse=True)
def end_replicas() -> Iterator[None]:
    """End the replicas that a test started; those of fixtures of a wider scope stay."""
    before = len(STARTED)
    yield
    for process in STARTED[before:]:
        end(process)


def ask(*, tokens: int = 5, max_tokens: int = 4, **fields: object) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=range(5, 5 + tokens)), max_tokens=max_tokens, ignore_eos=True, **fields
    )


def count_tokens(chunks: Iterator[inference_pb2.GenerateChunk]) -> int:
    return sum(len(chunk.token_ids) for chunk in chunks)


def refusal(replica: Replica, request: Any) -> grpc.Call:
    is_text = isinstance(request, inference_pb2.EmbedRequest)
    method = replica.inference.Embed.future if is_text else replica.inference.Generate
    call = method(request, timeout=PATIENCE_S)
    assert call.code() is not grpc.StatusCode.OK
    return call


def embed(replica: Replica, text: str, **fields: Any) -> tuple[inference_pb2.EmbedResponse, dict[str, str]]:
    request = inference_pb2.EmbedRequest(text=text, **fields)
    answer, call = replica.inference.Embed.with_call(request, timeout=PATIENCE_S)
    return answer, dict(call.trailing_metadata())


TEXTS = ("a", "two words", "the quick brown fox jumps over the lazy dog", "x" * 31, "y" * 32, "z" * 47)


def embed_together(replica: Replica, texts: tuple[str, ...]) -> list[inference_pb2.EmbedResponse]:
    requests = [inference_pb2.EmbedRequest(text=text) for text in texts]
    calls = [replica.inference.Embed.future(request, timeout=PATIENCE_S) for request in requests]
    return [call.result() for call in calls]
