"""The client against servers that others wrote: grpcio (threads and asyncio) and Envoy, plain and with TLS."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtests.clients.call import Call
from loadtests.clients.inference import InferenceClient
from loadtests.external.client_security import SecurityConfig
from servers.rpc.inference_pb2 import GenerateRequest
from servers.security import ServerTls
from servers.splitter.envoy import Envoy
from servers.splitter.envoy_config import ArmTarget, SplitterConfig, UpstreamTls
from tests.fakes.certificates import Certificates, make_certificates
from tests.fakes.generating import generate, keeping_client, until
from tests.fakes.grpc_peers import TRAILERS, grpc_peer
from tests.fakes.patience import PATIENCE_S


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("pem"))


@pytest.fixture(
    scope="module",
    params=["sync", "aio", "sync-tls", "aio-tls", "envoy-sync", "envoy-aio", "envoy-tls", "envoy-tls-both"],
)
def client(
    request: pytest.FixtureRequest, pem: Certificates, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[InferenceClient]:
    """A client of one server, with windows small enough that flow control is at work."""
    name: str = request.param
    kind = "sync" if "sync" in name else "aio"
    secure_arm = name in ("sync-tls", "aio-tls", "envoy-tls-both")
    with contextlib.ExitStack() as stack:
        pair = {"certificate": pem.certificate, "key": pem.key} if secure_arm else {}
        target = stack.enter_context(grpc_peer(kind, token_s=0.002, **pair))  # type: ignore[arg-type]
        if name.startswith("envoy"):
            folder = tmp_path_factory.mktemp(name)
            config = SplitterConfig(
                arms=(ArmTarget(name="eager", backends=(target,)),),
                health_interval_s=0.1,
                tls=ServerTls(certificate=pem.certificate, key=pem.key) if "tls" in name else None,
                upstream_tls=UpstreamTls(ca=pem.ca) if secure_arm else None,
            )
            envoy = stack.enter_context(Envoy.start(config, log_path=folder / "envoy.log", work_dir=folder))
            envoy.wait_ready(PATIENCE_S)
            target = envoy.target
        elif secure_arm:
            target = f"https://{target}"
        made = keeping_client(
            target, security=SecurityConfig(tls_ca=pem.ca), stream_window=70_000, connection_window=200_000
        )
        yield made
        made.close()


def ask(text: str = "hello", tokens: int = 3, number: int = 0) -> GenerateRequest:
    return GenerateRequest(request_id=f"r-{number}", text=text, max_tokens=tokens)


def finished(call: Call) -> Call:
    assert call.wait(PATIENCE_S), "the call did not end"
    return call


def test_two_hundred_streams_on_one_connection_all_arrive_whole(client: InferenceClient) -> None:
    calls = [generate(client, ask(tokens=5, number=n), timeout_s=PATIENCE_S) for n in range(200)]
    for call in calls:
        assert [list(item.token_ids) for item in call] == [[number] for number in range(5)], call.error
        assert call.status == "OK"
        assert tuple((key, call.trailing_metadata[key]) for key, _ in TRAILERS) == TRAILERS
        assert list(call.token_ns) == sorted(call.token_ns)
    assert len(client.connections) == 1


def test_answers_and_requests_above_every_window_arrive_whole(client: InferenceClient) -> None:
    calls = [generate(client, ask(text="big 300000"), timeout_s=PATIENCE_S) for _ in range(3)]
    calls += [generate(client, ask(text="x" * 1_000_000), timeout_s=PATIENCE_S) for _ in range(3)]
    assert [(finished(call).status, call.output_tokens) for call in calls] == [("OK", 300_000)] * 3 + [("OK", 3)] * 3


@pytest.mark.parametrize("code", ["INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "UNAUTHENTICATED"])
def test_a_status_comes_with_its_message(client: InferenceClient, code: str) -> None:
    call = finished(generate(client, ask(text=code), timeout_s=PATIENCE_S))
    assert (call.status, call.error) == (code, "as you asked: \u2713 100 %")


def test_a_deadline_and_a_cancel_end_calls_and_leave_the_connection_well(client: InferenceClient) -> None:
    late = generate(client, ask(tokens=100_000), timeout_s=0.2)
    dropped = generate(client, ask(tokens=100_000), timeout_s=PATIENCE_S)
    until(lambda: dropped.output_tokens)
    dropped.cancel()
    assert (finished(late).status, dropped.status) == ("DEADLINE_EXCEEDED", "CANCELLED")
    assert finished(generate(client, ask(), timeout_s=PATIENCE_S)).status == "OK"
    assert len(client.connections) == 1


def test_metadata_too_large_for_one_frame_arrives(client: InferenceClient) -> None:
    # grpc's servers take 8 to 16 KiB of metadata by default and answer larger ones with an error: both are answers.
    small = finished(generate(client, ask(), metadata=[("x-note", "v" * 6_000)], timeout_s=PATIENCE_S))
    large = finished(generate(client, ask(), metadata=[("x-note", "v" * 50_000)], timeout_s=PATIENCE_S))
    after = finished(generate(client, ask(), timeout_s=PATIENCE_S))
    assert (small.status, after.status) == ("OK", "OK")
    assert large.status != "OK"


def test_envoy_lets_nobody_in_whose_certificate_it_does_not_know(pem: Certificates, tmp_path: Path) -> None:
    with grpc_peer("aio") as arm:
        tls = ServerTls(certificate=pem.certificate, key=pem.key, client_ca=pem.ca)
        config = SplitterConfig(arms=(ArmTarget(name="eager", backends=(arm,)),), health_interval_s=0.1, tls=tls)
        with Envoy.start(config, log_path=tmp_path / "envoy.log", work_dir=tmp_path) as envoy:
            envoy.wait_ready(PATIENCE_S)
            stranger = InferenceClient(envoy.target, security=SecurityConfig(tls_ca=pem.ca))
            known = InferenceClient(
                envoy.target,
                security=SecurityConfig(tls_ca=pem.ca, tls_certificate=pem.client_certificate, tls_key=pem.client_key),
            )
            refused = finished(generate(stranger, ask(), timeout_s=PATIENCE_S))
            assert finished(generate(known, ask(), timeout_s=PATIENCE_S)).status == "OK"
            stranger.close()
            known.close()
    assert refused.status == "UNAVAILABLE"
    assert "give tls_certificate and tls_key" in refused.error


def test_a_stock_server_calls_pings_in_a_silence_too_many_and_the_client_asks_less() -> None:
    """Why keep-alive is off by default: a long compile is such a silence."""
    with grpc_peer("sync", token_s=5.0) as target:
        client = InferenceClient(target, keepalive_s=0.05, keepalive_timeout_s=5.0)
        call = finished(generate(client, ask(tokens=2), timeout_s=PATIENCE_S))
        slower_s = client.keepalive_s
        client.close()
    assert call.status == "UNAVAILABLE"
    assert "too many pings" in call.error.lower().replace("_", " ")
    assert slower_s >= 0.1


@pytest.mark.process
def test_a_stock_server_answers_a_ping_and_its_silent_call_lives() -> None:
    with grpc_peer("aio", token_s=1.0) as target:
        client = InferenceClient(target, keepalive_s=0.6, keepalive_timeout_s=0.3)
        call = finished(generate(client, ask(tokens=3), timeout_s=PATIENCE_S))
        client.close()
    assert (call.status, call.output_tokens) == ("OK", 3)
