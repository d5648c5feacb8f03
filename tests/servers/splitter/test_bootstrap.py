"""The settings of a splitter, what Envoy is given of them, and TLS before a real Envoy."""

from __future__ import annotations

import json
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from tailgate.loadtests.commands.main import main
from tailgate.servers.rpc import inference_pb2, inference_pb2_grpc
from tailgate.servers.security import ServerTls
from tailgate.servers.splitter.bootstrap import bootstrap
from tailgate.servers.splitter.envoy import Envoy, envoy_path
from tailgate.servers.splitter.envoy_config import ArmTarget, SplitterConfig
from tests.fakes.credentials import Certificates
from tests.fakes.inference import Behaviour, serve
from tests.fakes.processes import PATIENCE_S
from tests.servers.test_config import refusal

ROOT = Path(__file__).resolve().parents[3]
SECRET = "s3cret-T0ken"


def target(**fields: Any) -> ArmTarget:
    return ArmTarget(**{"name": "eager", "backends": ("10.0.0.7:50051",), **fields})


def config(*backends: str, **settings: Any) -> SplitterConfig:
    arms = (target(backends=backends or ("10.0.0.7:50051",)),)
    return SplitterConfig(**{"arms": arms, "health_interval_s": 0.1, **settings})


@pytest.mark.parametrize(
    ("make", "settings", "words"),
    [
        (target, {"name": "a b"}, ('"a b"',)),
        (target, {"backends": ()}, ('"eager"', "no replica")),
        (target, {"backends": ("h:1", "h:1")}, ('"eager"', "twice")),
        (target, {"backends": ("h",)}, ('"h"', "host:port")),
        (target, {"backends": ("https://arm.example:1",)}, ('"https://arm.example:1"', "plaintext")),
        (target, {"weight": 0, "shadow_percent": 101}, ('"eager"', "101 %", "100 %")),
        (target, {"weight": 0, "shadow_percent": 0.00001}, ('"eager"', "1e-05 %", "0.0001 %")),
        (target, {"weight": 3, "shadow_percent": 25}, ('"eager"', "25 %", "weight 3")),
        (config, {"arms": ()}, ("no arm",)),
        (config, {"arms": (target(name="a.b"), target(name="a.b"))}, ('"a.b"',)),
        (config, {"host": "localhost"}, ('splitter.host is "localhost"',)),
    ],
)
def test_an_impossible_setting_is_refused(make: Any, settings: dict[str, Any], words: tuple[str, ...]) -> None:
    refusal(make, words=words, **settings)


def test_silent_streams_are_never_cut() -> None:
    (listener,) = bootstrap(config())["static_resources"]["listeners"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    assert manager["stream_idle_timeout"] == "0s"
    assert manager["common_http_protocol_options"] == {"idle_timeout": "0s"}
    routes = [route["route"] for route in manager["route_config"]["virtual_hosts"][0]["routes"] if "route" in route]
    assert [(route["timeout"], route["idle_timeout"]) for route in routes] == [("0s", "0s")] * 2
    assert not any("retry_policy" in route for route in routes)


def test_envoy_accepts_the_written_bootstrap(tmp_path: Path) -> None:
    path, shadow = tmp_path / "envoy.json", target(name="Compiled_2.13", weight=0, shadow_percent=0.5)
    arms = (target(backends=("eager.tailgate.svc:50051", "[::1]:50051")), shadow)
    for settings in (
        {"arms": arms, "host": "0.0.0.0", "port": 8080, "request_log": "/dev/null"},
        {"host": "::1"},
    ):
        path.write_text(json.dumps(bootstrap(config("localhost:50051", **settings))))
        command = [envoy_path(), "--mode", "validate", "--config-path", path, "--log-level", "warning"]
        outcome = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        assert outcome.returncode == 0, outcome.stderr
        assert "deprecated" not in outcome.stderr.lower()


def test_a_printed_configuration_names_files(pem: Certificates, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--tls-certificate", pem.certificate, "--tls-key", pem.key, "--print-config")
    assert main(["split", "--arm", "eager=10.0.0.7:50051", *flags]) == 0
    document = json.loads(out := capsys.readouterr().out)
    listener = document["static_resources"]["listeners"][0]["filter_chains"][0]["transport_socket"]["typed_config"]
    assert listener["common_tls_context"]["tls_certificates"][0]["private_key"] == {"filename": pem.key}
    assert "PRIVATE KEY" not in out


def call(channel: grpc.Channel, *, tokens: int = 3, token: str = "", timeout: float = 20) -> Any:
    metadata = [("authorization", f"Bearer {token}")] if token else []
    request = inference_pb2.GenerateRequest(text="hi", max_tokens=tokens)
    return inference_pb2_grpc.InferenceStub(channel).Generate(request, metadata=metadata, timeout=timeout)  # type: ignore[no-untyped-call]


def status(channel: grpc.Channel, token: str = "") -> str:
    """The status of one call, whose tokens all came if it is OK."""
    answer = call(channel, token=token)
    with suppress(grpc.RpcError):
        assert sum(len(item.token_ids) for item in answer) == 3
    name: str = answer.code().name
    return name


def test_a_token_passes_from_a_tls_client_to_an_arm_that_checks_it(pem: Certificates, tmp_path: Path) -> None:
    """Health checks pass without a token."""
    tls, log = ServerTls(certificate=pem.certificate, key=pem.key), str(tmp_path / "requests.log")
    own = [("grpc.use_local_subchannel_pool", 1)]
    trusting = grpc.ssl_channel_credentials(Path(pem.ca).read_bytes())
    with (
        serve(Behaviour(token=SECRET)) as arm,
        Envoy(
            config(arm.target, tls=tls, request_log=log), log_path=tmp_path / "envoy.log", work_dir=tmp_path
        ) as envoy,
    ):
        envoy.wait_ready(PATIENCE_S)
        assert envoy.target == f"https://127.0.0.1:{envoy.port}"
        address = envoy.target.removeprefix("https://")
        with grpc.secure_channel(address, trusting, own) as channel:
            statuses = [status(channel, token) for token in (SECRET, "wrong", "")]
        assert statuses == ["OK", "UNAUTHENTICATED", "UNAUTHENTICATED"]
        with grpc.insecure_channel(address) as channel:
            assert status(channel, SECRET) == "UNAVAILABLE"
    for path in tmp_path.iterdir():
        assert SECRET.encode() not in path.read_bytes(), path
