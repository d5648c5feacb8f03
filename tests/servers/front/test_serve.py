"""A replica in its own processes: one with a tiny model that many tests share, and some with a fake engine."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from loadtests.commands import main as tailgate
from servers.clock import now_ns
from servers.config import ArmConfig, EngineConfig, ModelConfig
from servers.front import serve
from servers.rpc import inference_pb2, inference_pb2_grpc, telemetry_pb2
from tests.fakes.credentials import make_certificates
from tests.fakes.processes import PATIENCE_S, listeners, unix_names, wait_for
from tests.servers.front.replica import ENGINE, Replica, ask, count_tokens, end_replicas, refusal, start, start_fake

__all__ = ["end_replicas"]

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("replica")]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SECRET = "s3cret-T0ken"


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    arguments = ("--replica", "eager-7", "--metrics-port", "free")
    replica = start(tmp_path_factory.mktemp("arm"), ArmConfig(name="eager", engine=ENGINE), *arguments)
    try:
        assert replica.health() == NOT_SERVING
        assert refusal(replica, ask()).code() is grpc.StatusCode.UNAVAILABLE
        stages = [progress.stage for progress in replica.wait_warm()]
        assert (stages[0], "warmup" in stages, stages[-1]) == ("load", True, "serving")
        yield replica
    finally:
        replica.end()


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


def test_the_replica_listens_at_its_two_ports_alone_and_its_sockets_have_no_names(replica: Replica) -> None:
    found = {(item.address, item.port) for item in listeners(replica.process.pid)}
    assert ("127.0.0.1", replica.port) in found
    assert {port for _, port in found} == {replica.port, replica.metrics_port}
    assert unix_names(replica.process.pid) == set()


def test_text_gives_text_and_stop_strings_cut_it(replica: Replica) -> None:
    request = inference_pb2.GenerateRequest(text="hello", max_tokens=24, ignore_eos=True)
    text = "".join(chunk.text for chunk in replica.inference.Generate(request))
    stop = text[3:5]
    request.stop.append(stop)
    chunks = list(replica.inference.Generate(request))
    assert "".join(chunk.text for chunk in chunks) == text[: text.index(stop)]
    assert chunks[-1].finish_reason == inference_pb2.FINISH_REASON_STOP
    replica.wait_until_idle()


def test_bad_requests_are_refused_with_value_and_limit(replica: Replica) -> None:
    generate, ids = inference_pb2.GenerateRequest, inference_pb2.TokenIds
    cases = [
        (ask(tokens=33), ("33", "32", "max_prompt_tokens")),
        (ask(tokens=0), ("empty",)),
        (generate(max_tokens=3), ("missing",)),
        (generate(text="", max_tokens=3), ("empty",)),
        (ask(max_tokens=-1), ("-1", "4096")),
        (ask(max_tokens=0), ("0", "4096")),
        (ask(max_tokens=10**9), ("1000000000", "4096", "max_new_tokens")),
        (generate(token_ids=ids(ids=[259]), max_tokens=1), ("259", "258")),
        (generate(token_ids=ids(ids=[-4]), max_tokens=1), ("-4",)),
        (ask(sampling=inference_pb2.Sampling(temperature=-1)), ("temperature", "-1")),
        (ask(sampling=inference_pb2.Sampling(top_k=-2)), ("top_k", "-2")),
        (ask(sampling=inference_pb2.Sampling(top_p=1.5)), ("top_p", "1.5")),
        (ask(request_id="r" * 257), ("request_id", "257", "256")),
        (ask(session_id="s" * 300_000), ("session_id", "300000", "256")),
        (ask(stop=["x" * 300_000]), ("stop string", "300000", "256")),
        (ask(stop=["x"] * 17), ("stop", "17", "16")),
        (ask(stop=["ab"] * 500_000), ("stop", "500000", "16")),
        (ask(stop_token_ids=[1] * 1025), ("stop_token_ids", "1025", "1024")),
        (ask(tokens=500_000), ("500000", "32", "max_prompt_tokens")),
        (generate(text="é" * 1025, max_tokens=1), ("2050 bytes", "2048", "max_prompt_tokens")),
        (generate(text="x" * 3_000_000, max_tokens=1), ("3000000 bytes", "2048")),
    ]
    for request, words in cases:
        error = refusal(replica, request)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, words
        assert [word for word in words if word not in error.details()] == [], error.details()
        assert dict(error.trailing_metadata())["tailgate-arm"] == "eager"
    longest = ask(request_id="r" * 256, session_id="s" * 256, stop=["x" * 256] * 16, stop_token_ids=[1] * 1024)
    assert count_tokens(replica.inference.Generate(longest)) == 4


def test_a_full_queue_is_refused_and_the_running_requests_end(replica: Replica) -> None:
    limit = ENGINE.slots + ENGINE.max_queue
    calls = [replica.inference.Generate(ask(max_tokens=300)) for _ in range(limit)]
    next(iter(calls[0]))
    error = refusal(replica, ask())
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(limit) in error.details()
    assert [count_tokens(call) for call in calls[1:]] == [300] * (limit - 1)
    list(calls[0])


def test_a_request_id_in_flight_cannot_be_used_twice(replica: Replica) -> None:
    call = replica.inference.Generate(ask(max_tokens=3000, request_id="same"))
    next(iter(call))
    assert refusal(replica, ask(request_id="same")).code() is grpc.StatusCode.INVALID_ARGUMENT
    call.cancel()
    replica.wait_until_idle()


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


def test_telemetry_sends_the_steps_and_the_snapshot_describes_the_arm(replica: Replica) -> None:
    list(replica.inference.Generate(ask()))
    steps = replica.steps(2)
    assert [step.step_id for step in steps] == list(range(steps[0].step_id, steps[0].step_id + len(steps)))
    assert steps[0].kind == "prefill"
    assert steps[0].end_ns > steps[0].start_ns
    snapshot = replica.telemetry.Snapshot(telemetry_pb2.SnapshotRequest())
    assert ArmConfig.from_dict(json.loads(snapshot.config_json)).engine == ENGINE
    assert (snapshot.device, snapshot.dtype, snapshot.vocab_size) == ("cpu", "float32", 259)
    assert snapshot.memory_bytes["kv_cache"] > 0
    assert snapshot.memory_bytes["process_peak"] > snapshot.memory_bytes["weights"]
    assert "torch" in snapshot.versions
    watch = replica.telemetry.Watch(telemetry_pb2.WatchRequest(facts=True))
    first = next(iter(watch))
    watch.cancel()
    assert first.WhichOneof("event") == "facts"
    assert dict(first.facts.graph_breaks) == dict(first.facts.cudagraph_skips) == {}


def test_an_idle_replica_reports_its_memory_about_each_second(replica: Replica) -> None:
    watch = replica.telemetry.Watch(telemetry_pb2.WatchRequest(memory=True), timeout=PATIENCE_S)
    first, second = next(watch).memory, next(watch).memory
    watch.cancel()
    assert second.at_ns - first.at_ns >= 1e9
    assert all(item.memory_bytes > 100 << 20 and not item.HasField("allocated_bytes") for item in (first, second))


def test_reflection_and_metrics_describe_the_replica(replica: Replica) -> None:
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    stub = reflection_pb2_grpc.ServerReflectionStub(replica.channel)
    answers = stub.ServerReflectionInfo(iter([request]), timeout=PATIENCE_S)
    names = {service.name for service in next(answers).list_services_response.service}
    assert {"tailgate.v1.Inference", "tailgate.v1.Telemetry", "grpc.health.v1.Health"} <= names
    list(replica.inference.Generate(ask()))
    with urllib.request.urlopen(f"http://127.0.0.1:{replica.metrics_port}/metrics") as page:
        text = page.read().decode()
    for metric in (
        'tailgate_in_flight{arm="eager",replica="eager-7"}',
        'tailgate_steps_total{arm="eager",fell_back="no",kind="prefill",replica="eager-7"}',
        'tailgate_startup_seconds{arm="eager",part="load",replica="eager-7"}',
        'tailgate_memory_bytes{arm="eager",owner="kv_cache",replica="eager-7"}',
    ):
        assert metric in text


def test_a_warm_engine_that_has_not_answered_does_not_serve_yet(tmp_path: Path) -> None:
    """At an IPv6 address, and without metrics."""
    replica = start_fake(tmp_path, "mute", "--host", "::", engine=replace(ENGINE, drain_grace_s=0.5))
    assert replica.metrics_port is None
    assert wait_for(lambda: replica.counters()["in_flight"]) == 1
    assert replica.health() == NOT_SERVING
    assert refusal(replica, ask()).code() is grpc.StatusCode.UNAVAILABLE
    replica.process.terminate()
    assert replica.process.wait(timeout=PATIENCE_S) == 0


@pytest.mark.parametrize(("how", "words"), [("fails", ("5 tokens", "INTERNAL", "CUDA error")), ("short", ("1 of 2",))])
def test_a_warm_engine_that_cannot_answer_never_serves(tmp_path: Path, how: str, words: tuple[str, ...]) -> None:
    replica = start_fake(tmp_path, how)
    last = replica.wait_warm()[-1]
    assert last.stage == "failed"
    assert all(word in last.detail for word in words)
    assert replica.process.wait(timeout=PATIENCE_S) == 1
    assert "Traceback" not in (tmp_path / f"{how}.log").read_text()


def test_undecodable_messages_are_invalid_arguments_and_leave_no_traceback(tmp_path: Path) -> None:
    replica = start_fake(tmp_path, "answers")
    services = {
        "tailgate.v1.Inference/Generate": "tailgate.v1.GenerateRequest",
        "tailgate.v1.Telemetry/Watch": "tailgate.v1.WatchRequest",
        "tailgate.v1.Telemetry/Snapshot": "tailgate.v1.SnapshotRequest",
        "grpc.health.v1.Health/Check": "grpc.health.v1.HealthCheckRequest",
        "grpc.health.v1.Health/Watch": "grpc.health.v1.HealthCheckRequest",
        "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": "ServerReflectionRequest",
    }
    for method, message in services.items():
        with pytest.raises(grpc.RpcError) as caught:
            list(replica.channel.stream_stream(f"/{method}")(iter([b"\xff" * 20]), timeout=PATIENCE_S))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, method
        assert "20 bytes" in caught.value.details()
        assert message in caught.value.details()
    with pytest.raises(grpc.RpcError) as caught:
        list(replica.telemetry.Watch(telemetry_pb2.WatchRequest(), timeout=PATIENCE_S))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    health = health_pb2_grpc.HealthStub(replica.channel).Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
    assert next(health).status in (NOT_SERVING, SERVING)
    health.cancel()
    replica.process.send_signal(signal.SIGTERM)
    assert replica.process.wait(timeout=PATIENCE_S) == 0
    assert "Traceback" not in (tmp_path / "answers.log").read_text()


def test_a_dead_engine_fails_its_requests_and_the_replica_exits_1(tmp_path: Path) -> None:
    replica = start_fake(tmp_path, "answers")
    replica.wait_warm()
    call = replica.inference.Generate(ask(max_tokens=4000))
    next(iter(call))
    os.kill(replica.engine, signal.SIGKILL)
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert replica.process.wait(timeout=PATIENCE_S) == 1


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
    assert replica.health() == SERVING
    replica.process.send_signal(signal.SIGTERM)
    wait_for(lambda: replica.health() != SERVING)
    assert refusal(replica, ask()).code() is grpc.StatusCode.UNAVAILABLE
    assert replica.process.wait(timeout=PATIENCE_S) == 0
    assert not Path(f"/proc/{stopped}").exists()


def test_a_replica_with_tls_and_a_token_answers_clients_that_have_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pem = make_certificates(tmp_path)
    monkeypatch.setenv("TAILGATE_TEST_TOKEN", SECRET)
    flags = ["--tls-certificate", pem.certificate, "--tls-key", pem.key, "--token-env", "TAILGATE_TEST_TOKEN"]
    replica = start_fake(tmp_path, "answers", *flags)
    plain = replica.channel
    roots = grpc.ssl_channel_credentials(Path(pem.ca).read_bytes())
    replica.channel = grpc.secure_channel(f"127.0.0.1:{replica.port}", roots)
    mine = (("authorization", f"Bearer {SECRET}"),)
    replica.wait_warm(metadata=mine)
    assert replica.health() == SERVING  # without a token
    assert count_tokens(replica.inference.Generate(ask(), timeout=PATIENCE_S, metadata=mine)) == 4
    reflection = reflection_pb2_grpc.ServerReflectionStub(replica.channel)
    for metadata, word in (((), "missing"), ((("authorization", "Bearer other"),), "wrong")):
        for call in (
            lambda sent: list(replica.inference.Generate(ask(), timeout=PATIENCE_S, metadata=sent)),
            lambda sent: replica.telemetry.Snapshot(telemetry_pb2.SnapshotRequest(), metadata=sent),
            lambda sent: list(reflection.ServerReflectionInfo(iter(()), metadata=sent, timeout=PATIENCE_S)),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call(metadata)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert word in caught.value.details()
    with pytest.raises(grpc.RpcError) as caught:
        list(inference_pb2_grpc.InferenceStub(plain).Generate(ask(), timeout=PATIENCE_S, metadata=mine))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert SECRET.encode() not in Path(f"/proc/{replica.process.pid}/cmdline").read_bytes()
    assert SECRET not in (tmp_path / "answers.log").read_text()
    assert SECRET not in str(replica.telemetry.Snapshot(telemetry_pb2.SnapshotRequest(), metadata=mine))


def channel_by(replica: Replica, ca: str, key: str, certificate: str) -> grpc.Channel:
    credentials = grpc.ssl_channel_credentials(*(Path(path).read_bytes() for path in (ca, key, certificate)))
    own = [("grpc.use_local_subchannel_pool", 1)]
    return grpc.secure_channel(f"127.0.0.1:{replica.port}", credentials, own)


def is_healthy(channel: grpc.Channel) -> bool:
    """Whether the server is healthy; False where the connection is refused."""
    call = health_pb2_grpc.HealthStub(channel).Check.future(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
    assert call.code() in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE)
    return call.code() is grpc.StatusCode.OK and call.result().status == SERVING


def test_new_connections_use_a_replaced_certificate_and_streams_go_on(tmp_path: Path) -> None:
    """Replaced by rename, one file after the other; the authority of clients too."""
    folders = [tmp_path / name for name in ("old", "new")]
    for folder in folders:
        folder.mkdir()
    old, new = map(make_certificates, folders)
    flags = {"--tls-certificate": "certificate", "--tls-key": "key", "--tls-client-ca": "ca"}
    served = {name: tmp_path / f"{name}.pem" for name in flags.values()}
    for name, path in served.items():
        path.write_bytes(Path(getattr(old, name)).read_bytes())

    def replace_by_new(name: str) -> None:
        fresh = served[name].with_suffix(".tmp")
        fresh.write_bytes(Path(getattr(new, name)).read_bytes())
        fresh.rename(served[name])

    arguments = [part for flag, name in flags.items() for part in (flag, str(served[name]))]
    replica = start_fake(tmp_path, "answers", *arguments)
    mine, theirs = ((pem.client_key, pem.client_certificate) for pem in (old, new))
    replica.channel = channel_by(replica, old.ca, *mine)
    replica.wait_warm()
    progress = replica.telemetry.Watch(telemetry_pb2.WatchRequest(progress=True), timeout=60)
    stream = replica.inference.Generate(ask(max_tokens=2000), timeout=60)
    assert len(next(stream).token_ids) == 1  # no other token comes
    replace_by_new("certificate")  # its key is still the old one
    assert is_healthy(channel_by(replica, old.ca, *mine))
    replace_by_new("key")
    assert is_healthy(channel_by(replica, new.ca, *mine))
    assert not is_healthy(channel_by(replica, old.ca, *mine))
    replace_by_new("ca")
    assert is_healthy(channel_by(replica, new.ca, *theirs))
    assert not is_healthy(channel_by(replica, new.ca, *mine))
    assert is_healthy(replica.channel)  # on its first connection
    assert stream.is_active()
    replica.process.send_signal(signal.SIGTERM)
    assert "draining" in (event.progress.stage for event in progress)
    log = (tmp_path / "answers.log").read_text()
    assert log.count("the certificate stays as it was: TLS key") == 1
    assert "PRIVATE KEY" not in log


def arm_file(folder: Path, **settings: object) -> str:
    path = folder / "arm.json"
    path.write_text(json.dumps(ArmConfig(name="eager", engine=ENGINE, **settings).to_dict()))  # type: ignore[arg-type]
    return str(path)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--token-env", "TAILGATE_TEST_TOKEN"], ("TAILGATE_TEST_TOKEN", "not set")),
        (["--token-env", SECRET], ("--token-env",)),
        (["--token-env", ""], ("--token-env", "empty")),
        (["--tls-certificate", "", "--tls-key", ""], ("--tls-certificate", "empty")),
        (["--tls-client-ca", ""], ("--tls-client-ca", "empty")),
        (["--tls-certificate", "/nowhere/c.pem", "--tls-key", "/nowhere/k.pem"], ("/nowhere/c.pem",)),
        (["--tls-key", "/nowhere/k.pem"], ("TLS certificate", "missing")),
    ],
)
def test_bad_security_settings_end_with_code_2_and_one_line(
    tmp_path: Path, flags: list[str], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    serve_arm = ["--config", arm_file(tmp_path), *flags]
    for main, arguments in ((serve.main, serve_arm), (tailgate.main, ["serve", "--preset", "eager", *flags])):
        assert main(arguments) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert all(word in line for word in words)
        assert SECRET not in line


def test_a_taken_port_and_a_missing_tokenizer_end_with_code_2_and_one_line(
    replica: Replica, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve.main(["--config", arm_file(tmp_path), "--port", str(replica.port)]) == 2
    assert str(replica.port) in capsys.readouterr().err
    nowhere = ModelConfig(id=str(tmp_path / "nowhere"))
    assert serve.main(["--config", arm_file(tmp_path, model=nowhere)]) == 2
    error = capsys.readouterr().err
    assert "nowhere" in error
    assert "Traceback" not in error
