"""An encoder's replica as its users meet it: a real process, real gRPC, a tiny BERT."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from servers.config import ArmConfig, EngineConfig, ModelConfig
from servers.engine.model import load_model
from servers.front.tokenizer import ByteTokenizer
from servers.rpc import inference_pb2, inference_pb2_grpc, telemetry_pb2, telemetry_pb2_grpc
from tests.fakes.patience import PATIENCE_S, wait_for

REPOSITORY = Path(__file__).resolve().parents[3]
MODEL = ModelConfig(id="random:bert-tiny", task="embed", dtype="float32", device="cpu")
ENGINE = EngineConfig(slots=4, max_queue=3, max_prompt_tokens=48, threads=1, drain_grace_s=20)
TEXTS = ("a", "two words", "the quick brown fox jumps over the lazy dog", "x" * 31, "y" * 32, "z" * 47)


@dataclass
class Replica:
    process: subprocess.Popen[str]
    channel: grpc.Channel

    @property
    def inference(self) -> inference_pb2_grpc.InferenceStub:
        return inference_pb2_grpc.InferenceStub(self.channel)

    @property
    def telemetry(self) -> telemetry_pb2_grpc.TelemetryStub:
        return telemetry_pb2_grpc.TelemetryStub(self.channel)

    def counters(self) -> dict[str, int]:
        return dict(self.telemetry.Snapshot(telemetry_pb2.SnapshotRequest()).counters)

    def wait_until_idle(self) -> None:
        wait_for(lambda: not self.counters()["in_flight"])

    def steps(self, count: int) -> list[telemetry_pb2.StepRecord]:
        """The first `count` steps."""
        seen: list[telemetry_pb2.StepRecord] = []
        for event in self.telemetry.Watch(telemetry_pb2.WatchRequest(steps=True), timeout=PATIENCE_S):
            seen += event.steps.records
            if len(seen) >= count:
                break
        return seen

    def compiles(self, *, until: int = 0) -> list[telemetry_pb2.CompileEvent]:
        """What was compiled while serving, once there are `until` such events."""
        seen: list[telemetry_pb2.CompileEvent] = []
        request = telemetry_pb2.WatchRequest(compile_events=True)
        with suppress(grpc.RpcError):
            for event in self.telemetry.Watch(request, timeout=PATIENCE_S if until else 2):
                seen += [event.compile] if event.compile.phase == "serving" else []
                if until and len(seen) >= until:
                    break
        return seen


def start(folder: Path, arm: ArmConfig) -> Replica:
    """A warm replica."""
    config, log = folder / f"{arm.name}.json", folder / f"{arm.name}.log"
    config.write_text(json.dumps(arm.to_dict()))
    process = subprocess.Popen(
        [sys.executable, "-m", "servers.front.serve", "--config", str(config)],
        stdout=subprocess.PIPE,
        stderr=log.open("w"),
        text=True,
        cwd=REPOSITORY,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, log.read_text()
    replica = Replica(process, grpc.insecure_channel(f"127.0.0.1:{json.loads(line)['port']}"))
    for event in replica.telemetry.Watch(telemetry_pb2.WatchRequest(progress=True), timeout=240):
        assert event.progress.stage != "failed", event.progress.detail
        if event.progress.stage == "serving":
            break
    return replica


def stop(replica: Replica) -> None:
    if replica.process.poll() is None:
        os.kill(replica.process.pid, signal.SIGTERM)
        replica.process.wait(PATIENCE_S)
    replica.channel.close()


def arm_of(preset: str, **engine: Any) -> ArmConfig:
    return ArmConfig.from_preset(preset, model=MODEL, engine=replace(ENGINE, **engine))


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    replica = start(tmp_path_factory.mktemp("eager"), arm_of("eager"))
    yield replica
    stop(replica)


def embed(replica: Replica, text: str, **fields: Any) -> tuple[inference_pb2.EmbedResponse, dict[str, str]]:
    request = inference_pb2.EmbedRequest(text=text, **fields)
    answer, call = replica.inference.Embed.with_call(request, timeout=PATIENCE_S)
    return answer, dict(call.trailing_metadata())


def together(replica: Replica, texts: tuple[str, ...]) -> list[inference_pb2.EmbedResponse]:
    calls = [
        replica.inference.Embed.future(inference_pb2.EmbedRequest(text=text), timeout=PATIENCE_S) for text in texts
    ]
    return [call.result() for call in calls]


def refusal(replica: Replica, request: inference_pb2.EmbedRequest) -> grpc.Call:
    with pytest.raises(grpc.RpcError) as caught:
        replica.inference.Embed(request, timeout=PATIENCE_S)
    return caught.value


@torch.no_grad()
def assert_as_plain(texts: tuple[str, ...], answers: list[inference_pb2.EmbedResponse]) -> None:
    """The vectors are those of the Hugging Face model alone."""
    model = load_model(replace(MODEL, attention="eager"))
    for text, answer in zip(texts, answers, strict=True):
        ids = ByteTokenizer().encode(text)
        assert answer.tokens == len(ids)
        own = torch.tensor(answer.values, dtype=torch.float64)
        assert float(own.norm()) == pytest.approx(1.0, abs=1e-5)
        mean = model(input_ids=torch.tensor([ids])).last_hidden_state[0].double().mean(dim=0)
        assert float(own @ mean / mean.norm()) >= 0.9999


@pytest.mark.process
def test_a_text_is_answered_with_its_vector_and_the_trailing_metadata(eager: Replica) -> None:
    answer, trailer = embed(eager, "two words", request_id="one", session_id="s")
    assert_as_plain(("two words",), [answer])
    assert trailer["tailgate-arm"] == "eager"
    assert (trailer["tailgate-prompt-tokens"], trailer["tailgate-output-tokens"]) == ("10", "0")
    assert (trailer["tailgate-batch-size"], trailer["tailgate-padded-batch"]) == ("1", "1")
    assert trailer["tailgate-padded-length"] == "10"
    assert int(trailer["tailgate-prefill-ns"]) > 0
    assert trailer["tailgate-decode-ns"] == trailer["tailgate-compile-stall-ns"] == "0"
    assert int(trailer["tailgate-recv-ns"]) < int(trailer["tailgate-end-ns"])
    assert int(trailer["tailgate-queue-ns"]) >= 0


def test_texts_that_come_together_share_steps_and_keep_their_own_vectors(eager: Replica) -> None:
    assert_as_plain(TEXTS, together(eager, TEXTS))
    records = eager.steps(2)
    assert {record.kind for record in records} == {"encode"}
    assert not any(record.compiled for record in records)


def test_token_ids_are_taken_as_they_are(eager: Replica) -> None:
    ids = ByteTokenizer().encode("two words")
    request = inference_pb2.EmbedRequest(token_ids=inference_pb2.TokenIds(ids=ids))
    assert eager.inference.Embed(request).values == pytest.approx(embed(eager, "two words")[0].values, abs=1e-6)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (inference_pb2.EmbedRequest(), "the text is missing"),
        (inference_pb2.EmbedRequest(text=""), "the text is empty"),
        (inference_pb2.EmbedRequest(text="x" * 48), "text has 49 tokens; the limit is 48: shorten it"),
        (inference_pb2.EmbedRequest(text="x" * 5000), "text has 5000 bytes; the limit is 3072"),
        (inference_pb2.EmbedRequest(token_ids=inference_pb2.TokenIds(ids=[30522])), "ids go from 0 to 30521"),
        (inference_pb2.EmbedRequest(text="a", request_id="i" * 300), "request_id has 300 characters"),
    ],
)
def test_a_text_that_cannot_be_read_is_refused_by_value_limit_and_remedy(
    eager: Replica, request_: inference_pb2.EmbedRequest, words: str
) -> None:
    error = refusal(eager, request_)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert words in (error.details() or "")
    assert dict(error.trailing_metadata() or ())["tailgate-arm"] == "eager"


def test_an_encoder_says_that_it_embeds_to_who_wants_text(eager: Replica) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(eager.inference.Generate(inference_pb2.GenerateRequest(text="a", max_tokens=1), timeout=PATIENCE_S))
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert "embeds: call Embed instead" in caught.value.details()


def test_health_snapshot_and_start_up_know_the_encoder(eager: Replica) -> None:
    health = health_pb2_grpc.HealthStub(eager.channel)
    request = health_pb2.HealthCheckRequest(service="tailgate.v1.Inference")
    assert health.Check(request).status == health_pb2.HealthCheckResponse.SERVING
    snapshot = eager.telemetry.Snapshot(telemetry_pb2.SnapshotRequest())
    config = json.loads(snapshot.config_json)
    assert (config["model"]["task"], config["model"]["pooling"]) == ("embed", "mean")
    assert "encode" in snapshot.startup_groups_ns
    assert "kv_cache" not in snapshot.memory_bytes
    assert snapshot.vocab_size == 30522


# --- The batcher behind gRPC ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    """Four texts leave at once; fewer wait for seconds, as does what it asks itself before it is ready."""
    replica = start(tmp_path_factory.mktemp("patient"), replace(arm_of("eager", max_wait_ms=4_000.0), name="patient"))
    yield replica
    replica.process.kill()
    replica.process.wait()


def test_the_deadline_of_a_text_that_waits_for_company_passes(patient: Replica) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        patient.inference.Embed(inference_pb2.EmbedRequest(text="late"), timeout=0.3)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    patient.wait_until_idle()


def test_a_cancelled_text_leaves_its_place_to_another(patient: Replica) -> None:
    gone = patient.inference.Embed.future(inference_pb2.EmbedRequest(text="gone"), timeout=PATIENCE_S)
    wait_for(lambda: patient.counters()["in_flight"])
    gone.cancel()
    patient.wait_until_idle()
    assert_as_plain(TEXTS[1:5], together(patient, TEXTS[1:5]))


# --- Compiled ---------------------------------------------------------------------------------------------------------
