"""The splitter between TLS clients and TLS arms: real Envoy, real grpcio servers, a stock grpcio client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from loadtests.commands.main import build_parser
from loadtests.commands.split import split_config
from servers.fields import ConfigError
from servers.rpc import inference_pb2, inference_pb2_grpc
from servers.security import ServerTls
from servers.splitter.admin import SplitterError
from servers.splitter.bootstrap import bootstrap, secrets
from servers.splitter.envoy import Envoy
from servers.splitter.envoy_config import ArmTarget, SplitterConfig, UpstreamTls
from tests.fakes.certificates import Certificates, make_certificates
from tests.fakes.grpc_peers import grpc_peer
from tests.fakes.patience import PATIENCE_S, wait_for

ROOT = Path(__file__).resolve().parents[3]
SECRET = "s3cret-T0ken"


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("pem"))


def config(arm: str, **settings: Any) -> SplitterConfig:
    return SplitterConfig(arms=(ArmTarget(name="eager", backends=(arm,)),), health_interval_s=0.1, **settings)


def generate(channel: grpc.Channel, token: str = "") -> tuple[str, int]:
    """(status, tokens) of one call."""
    stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
    metadata = [("authorization", f"Bearer {token}")] if token else []
    call = stub.Generate(inference_pb2.GenerateRequest(text="hi", max_tokens=3), metadata=metadata, timeout=20)
    try:
        tokens = sum(len(item.token_ids) for item in call)
    except grpc.RpcError:
        tokens = 0
    return call.code().name, tokens


def test_a_token_passes_from_a_tls_client_to_a_tls_arm_that_checks_it(pem: Certificates, tmp_path: Path) -> None:
    """Client certificates on both hops, and health checks without a token."""
    with grpc_peer("aio", certificate=pem.certificate, key=pem.key, client_ca=pem.ca, token=SECRET) as arm:
        settings = config(
            arm,
            tls=ServerTls(certificate=pem.certificate, key=pem.key),
            upstream_tls=UpstreamTls(ca=pem.ca, certificate=pem.client_certificate, key=pem.client_key),
            access_log=str(tmp_path / "access.log"),
        )
        with Envoy.start(settings, log_path=tmp_path / "envoy.log", work_dir=tmp_path) as envoy:
            envoy.wait_ready(PATIENCE_S)
            assert envoy.target == f"https://127.0.0.1:{envoy.port}"
            roots = grpc.ssl_channel_credentials(Path(pem.ca).read_bytes())
            with grpc.secure_channel(envoy.target.removeprefix("https://"), roots) as channel:
                assert generate(channel, SECRET) == ("OK", 3)
                assert generate(channel, "wrong") == ("UNAUTHENTICATED", 0)
                assert generate(channel) == ("UNAUTHENTICATED", 0)
            with grpc.insecure_channel(envoy.target.removeprefix("https://")) as channel:
                assert generate(channel, SECRET)[0] == "UNAVAILABLE"
    for path in tmp_path.iterdir():
        assert SECRET.encode() not in path.read_bytes(), path


@pytest.fixture
def two(tmp_path: Path) -> tuple[Certificates, Certificates]:
    """The files of two authorities. Those of the first are replaced, one by one."""
    for name in ("pem", "new"):
        (tmp_path / name).mkdir()
    return make_certificates(tmp_path / "pem"), make_certificates(tmp_path / "new")


def replace(old: str, new: str) -> None:
    fresh = Path(f"{old}.tmp")
    fresh.write_bytes(Path(new).read_bytes())
    fresh.rename(old)


def channel_to(envoy: Envoy, roots: bytes) -> grpc.Channel:
    own = [("grpc.use_local_subchannel_pool", 1)]
    return grpc.secure_channel(envoy.target.removeprefix("https://"), grpc.ssl_channel_credentials(roots), own)


def test_a_certificate_that_is_replaced_is_met_by_new_connections_and_streams_go_on(
    two: tuple[Certificates, Certificates], tmp_path: Path
) -> None:
    old, new = two
    before, after = (Path(pem.ca).read_bytes() for pem in two)
    with grpc_peer("aio", token_s=0.05) as arm:
        settings = config(arm, tls=ServerTls(certificate=old.certificate, key=old.key))
        with (
            Envoy.start(settings, log_path=tmp_path / "envoy.log", work_dir=tmp_path) as envoy,
            channel_to(envoy, before) as early,
        ):
            envoy.wait_ready(PATIENCE_S)
            stub = inference_pb2_grpc.InferenceStub(early)  # type: ignore[no-untyped-call]
            stream = stub.Generate(inference_pb2.GenerateRequest(text="hi", max_tokens=1000), timeout=60)
            next(stream)
            replace(old.certificate, new.certificate)  # its key is still the old one
            with channel_to(envoy, before) as channel:
                assert generate(channel) == ("OK", 3)
            replace(old.key, new.key)

            def is_met() -> bool:
                with channel_to(envoy, after) as channel:
                    return generate(channel) == ("OK", 3)

            wait_for(is_met)
            with channel_to(envoy, before) as channel:
                assert generate(channel)[0] == "UNAVAILABLE"
            next(stream)
            assert stream.is_active()
            assert generate(early) == ("OK", 3)  # on the connection of before, which nobody could make now
            stream.cancel()
    for path in tmp_path.iterdir():
        assert path.is_dir() or b"PRIVATE KEY" not in path.read_bytes(), path


@pytest.mark.process
def test_authorities_and_the_splitters_own_certificate_are_read_anew_when_they_are_replaced(
    two: tuple[Certificates, Certificates], tmp_path: Path
) -> None:
    old, new = two
    with grpc_peer("aio", certificate=new.certificate, key=new.key, client_ca=new.ca) as arm:
        settings = config(
            arm,
            tls=ServerTls(certificate=new.certificate, key=new.key, client_ca=old.other_ca),
            upstream_tls=UpstreamTls(ca=old.ca, certificate=old.client_certificate, key=old.client_key),
        )
        with Envoy.start(settings, log_path=tmp_path / "envoy.log", work_dir=tmp_path) as envoy:
            with pytest.raises(SplitterError, match='arm "eager" 0 of 1'):
                envoy.wait_ready(0.5)
            for name in ("ca", "client_certificate", "client_key"):
                replace(getattr(old, name), getattr(new, name))
            envoy.wait_ready(PATIENCE_S)
            pem = [Path(path).read_bytes() for path in (new.ca, new.client_key, new.client_certificate)]

            def is_let_in() -> bool:
                own = [("grpc.use_local_subchannel_pool", 1)]
                address = envoy.target.removeprefix("https://")
                with grpc.secure_channel(address, grpc.ssl_channel_credentials(*pem), own) as channel:
                    return generate(channel) == ("OK", 3)

            assert not is_let_in()
            replace(old.other_ca, new.ca)
            wait_for(is_let_in)


def test_files_behind_links_stay_links_so_that_a_secret_that_is_mounted_can_change(
    pem: Certificates, tmp_path: Path
) -> None:
    """Kubernetes replaces a link to a folder, in the folder that is mounted."""
    link = tmp_path / "tls.crt"
    link.symlink_to(pem.certificate)
    settings = config("10.0.0.7:50051", tls=ServerTls(certificate=str(link), key=pem.key))
    chain = {"filename": str(link)}
    (resource,) = secrets(settings)["envoy-certificate"]["resources"]
    assert resource["tls_certificate"]["certificate_chain"] == chain
    assert json.dumps(chain) in json.dumps(bootstrap(settings))


@pytest.mark.process
@pytest.mark.parametrize("wrong", ["name", "authority", "plaintext"])
def test_an_arm_whose_certificate_is_not_right_is_never_healthy(pem: Certificates, tmp_path: Path, wrong: str) -> None:
    certificate = {"certificate": pem.certificate, "key": pem.key}
    with grpc_peer("aio", **(certificate if wrong != "plaintext" else {})) as arm:
        upstream = UpstreamTls(
            ca=pem.other_ca if wrong == "authority" else pem.ca, name="arms.example" if wrong == "name" else ""
        )
        with Envoy.start(
            config(arm, upstream_tls=upstream), log_path=tmp_path / "envoy.log", work_dir=tmp_path
        ) as envoy:
            with pytest.raises(SplitterError, match='arm "eager" 0 of 1'):
                envoy.wait_ready(1.0)
            with grpc.insecure_channel(envoy.target) as channel:
                assert generate(channel)[0] == "UNAVAILABLE"


def test_each_arms_certificate_must_carry_its_own_address(pem: Certificates) -> None:
    arms = (
        ArmTarget(name="eager", backends=("10.0.0.7:50051", "10.0.0.8:50051")),
        ArmTarget(name="other", backends=("arm.example:50051",)),
    )
    document = bootstrap(SplitterConfig(arms=arms, upstream_tls=UpstreamTls(ca=pem.ca)))
    clusters = document["static_resources"]["clusters"][:2]  # then come the ways inside of Envoy that copies take
    eager, other = (cluster["transport_socket"]["typed_config"] for cluster in clusters)
    names = [
        (item["san_type"], item["matcher"]["exact"])
        for item in eager["common_tls_context"]["validation_context"]["match_typed_subject_alt_names"]
    ]
    assert names == [("IP_ADDRESS", "10.0.0.7"), ("IP_ADDRESS", "10.0.0.8")]
    assert "sni" not in eager
    assert other["sni"] == "arm.example"


def test_a_scheme_before_an_arms_address_is_refused_with_the_flag_that_is_meant() -> None:
    with pytest.raises(ConfigError, match=r'"https://arm\.example:1" is not host:port.*--upstream-ca'):
        ArmTarget(name="eager", backends=("https://arm.example:1",))


def test_without_tls_the_configuration_says_nothing_of_it() -> None:
    assert "transport_socket" not in json.dumps(bootstrap(config("10.0.0.7:50051")))


def test_a_printed_configuration_names_files_and_holds_no_secret(pem: Certificates) -> None:
    command = [sys.executable, "-m", "loadtests.commands.main", "split", "--arm", "eager=10.0.0.7:50051"]
    command += ["--tls-certificate", pem.certificate, "--tls-key", pem.key, "--upstream-ca", pem.ca]
    command += ["--upstream-certificate", pem.client_certificate, "--upstream-key", pem.client_key, "--print-config"]
    environment = {**os.environ, "TAILGATE_TOKEN": SECRET}
    out = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    document = json.loads(out)
    listener = document["static_resources"]["listeners"][0]["filter_chains"][0]["transport_socket"]["typed_config"]
    assert listener["common_tls_context"]["tls_certificates"][0]["private_key"] == {"filename": pem.key}
    assert "PRIVATE KEY" not in out
    assert SECRET not in out


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--tls-certificate", "{certificate}"], "a TLS key is missing"),
        (["--tls-certificate", "{certificate}", "--tls-key", "{client_key}"], "does not belong to"),
        (["--tls-client-ca", "{ca}"], "a TLS certificate is missing"),
        (["--upstream-name", "arms.example"], "name a PEM file with --upstream-ca"),
        (["--upstream-ca", "/nowhere/ca.pem"], '"/nowhere/ca.pem" cannot be read'),
        (["--upstream-ca", "{ca}", "--upstream-key", "{key}"], "belong together"),
    ],
)
def test_bad_files_of_a_split_are_known_before_envoy_starts(pem: Certificates, flags: list[str], text: str) -> None:
    named = [
        flag.format(ca=pem.ca, certificate=pem.certificate, key=pem.key, client_key=pem.client_key) for flag in flags
    ]
    options = build_parser().parse_args(["split", "--arm", "eager=10.0.0.7:50051", *named])
    with pytest.raises(ConfigError, match=text) as caught:
        split_config(options)
    assert "\n" not in str(caught.value)
