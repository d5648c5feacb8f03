"""Replicas in their own processes, and the gRPC server of a replica in the test's process with a scripted engine."""

from __future__ import annotations

import json
import os
import signal
import socket
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tailgate.loadtests.commands import main as tailgate
from tailgate.servers.clock import now_ns
from tailgate.servers.config import ArmConfig, EngineConfig, ModelConfig
from tailgate.servers.engine.messages import Finished, StepOutput, Submit
from tailgate.servers.front import serve
from tailgate.servers.front.front import Front
from tailgate.servers.front.metrics import FrontMetrics
from tailgate.servers.front.requests import encode_bytes
from tailgate.servers.metadata import INFERENCE_SERVICE
from tailgate.servers.rpc import inference_pb2, telemetry_pb2
from tests.fakes.processes import PATIENCE_S, listeners, unix_names, wait_for
from tests.servers.front.replica import (
    ENCODER,
    ENCODER_ENGINE,
    ENGINE,
    TEXTS,
    Replica,
    ask,
    count_tokens,
    embed,
    embed_together,
    end_replicas,
    refusal,
    start,
    start_fake,
)
from tests.servers.front.test_front import READY
from tests.servers.splitter.split import Loop
from tests.servers.test_config import arm_from

__all__ = ["end_replicas"]

in_processes = pytest.mark.process
with_replica = pytest.mark.xdist_group("replica")
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
INVALID, UNAVAILABLE = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAVAILABLE
SECRET = "s3cret-T0ken"


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    arguments = ("--replica", "eager-7", "--metrics-port", "free")
    replica = start(tmp_path_factory.mktemp("arm"), ArmConfig(name="eager", engine=ENGINE), *arguments)
    try:
        assert replica.health() == NOT_SERVING
        assert refusal(replica, ask()).code() is UNAVAILABLE
        stages = [progress.stage for progress in replica.wait_warm()]
        assert (stages[0], "warmup" in stages, stages[-1]) == ("load", True, "serving")
        yield replica
    finally:
        replica.end()


@in_processes
@with_replica
def test_an_answer_has_its_tokens_their_times_and_the_trailing_metadata(replica: Replica) -> None:
    assert replica.health() == SERVING
    call = replica.inference.Generate(ask(tokens=9, max_tokens=6))
    chunks = list(call)
    times = [stamp for chunk in chunks for stamp in chunk.emit_ns]
    assert len([token for chunk in chunks for token in chunk.token_ids]) == len(times) == 6
    assert times == sorted(times)
    assert chunks[-1].finish_reason == inference_pb2.FINISH_REASON_LENGTH
    trailer = dict(call.trailing_metadata())
    expected = {"arm": "eager", "replica": "eager-7", "prompt-tokens": "9", "output-tokens": "6", "batch-size": "1"}
    expected |= {"padded-length": "9", "compile-stall-ns": "0"}
    assert {key: trailer[f"tailgate-{key}"] for key in expected} == expected
    received, ended = int(trailer["tailgate-recv-ns"]), int(trailer["tailgate-end-ns"])
    assert replica.started_ns <= received <= times[0] <= times[-1] <= ended <= now_ns()
    inside = sum(int(trailer[f"tailgate-{part}-ns"]) for part in ("queue", "prefill", "decode"))
    assert 0 < inside <= ended - received


@in_processes
@with_replica
def test_cancelled_and_expired_requests_free_their_slots(replica: Replica) -> None:
    long = [replica.inference.Generate(ask(max_tokens=4000)) for _ in range(ENGINE.slots)]
    for call in long:
        next(iter(call))
    long[0].cancel()
    assert count_tokens(replica.inference.Generate(ask(max_tokens=3), timeout=PATIENCE_S)) == 3
    assert long[1].is_active(), "the answer took the slot of the cancelled request, not of the other one"
    with pytest.raises(grpc.RpcError) as caught:
        list(replica.inference.Generate(ask(max_tokens=4000), timeout=0.3))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert count_tokens(replica.inference.Generate(ask(max_tokens=3), timeout=PATIENCE_S)) == 3
    long[1].cancel()
    replica.wait_until_idle()


@in_processes
@with_replica
def test_a_replica_tells_of_its_arm_and_listens_at_two_ports_alone(replica: Replica) -> None:
    list(replica.inference.Generate(ask()))
    steps = replica.steps(2)
    assert [step.step_id for step in steps] == list(range(steps[0].step_id, steps[0].step_id + len(steps)))
    assert steps[0].kind == "prefill"
    assert steps[0].end_ns > steps[0].start_ns
    watch = replica.telemetry.Watch(telemetry_pb2.WatchRequest(), timeout=PATIENCE_S)
    readings = (event.memory for event in watch if event.WhichOneof("event") == "memory")
    first, second = next(readings), next(readings)
    watch.cancel()
    assert second.at_ns - first.at_ns >= 1e9
    assert all(item.memory_bytes > 100 << 20 and not item.HasField("reserved_bytes") for item in (first, second))
    snapshot = replica.telemetry.Snapshot(telemetry_pb2.SnapshotRequest())
    assert ArmConfig.from_dict(json.loads(snapshot.config_json)).engine == ENGINE
    assert (snapshot.device, snapshot.dtype, snapshot.vocab_size) == ("cpu", "float32", 259)
    assert snapshot.memory_bytes["kv_cache"] > 0
    assert snapshot.memory_bytes["process_peak"] > snapshot.memory_bytes["weights"]
    assert "torch" in snapshot.versions
    with urllib.request.urlopen(f"http://127.0.0.1:{replica.metrics_port}/metrics") as page:
        text = page.read().decode()
    for metric in (
        'tailgate_in_flight{arm="eager",replica="eager-7"}',
        'tailgate_steps_total{arm="eager",fell_back="no",kind="prefill",replica="eager-7"}',
    ):
        assert metric in text
    found = {(item.address, item.port) for item in listeners(replica.process.pid)}
    assert found == {("127.0.0.1", replica.port), ("127.0.0.1", replica.metrics_port)}
    assert unix_names(replica.process.pid) == set()


@in_processes
def test_two_frontends_of_a_replica_answer_at_ports_of_their_own_and_drain_together(tmp_path: Path) -> None:
    first = start(tmp_path, ArmConfig(name="eager", engine=ENGINE.replace(frontends=2)))
    assert first.wait_warm()[-1].stage == "serving"
    (port,) = first.further_ports
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        second = replace(first, port=port, channel=channel)
        assert (first.health(), second.health()) == (SERVING, SERVING)
        calls = [each.inference.Generate(ask()) for each in (first, second)]
        assert [count_tokens(call) for call in calls] == [4, 4]
        assert {dict(call.trailing_metadata())["tailgate-replica"] for call in calls} == {"eager-0"}
        assert wait_for(lambda: first.counters()["requests"] == 2), "the first counts for both"
        call = second.inference.Generate(ask(max_tokens=500))
        next(iter(call))
        first.process.terminate()
        assert count_tokens(call) > 400
        assert call.code() is grpc.StatusCode.OK
    assert first.process.wait(timeout=PATIENCE_S) == 0


@in_processes
def test_an_encoder_gives_texts_that_come_together_their_own_vectors(tmp_path: Path) -> None:
    encoder = start(tmp_path, arm_from("eager", model=ENCODER, engine=ENCODER_ENGINE))
    assert encoder.wait_warm()[-1].stage == "serving"
    answers = embed_together(encoder, TEXTS)
    assert [answer.tokens for answer in answers] == [len(encode_bytes(text)) for text in TEXTS]
    alone = [embed(encoder, text)[0] for text in TEXTS]
    np.testing.assert_allclose([item.values for item in answers], [item.values for item in alone], atol=1e-6)
    assert len({answer.values[0] for answer in alone}) == len(TEXTS)
    records = encoder.steps(2)
    assert {record.kind for record in records} == {"encode"}
    assert not any(record.compiled for record in records)
    _, trailer = embed(encoder, TEXTS[1], request_id="one", session_id="s")
    expected = {"arm": "eager", "prompt-tokens": "10", "output-tokens": "0", "batch-size": "1", "padded-batch": "1"}
    expected |= {"padded-length": "10", "decode-ns": "0", "compile-stall-ns": "0"}
    assert {key: trailer[f"tailgate-{key}"] for key in expected} == expected
    assert int(trailer["tailgate-prefill-ns"]) > 0
    assert int(trailer["tailgate-recv-ns"]) < int(trailer["tailgate-end-ns"])
    snapshot = encoder.telemetry.Snapshot(telemetry_pb2.SnapshotRequest())
    assert "kv_cache" not in snapshot.memory_bytes


@in_processes
def test_a_warm_engine_that_has_not_answered_does_not_serve_yet(tmp_path: Path) -> None:
    """At an IPv6 address, and without metrics."""
    replica = start_fake(tmp_path, "mute", "--host", "::", engine=ENGINE.replace(drain_grace_s=0.5))
    assert replica.metrics_port is None
    assert wait_for(lambda: replica.counters()["in_flight"]) == 1
    assert replica.health() == NOT_SERVING
    assert refusal(replica, ask()).code() is UNAVAILABLE
    progress = replica.telemetry.Watch(telemetry_pb2.WatchRequest(), timeout=PATIENCE_S)
    replica.process.terminate()
    assert "draining" in (event.progress.stage for event in progress)
    assert replica.process.wait(timeout=PATIENCE_S) == 0


@in_processes
def test_a_warm_engine_that_cannot_answer_never_serves(tmp_path: Path) -> None:
    replica = start_fake(tmp_path, "short")
    last = replica.wait_warm()[-1]
    assert (last.stage, "1 of 2" in last.detail) == ("failed", True)
    assert replica.process.wait(timeout=PATIENCE_S) == 1
    # grpcio itself prints one for each call that is open when its server stops.
    frames = [line for line in (tmp_path / "short.log").read_text().splitlines() if line.startswith('  File "')]
    assert [line for line in frames if "src/python/grpcio" not in line] == []


@in_processes
def test_a_dead_engine_fails_its_requests_and_the_replica_exits_1(tmp_path: Path) -> None:
    replica = start_fake(tmp_path, "answers")
    replica.wait_warm()
    call = replica.inference.Generate(ask(max_tokens=4000))
    next(iter(call))
    os.kill(replica.engine, signal.SIGKILL)
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert caught.value.code() is UNAVAILABLE
    assert replica.process.wait(timeout=PATIENCE_S) == 1


@in_processes
def test_a_replica_with_a_stopped_engine_is_healthy_refuses_while_it_drains_and_ends(tmp_path: Path) -> None:
    engine = EngineConfig(slots=1, max_queue=60, max_prompt_tokens=8192, max_new_tokens=8, drain_grace_s=1, threads=1)
    replica = start_fake(tmp_path, "answers", engine=engine)
    replica.wait_warm()
    stopped = replica.engine
    os.kill(stopped, signal.SIGSTOP)
    # 50 of them are more than a pipe holds
    many = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[200] * 8000), max_tokens=1)
    requests = [ask(tokens=200)] * 3 + [many] * 50
    calls = [replica.inference.Generate(request) for request in requests]
    wait_for(lambda: replica.counters()["in_flight"] == len(calls))
    asked = health_pb2.HealthCheckRequest(service=INFERENCE_SERVICE)
    statuses = (answer.status for answer in health_pb2_grpc.HealthStub(replica.channel).Watch(asked))
    assert next(statuses) == SERVING
    replica.process.send_signal(signal.SIGTERM)
    assert next(statuses) == NOT_SERVING
    assert refusal(replica, ask()).code() is UNAVAILABLE
    assert replica.process.wait(timeout=PATIENCE_S) == 0
    assert not Path(f"/proc/{stopped}").exists()


@in_processes
def test_a_token_lets_in_clients_that_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILGATE_TEST_TOKEN", SECRET)
    replica = start_fake(tmp_path, "answers", "--token-env", "TAILGATE_TEST_TOKEN")
    mine = (("authorization", f"Bearer {SECRET}"),)
    replica.wait_warm(metadata=mine)
    assert replica.health() == SERVING  # without a token
    assert count_tokens(replica.inference.Generate(ask(), timeout=PATIENCE_S, metadata=mine)) == 4
    reflection = reflection_pb2_grpc.ServerReflectionStub(replica.channel)
    for metadata in ((), (("authorization", "Bearer other"),)):
        for call in (
            lambda sent: list(replica.inference.Generate(ask(), timeout=PATIENCE_S, metadata=sent)),
            lambda sent: replica.telemetry.Snapshot(telemetry_pb2.SnapshotRequest(), metadata=sent),
            lambda sent: list(reflection.ServerReflectionInfo(iter(()), metadata=sent, timeout=PATIENCE_S)),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call(metadata)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert SECRET.encode() not in Path(f"/proc/{replica.process.pid}/cmdline").read_bytes()
    assert SECRET not in (tmp_path / "answers.log").read_text()
    assert SECRET not in str(replica.telemetry.Snapshot(telemetry_pb2.SnapshotRequest(), metadata=mine))


@contextmanager
def served(arm: ArmConfig, send: Callable[[Front, Any], None] = lambda front, message: None) -> Iterator[Replica]:
    """A warm front behind the gRPC server of a replica, on a thread. `send` gets the messages to the engine."""
    loop = Loop()

    async def begin() -> tuple[grpc.aio.Server, int]:
        metrics = FrontMetrics(arm.name, "arm-0")
        front = Front(arm, "arm-0", lambda message: send(front, message), encode_bytes, metrics)
        front.warm = READY
        front.open()
        server = serve._server(front, health.aio.HealthServicer(), token="")
        port = serve._listen(server, "127.0.0.1", 0)
        await server.start()
        return server, port

    server, port = loop.run(begin())
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Replica(None, port, channel, started_ns=0)  # type: ignore[arg-type]
    finally:
        loop.run(server.stop(0))
        loop.close()


def spell(front: Front, message: object) -> None:
    """Answer with as many letters as tokens are requested; 2,000 tokens never come after the first."""
    if isinstance(message, Submit):
        name, letters = message.request_id, encode_bytes("abcdefghij")[1:]
        ends = [Finished(request_id=name, status="OK", reason="length")] if message.max_tokens < 2000 else []
        tokens = [(name, token) for token in (letters[: message.max_tokens] if ends else letters[:1])]
        front.receive([StepOutput(emit_ns=1, tokens=tokens, finished=ends)])


GENERATOR = ArmConfig(name="eager", engine=ENGINE)
EMBEDDER = ArmConfig(name="eager", model=ENCODER, engine=ENCODER_ENGINE)


def test_a_text_is_read_by_the_tokenizer_and_the_longest_names_and_the_deadline_reach_the_engine() -> None:
    sent: list[Submit] = []
    with served(GENERATOR, lambda front, message: [sent.append(message), spell(front, message)]) as replica:
        chunks = list(replica.inference.Generate(inference_pb2.GenerateRequest(text="hello", max_tokens=8)))
        longest = ask(request_id="r" * 256, session_id="s" * 256)
        assert count_tokens(replica.inference.Generate(longest, timeout=60.0)) == 4
        replica.wait_until_idle()
    assert (sent[0].prompt, sent[0].deadline_ns) == (encode_bytes("hello"), 0)
    assert [token for chunk in chunks for token in chunk.token_ids] == encode_bytes("abcdefgh")[1:]
    assert chunks[-1].finish_reason == inference_pb2.FINISH_REASON_LENGTH
    assert 50e9 < sent[1].deadline_ns - sent[1].recv_ns < 70e9


def test_bad_requests_are_refused_with_value_and_limit() -> None:
    generate, text, ids = inference_pb2.GenerateRequest, inference_pb2.EmbedRequest, inference_pb2.TokenIds
    prompts: list[tuple[Any, tuple[str, ...]]] = [
        (ask(tokens=33), ("33", "32", "max_prompt_tokens")),
        (ask(tokens=0), ("empty",)),
        (generate(max_tokens=3), ("missing",)),
        (generate(text="", max_tokens=3), ("empty",)),
        (ask(max_tokens=0), ("0", "4096")),
        (ask(max_tokens=10**9), ("1000000000", "4096", "max_new_tokens")),
        (generate(token_ids=ids(ids=[259]), max_tokens=1), ("259", "258")),
        (generate(token_ids=ids(ids=[-4]), max_tokens=1), ("-4",)),
        (ask(request_id="r" * 257), ("request_id", "257", "256")),
        (ask(session_id="s" * 300_000), ("session_id", "300000", "256")),
        (ask(tokens=500_000), ("500000", "32", "max_prompt_tokens")),
        (generate(text="é" * 1025, max_tokens=1), ("2050 bytes", "2048", "max_prompt_tokens")),
        (text(text="a"), ("Generate",)),
    ]
    texts: list[tuple[Any, tuple[str, ...]]] = [
        (text(text=""), ("text", "empty")),
        (text(text="x" * 48), ("text", "49", "48")),
        (ask(), ("Embed",)),
    ]
    for arm, cases in ((GENERATOR, prompts), (EMBEDDER, texts)):
        with served(arm) as replica:
            for request, words in cases:
                error = refusal(replica, request)
                code = grpc.StatusCode.UNIMPLEMENTED if words[0] in ("Generate", "Embed") else INVALID
                assert error.code() is code, words
                assert [word for word in words if word not in error.details()] == [], error.details()
                assert dict(error.trailing_metadata())["tailgate-arm"] == "eager"


def test_health_is_watched_and_reflection_lists_the_services() -> None:
    with served(GENERATOR) as replica:
        assert (
            next(health_pb2_grpc.HealthStub(replica.channel).Watch(health_pb2.HealthCheckRequest())).status == SERVING
        )
        stub = reflection_pb2_grpc.ServerReflectionStub(replica.channel)
        listed = next(stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")])))
        names = {service.name for service in listed.list_services_response.service}
        assert {"tailgate.v1.Inference", "tailgate.v1.Telemetry", "grpc.health.v1.Health"} <= names


def arm_file(folder: Path, **settings: Any) -> str:
    path = folder / "arm.json"
    path.write_text(json.dumps(GENERATOR.replace(**settings).to_dict()))
    return str(path)


def test_bad_security_settings_end_with_code_2_and_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    serve_arm, by_hand = ["--config", arm_file(tmp_path)], ["serve", "--preset", "eager"]
    for variable, words in (("TAILGATE_TEST_TOKEN", "not set"), (SECRET, "--token-env"), ("", "empty")):
        for main, arguments in ((serve.main, serve_arm), (tailgate.main, by_hand)):
            assert main([*arguments, "--token-env", variable]) == 2
            (line,) = capsys.readouterr().err.strip().splitlines()
            assert words in line
            assert SECRET not in line


def test_a_used_port_and_a_missing_tokenizer_end_with_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert serve.main(["--config", arm_file(tmp_path), "--port", port]) == 2
    assert port in capsys.readouterr().err
    nowhere = ModelConfig(id=str(tmp_path / "nowhere"))
    assert serve.main(["--config", arm_file(tmp_path, model=nowhere)]) == 2
    error = capsys.readouterr().err
    assert "nowhere" in error
    assert "Traceback" not in error
