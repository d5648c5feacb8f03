"""The served replica as its users meet it: a real process, real gRPC, a tiny model."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from servers.clock import now_ns
from servers.config import ArmConfig, EngineConfig
from servers.rpc import inference_pb2, inference_pb2_grpc, telemetry_pb2, telemetry_pb2_grpc
from tests.fakes.certificates import make_certificates
from tests.fakes.listening import listeners, unix_names
from tests.fakes.patience import PATIENCE_S, wait_for

REPOSITORY = Path(__file__).resolve().parents[3]
ENGINE = EngineConfig(slots=2, max_queue=3, max_prompt_tokens=32, max_new_tokens=4096, drain_grace_s=20, threads=1)
STARTED: list[subprocess.Popen[str]] = []


@dataclass
class Replica:
    process: subprocess.Popen[str]
    port: int
    channel: grpc.Channel
    started_ns: int
    metrics_port: int | None = None

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


def start(folder: Path, arm: ArmConfig, *arguments: str, module: tuple[str, ...] = ("servers.front.serve",)) -> Replica:
    config = folder / f"{arm.name}.json"
    config.write_text(json.dumps(arm.to_dict()))
    started_ns = now_ns()
    process = subprocess.Popen(
        [sys.executable, "-m", *module, "--config", str(config), *arguments],
        stdout=subprocess.PIPE,
        stderr=(folder / f"{arm.name}.log").open("w"),
        text=True,
        cwd=REPOSITORY,
    )
    STARTED.append(process)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, (folder / f"{arm.name}.log").read_text()
    said = json.loads(line)
    port = said["port"]
    channel = grpc.insecure_channel(f"127.0.0.1:{port}")
    return Replica(process, port, channel, started_ns, said.get("metrics_port"))


@pytest.fixture(autouse=True)
def no_replica_outlives_its_test() -> Iterator[None]:
    before = len(STARTED)
    yield
    for process in STARTED[before:]:
        if process.poll() is None:
            for child in engines_of(process):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)  # one that was stopped would stay
            process.kill()
            process.wait()


def start_fake(folder: Path, how: str, *arguments: str, engine: EngineConfig = ENGINE) -> Replica:
    """A replica whose engine is a fake, for what the front alone does."""
    return start(folder, ArmConfig(name=how, engine=engine), *arguments, module=("tests.fakes.engine", how))


def test_a_replica_listens_on_an_ipv6_address(tmp_path: Path) -> None:
    """All addresses of both kinds, so that a host without IPv6 can tell too."""
    replica = start_fake(tmp_path, "mute", "--host", "::")
    assert replica.health() == health_pb2.HealthCheckResponse.NOT_SERVING


def test_metrics_are_on_a_free_port_where_that_is_asked_for_and_nowhere_unless(tmp_path: Path) -> None:
    assert start_fake(tmp_path, "mute").metrics_port is None
    replica = start_fake(tmp_path, "mute", "--metrics-port", "free")
    assert replica.metrics_port not in (None, 0, replica.port)
    with urllib.request.urlopen(f"http://127.0.0.1:{replica.metrics_port}/metrics") as page:
        assert 'tailgate_in_flight{arm="mute",replica="mute-0"} 0.0' in page.read().decode()


def wait_warm(replica: Replica) -> list[telemetry_pb2.Progress]:
    seen = []
    for event in replica.telemetry.Watch(telemetry_pb2.WatchRequest(progress=True), timeout=60):
        seen.append(event.progress)
        if event.progress.stage in ("serving", "failed"):
            break
    return seen


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    replica = start(tmp_path_factory.mktemp("arm"), ArmConfig(name="eager", engine=ENGINE), "--replica", "eager-7")
    try:
        wait_warm(replica)
        yield replica
    finally:
        replica.process.kill()
        replica.process.wait()


def ask(*, tokens: int = 5, max_tokens: int = 4, **fields: object) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=range(5, 5 + tokens)), max_tokens=max_tokens, ignore_eos=True, **fields
    )


def engines_of(process: subprocess.Popen[str]) -> list[int]:
    """The engine of a replica's process, beside what removes its temporary folder."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]


def engine_of(replica: Replica) -> int:
    """The process id of the replica's engine."""
    (engine,) = engines_of(replica.process)
    return engine


def refusal(replica: Replica, request: inference_pb2.GenerateRequest) -> grpc.Call:
    with pytest.raises(grpc.RpcError) as caught:
        list(replica.inference.Generate(request, timeout=PATIENCE_S))
    return caught.value


@pytest.mark.process
def test_an_answer_carries_its_tokens_their_times_and_the_trailing_metadata(replica: Replica) -> None:
    before_ns = now_ns()
    call = replica.inference.Generate(ask(tokens=9, max_tokens=6))
    chunks = list(call)
    ids = [token for chunk in chunks for token in chunk.token_ids]
    times = [stamp for chunk in chunks for stamp in chunk.emit_ns]
    assert len(ids) == len(times) == 6
    assert times == sorted(times)
    assert chunks[-1].finish_reason == inference_pb2.FINISH_REASON_LENGTH
    trailer = dict(call.trailing_metadata())
    assert trailer["tailgate-arm"] == "eager"
    assert trailer["tailgate-replica"] == "eager-7"
    assert trailer["tailgate-prompt-tokens"] == "9"
    assert trailer["tailgate-output-tokens"] == "6"
    assert trailer["tailgate-padded-length"] == "9"
    assert trailer["tailgate-batch-size"] == "1"
    assert trailer["tailgate-compile-stall-ns"] == "0"
    received, ended = int(trailer["tailgate-recv-ns"]), int(trailer["tailgate-end-ns"])
    assert abs(received - before_ns) < 5e9
    assert received <= times[0] <= times[-1] <= ended
    inside = sum(int(trailer[f"tailgate-{part}-ns"]) for part in ("queue", "prefill", "decode"))
    assert 0 < inside <= ended - received


def test_a_replica_listens_at_its_port_alone_with_its_engine_and_no_socket_of_it_has_a_name(replica: Replica) -> None:
    found = {(item.address, item.port) for item in listeners(replica.process.pid)}
    assert found == {("127.0.0.1", replica.port)}
    assert unix_names(replica.process.pid) == set()


def test_text_in_gives_text_out_and_stop_strings_cut_it(replica: Replica) -> None:
    request = inference_pb2.GenerateRequest(text="hello", max_tokens=24, ignore_eos=True)
    text = "".join(chunk.text for chunk in replica.inference.Generate(request))
    assert text
    stop = text[3:5]
    request.stop.append(stop)
    chunks = list(replica.inference.Generate(request))
    assert "".join(chunk.text for chunk in chunks) == text[: text.index(stop)]
    assert chunks[-1].finish_reason == inference_pb2.FINISH_REASON_STOP
    replica.wait_until_idle()


def test_sampling_is_reproducible_by_seed(replica: Replica) -> None:
    def draw(seed: int) -> list[int]:
        request = ask(max_tokens=12, sampling=inference_pb2.Sampling(temperature=1.0, seed=seed))
        return [token for chunk in replica.inference.Generate(request) for token in chunk.token_ids]

    assert draw(1) == draw(1) != draw(2)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (ask(tokens=33), ("33", "32", "max_prompt_tokens")),
        (ask(tokens=0), ("empty",)),
        (inference_pb2.GenerateRequest(max_tokens=3), ("missing",)),
        (inference_pb2.GenerateRequest(text="", max_tokens=3), ("empty",)),
        (ask(max_tokens=-1), ("-1", "4096")),
        (ask(max_tokens=0), ("0", "4096")),
        (ask(max_tokens=10**9), ("1000000000", "4096", "max_new_tokens")),
        (inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[259]), max_tokens=1), ("259", "258")),
        (inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[-4]), max_tokens=1), ("-4",)),
        (ask(sampling=inference_pb2.Sampling(temperature=-1)), ("temperature", "-1")),
        (ask(sampling=inference_pb2.Sampling(top_k=-2)), ("top_k", "-2")),
        (ask(sampling=inference_pb2.Sampling(top_p=1.5)), ("top_p", "1.5")),
        (ask(request_id="r" * 257), ("request_id", "257", "256")),
        (ask(session_id="s" * 300_000), ("session_id", "300000", "256")),
        (ask(stop=["x" * 300_000]), ("stop string", "300000", "256")),
        (ask(stop=["x"] * 17), ("stop has 17", "16")),
        (ask(stop_token_ids=[1] * 1025), ("stop_token_ids", "1025", "1024")),
        (ask(tokens=500_000), ("500000", "32", "max_prompt_tokens")),
        (inference_pb2.GenerateRequest(text="é" * 1025, max_tokens=1), ("2050 bytes", "2048", "max_prompt_tokens")),
        (inference_pb2.GenerateRequest(text="x" * 3_000_000, max_tokens=1), ("3000000 bytes", "2048")),
    ],
)
def test_bad_requests_are_named_with_value_and_limit(
    replica: Replica, request_: inference_pb2.GenerateRequest, words: tuple[str, ...]
) -> None:
    error = refusal(replica, request_)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    for word in words:
        assert word in error.details()
    assert dict(error.trailing_metadata())["tailgate-arm"] == "eager"


def test_the_longest_that_is_allowed_is_served(replica: Replica) -> None:
    request = ask(request_id="r" * 256, session_id="s" * 256, stop=["x" * 256] * 16, stop_token_ids=[1] * 1024)
    assert sum(len(chunk.token_ids) for chunk in replica.inference.Generate(request)) == 4


def test_others_do_not_wait_while_large_requests_come(replica: Replica) -> None:
    health = health_pb2_grpc.HealthStub(grpc.insecure_channel(f"127.0.0.1:{replica.port}", [("tailgate.apart", 1)]))
    large = [
        ask(stop=["x" * 3_000_000]),
        ask(stop=["ab"] * 500_000),
        ask(tokens=500_000),
        inference_pb2.GenerateRequest(text="x" * 3_000_000, max_tokens=1),
    ]
    waits = []
    for request in large:
        call = replica.inference.Generate(request, timeout=60)
        while not call.done():
            started = time.monotonic()
            health.Check(health_pb2.HealthCheckRequest(), timeout=60)
            waits.append(time.monotonic() - started)
        assert call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert max(waits) < 1.0  # 20 ms where nothing else runs; matching the first took minutes


UNDECODABLE = b"\xff" * 20


def test_what_is_no_protobuf_is_the_callers_error_in_every_method_and_leaves_no_traceback(tmp_path: Path) -> None:
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
            list(replica.channel.stream_stream(f"/{method}")(iter([UNDECODABLE]), timeout=PATIENCE_S))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, method
        assert "20 bytes is no" in caught.value.details()
        assert message in caught.value.details()
        assert "class" not in caught.value.details()
    with pytest.raises(grpc.RpcError) as caught:
        list(replica.telemetry.Watch(telemetry_pb2.WatchRequest(), timeout=PATIENCE_S))
    assert "nothing to watch is named" in caught.value.details()
    health = health_pb2_grpc.HealthStub(replica.channel).Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
    assert next(health).status in (health_pb2.HealthCheckResponse.NOT_SERVING, health_pb2.HealthCheckResponse.SERVING)
    health.cancel()
    replica.process.send_signal(signal.SIGTERM)
    assert replica.process.wait(timeout=PATIENCE_S) == 0
    assert "Traceback" not in (tmp_path / "answers.log").read_text()


@pytest.mark.process
def test_a_replica_whose_engine_stands_still_answers_health_checks_and_ends_when_told(tmp_path: Path) -> None:
    engine = EngineConfig(slots=1, max_queue=60, max_prompt_tokens=8192, max_new_tokens=8, drain_grace_s=1, threads=1)
    replica = start_fake(tmp_path, "answers", engine=engine)
    wait_warm(replica)
    frozen = engine_of(replica)
    os.kill(frozen, signal.SIGSTOP)
    calls = [replica.inference.Generate(ask(tokens=200, max_tokens=4)) for _ in range(3)]
    many = inference_pb2.TokenIds(ids=[200] * 8000)  # 50 of them are more than a pipe holds
    calls += [
        replica.inference.Generate(inference_pb2.GenerateRequest(token_ids=many, max_tokens=1)) for _ in range(50)
    ]
    wait_for(lambda: replica.counters()["in_flight"] == len(calls))
    assert replica.health() == health_pb2.HealthCheckResponse.SERVING
    replica.process.send_signal(signal.SIGTERM)
    assert replica.process.wait(timeout=20) == 0  # after its own grace, not the default one
    assert not Path(f"/proc/{frozen}").exists()


@pytest.mark.process
def test_a_full_queue_is_refused_at_once_and_the_running_requests_are_not_disturbed(replica: Replica) -> None:
    limit = ENGINE.slots + ENGINE.max_queue
    calls = [replica.inference.Generate(ask(max_tokens=300)) for _ in range(limit)]
    next(iter(calls[0]))
    started = time.monotonic()
    error = refusal(replica, ask())
    assert time.monotonic() - started < 1.0
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(limit) in error.details()
    sizes = [sum(len(chunk.token_ids) for chunk in call) for call in calls[1:]]
    assert sizes == [300] * (limit - 1)
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
    started = time.monotonic()
    assert sum(len(chunk.token_ids) for chunk in replica.inference.Generate(ask(max_tokens=3), timeout=PATIENCE_S)) == 3
    assert time.monotonic() - started < 2.0, "the slot of the cancelled request was not free"
    expiring = replica.inference.Generate(ask(max_tokens=4000), timeout=0.3)
    with pytest.raises(grpc.RpcError) as caught:
        list(expiring)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert sum(len(chunk.token_ids) for chunk in replica.inference.Generate(ask(max_tokens=3), timeout=PATIENCE_S)) == 3
    long[1].cancel()
    replica.wait_until_idle()


def test_telemetry_replays_steps_and_snapshot_tells_the_arm(replica: Replica) -> None:
    list(replica.inference.Generate(ask()))
    watch = replica.telemetry.Watch(telemetry_pb2.WatchRequest(steps=True))
    message = next(iter(watch)).steps.records
    watch.cancel()
    assert len(message) > 1, "steps that are there already travel together"
    first = message[0].step_id  # the replica's own request took the steps before it
    assert [step.step_id for step in message] == list(range(first, first + len(message)))
    first = message[0]
    assert first.kind == "prefill"
    assert first.end_ns > first.start_ns
    snapshot = replica.telemetry.Snapshot(telemetry_pb2.SnapshotRequest())
    assert ArmConfig.from_dict(json.loads(snapshot.config_json)).engine == ENGINE
    assert (snapshot.device, snapshot.dtype, snapshot.vocab_size) == ("cpu", "float32", 259)
    assert snapshot.memory_bytes["kv_cache"] > 0
    assert snapshot.startup_ns["load"] > 0
    assert "torch" in snapshot.versions


def test_the_items_of_the_start_are_the_time_from_process_to_serving(replica: Replica) -> None:
    snapshot = replica.telemetry.Snapshot(telemetry_pb2.SnapshotRequest())
    items, groups = dict(snapshot.startup_ns), dict(snapshot.startup_groups_ns)
    assert {"process", "import", "load", "prefill", "decode", "other", "total"} == set(groups)
    assert min(items.values()) >= 0
    assert any(item.startswith("decode batch 2 × length 1") for item in items)
    assert groups["total"] == sum(items.values())
    assert sum(groups.values()) == 2 * groups["total"]
    serving = wait_warm(replica)[-1]
    assert abs(groups["total"] - (serving.at_ns - replica.started_ns)) < 1e9
    assert snapshot.memory_bytes["process_peak"] > snapshot.memory_bytes["weights"]


def test_telemetry_tells_at_once_that_the_compiler_failed_at_nothing(replica: Replica) -> None:
    watch = replica.telemetry.Watch(telemetry_pb2.WatchRequest(facts=True))
    first = next(iter(watch))
    watch.cancel()
    assert first.WhichOneof("event") == "facts"
    assert dict(first.facts.graph_breaks) == dict(first.facts.cudagraph_skips) == {}


@pytest.mark.process
def test_an_idle_replica_goes_on_to_say_what_it_holds(replica: Replica) -> None:
    watch = replica.telemetry.Watch(telemetry_pb2.WatchRequest(memory=True), timeout=PATIENCE_S)
    readings = []
    for event in watch:
        readings.append(event.memory)
        if readings[-1].at_ns - readings[0].at_ns > 2.5e9:
            watch.cancel()
            break
    apart = [after.at_ns - before.at_ns for before, after in itertools.pairwise(readings)]
    assert 1e9 <= min(apart) <= max(apart) < 10e9
    assert all(reading.memory_bytes > 100 << 20 and not reading.HasField("allocated_bytes") for reading in readings)


def test_reflection_names_the_services(replica: Replica) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(replica.channel)
    answers = stub.ServerReflectionInfo(
        iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=PATIENCE_S
    )
    names = {service.name for service in next(answers).list_services_response.service}
    assert {"tailgate.v1.Inference", "tailgate.v1.Telemetry", "grpc.health.v1.Health"} <= names


def test_a_port_in_use_is_a_one_line_error(replica: Replica, tmp_path: Path) -> None:
    config = tmp_path / "arm.json"
    config.write_text(json.dumps(ArmConfig(engine=ENGINE).to_dict()))
    command = [sys.executable, "-m", "servers.front.serve", "--config", str(config), "--port", str(replica.port)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=60, check=False)
    assert ended.returncode == 2
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("tailgate:")]
    assert str(replica.port) in line
    assert "Traceback" not in ended.stderr


@pytest.mark.process
def test_not_serving_until_warm_then_draining_finishes_what_runs(tmp_path: Path) -> None:
    with_metrics = free_port()
    replica = start(tmp_path, ArmConfig(name="drains", engine=ENGINE), "--metrics-port", str(with_metrics))
    assert replica.health() == health_pb2.HealthCheckResponse.NOT_SERVING
    assert refusal(replica, ask()).code() is grpc.StatusCode.UNAVAILABLE
    stages = [progress.stage for progress in wait_warm(replica)]
    assert stages[0] == "load"
    assert "warmup" in stages
    assert stages[-1] == "serving"
    assert replica.health() == health_pb2.HealthCheckResponse.SERVING
    call = replica.inference.Generate(ask(max_tokens=1500))
    received = len(next(iter(call)).token_ids)
    with urllib.request.urlopen(f"http://127.0.0.1:{with_metrics}/metrics") as page:
        text = page.read().decode()
    assert 'tailgate_in_flight{arm="drains",replica="drains-0"} 1.0' in text
    assert 'tailgate_steps_total{arm="drains",fell_back="no",kind="prefill",replica="drains-0"} 1.0' in text
    assert 'tailgate_startup_seconds{arm="drains",part="load",replica="drains-0"}' in text
    assert 'tailgate_memory_bytes{arm="drains",owner="kv_cache",replica="drains-0"}' in text
    replica.process.send_signal(signal.SIGTERM)
    wait_for(lambda: replica.health() != health_pb2.HealthCheckResponse.SERVING)
    assert refusal(replica, ask()).code() is grpc.StatusCode.UNAVAILABLE
    assert received + sum(len(chunk.token_ids) for chunk in call) == 1500
    assert replica.process.wait(timeout=PATIENCE_S) == 0


def test_a_dead_engine_fails_its_requests_and_the_replica_exits_1(tmp_path: Path) -> None:
    replica = start_fake(tmp_path, "answers")
    wait_warm(replica)
    call = replica.inference.Generate(ask(max_tokens=4000))
    next(iter(call))
    os.kill(engine_of(replica), signal.SIGKILL)
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert replica.process.wait(timeout=PATIENCE_S) == 1


@pytest.mark.process
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("fails", "it is warm and cannot answer a request of 5 tokens (INTERNAL: RuntimeError: CUDA error: invalid"),
        ("short", "it is warm and answered 1 of 2 tokens"),
    ],
)
def test_a_warm_engine_that_cannot_answer_never_serves(tmp_path: Path, how: str, words: str) -> None:
    replica = start_fake(tmp_path, how)
    last = wait_warm(replica)[-1]
    assert last.stage == "failed"
    assert last.detail.startswith(words)
    assert replica.process.wait(timeout=PATIENCE_S) == 1
    assert "Traceback" not in (tmp_path / f"{how}.log").read_text()


@pytest.mark.process
def test_a_warm_engine_that_has_not_answered_does_not_serve_yet(tmp_path: Path) -> None:
    replica = start_fake(tmp_path, "mute", engine=replace(ENGINE, drain_grace_s=0.5))
    assert wait_for(lambda: replica.counters()["in_flight"]) == 1
    assert replica.health() == health_pb2.HealthCheckResponse.NOT_SERVING
    assert refusal(replica, ask()).code() is grpc.StatusCode.UNAVAILABLE
    replica.process.terminate()
    assert replica.process.wait(timeout=20) == 0  # after its own grace, not the default one


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# --- TLS and the bearer token -----------------------------------------------------------------------------------------

SECRET = "s3cret-T0ken"


def test_a_replica_with_tls_and_a_token_answers_those_who_have_both(
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
    replica.health()  # open to all
    for event in replica.telemetry.Watch(telemetry_pb2.WatchRequest(progress=True), timeout=60, metadata=mine):
        if event.progress.stage in ("serving", "failed"):
            break
    assert replica.health() == health_pb2.HealthCheckResponse.SERVING
    chunks = list(replica.inference.Generate(ask(), timeout=PATIENCE_S, metadata=mine))
    assert sum(len(chunk.token_ids) for chunk in chunks) == 4
    for metadata, text in (
        ((), "a bearer token is missing"),
        ((("authorization", "Bearer other"),), "the bearer token is wrong"),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            list(replica.inference.Generate(ask(), timeout=PATIENCE_S, metadata=metadata))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert text in caught.value.details()
        with pytest.raises(grpc.RpcError) as caught:
            replica.telemetry.Snapshot(telemetry_pb2.SnapshotRequest(), metadata=metadata)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        stub = reflection_pb2_grpc.ServerReflectionStub(replica.channel)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.ServerReflectionInfo(iter(()), metadata=metadata, timeout=PATIENCE_S))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    with pytest.raises(grpc.RpcError) as caught:
        list(inference_pb2_grpc.InferenceStub(plain).Generate(ask(), timeout=PATIENCE_S, metadata=mine))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    command_line = Path(f"/proc/{replica.process.pid}/cmdline")
    assert not command_line.exists() or SECRET.encode() not in command_line.read_bytes()
    assert SECRET not in (tmp_path / "answers.log").read_text()
    snapshot = replica.telemetry.Snapshot(telemetry_pb2.SnapshotRequest(), metadata=mine)
    assert SECRET not in str(snapshot)


def secure_channel(replica: Replica, ca: str, **client: str) -> grpc.Channel:
    pem = [Path(path).read_bytes() if path else None for path in (ca, client.get("key"), client.get("certificate"))]
    own = [("grpc.use_local_subchannel_pool", 1)]
    return grpc.secure_channel(f"127.0.0.1:{replica.port}", grpc.ssl_channel_credentials(*pem), own)


def health_by(channel: grpc.Channel) -> str:
    """Whether the channel's server is healthy, or the name of the status."""
    try:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "healthy" if answer.status == health_pb2.HealthCheckResponse.SERVING else "unhealthy"


def test_certificates_that_are_replaced_are_met_by_new_connections_and_streams_go_on(tmp_path: Path) -> None:
    """By rename, one file after the other; the authority of clients too."""
    folders = {name: tmp_path / name for name in ("old", "new")}
    for folder in folders.values():
        folder.mkdir()
    old, new = (make_certificates(folder) for folder in folders.values())
    flags = {"--tls-certificate": "certificate", "--tls-key": "key", "--tls-client-ca": "ca"}
    served = {name: tmp_path / f"{name}.pem" for name in flags.values()}
    for name, path in served.items():
        path.write_bytes(Path(getattr(old, name)).read_bytes())

    def replace_by_new(name: str) -> None:
        fresh = served[name].with_suffix(".tmp")
        fresh.write_bytes(Path(getattr(new, name)).read_bytes())
        fresh.rename(served[name])

    replica = start_fake(
        tmp_path, "answers", *(part for flag, name in flags.items() for part in (flag, str(served[name])))
    )
    mine = {"certificate": old.client_certificate, "key": old.client_key}
    theirs = {"certificate": new.client_certificate, "key": new.client_key}
    replica.channel = secure_channel(replica, old.ca, **mine)
    wait_warm(replica)
    progress = replica.telemetry.Watch(telemetry_pb2.WatchRequest(progress=True), timeout=60)
    stream = replica.inference.Generate(ask(max_tokens=2000), timeout=60)
    assert len(next(stream).token_ids) == 1  # and then it stands still

    replace_by_new("certificate")  # its key is still the old one
    assert health_by(secure_channel(replica, old.ca, **mine)) == "healthy"
    replace_by_new("key")
    assert health_by(secure_channel(replica, new.ca, **mine)) == "healthy"
    assert health_by(secure_channel(replica, old.ca, **mine)) == "UNAVAILABLE"
    replace_by_new("ca")
    assert health_by(secure_channel(replica, new.ca, **theirs)) == "healthy"
    assert health_by(secure_channel(replica, new.ca, **mine)) == "UNAVAILABLE"

    assert health_by(replica.channel) == "healthy"  # on the connection of before, which nobody could make now
    assert stream.is_active()
    replica.process.send_signal(signal.SIGTERM)
    assert "draining" in (event.progress.stage for event in progress)
    log = (tmp_path / "answers.log").read_text()
    assert log.count("the certificate stays as it was: TLS key") == 1
    assert "PRIVATE KEY" not in log


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--token-env", "TAILGATE_TEST_TOKEN"], "TAILGATE_TEST_TOKEN, which is not set"),
        (["--token-env", SECRET], "--token-env is not the name of an environment variable"),
        (["--token-env", ""], "--token-env is empty"),
        (["--tls-certificate", "", "--tls-key", ""], "--tls-certificate is empty"),
        (["--tls-client-ca", ""], "--tls-client-ca is empty"),
        (["--tls-certificate", "/nowhere/c.pem", "--tls-key", "/nowhere/k.pem"], '"/nowhere/c.pem" cannot be read'),
        (["--tls-key", "/nowhere/k.pem"], "a TLS certificate is missing beside the key"),
    ],
)
@pytest.mark.parametrize("module", ["servers.front.serve", "loadtests.commands.main"])
def test_bad_security_settings_end_with_code_2_and_one_line(
    tmp_path: Path, flags: list[str], text: str, module: str
) -> None:
    config = tmp_path / "arm.json"
    config.write_text(json.dumps(ArmConfig(name="eager", engine=ENGINE).to_dict()))
    command = [sys.executable, "-m", module]
    command += (
        ["--config", str(config)] if module == "servers.front.serve" else ["serve", "--preset", "eager", "--port", "0"]
    )
    done = subprocess.run([*command, *flags], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert text in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert SECRET not in done.stderr
