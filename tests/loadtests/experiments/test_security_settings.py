"""TLS and the token in an experiment: what is refused, what is written down, and that the arms' own calls carry it."""

from __future__ import annotations

import tomllib
from dataclasses import asdict, fields
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from loadtests.experiments.model import Experiment
from loadtests.experiments.reading import from_table, load
from loadtests.experiments.writing import to_toml
from loadtests.external.client_security import SecurityConfig
from loadtests.generator.trial_config import TrialConfig
from loadtests.trials.channels import arm_channel
from loadtests.trials.preflight import check_experiment
from servers.fields import ConfigError
from servers.rpc import inference_pb2, inference_pb2_grpc
from tests.fakes.certificates import make_certificates
from tests.fakes.grpc_peers import grpc_peer

SECRET = "s3cret-T0ken"
LISTENER = ("splitter.tls_certificate=c.pem", "splitter.tls_key=k.pem")


def demo(*settings: str) -> Experiment:
    return load("demo", settings=settings)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (["security.tls_ca=ca.pem"], "the run's splitter has none: set splitter.tls_certificate"),
        (["security.tls_server_name=arms.example"], "the run's splitter has none"),
        (["splitter.tls_key=k.pem"], "splitter.tls_key is set alone"),
        (["splitter.tls_client_ca=ca.pem"], "splitter.tls_client_ca is set without tls_certificate"),
        ([*LISTENER, "splitter.tls_client_ca=ca.pem"], "the load has none: set security.tls_certificate"),
        ([*LISTENER, "traffic.direct=true"], "traffic.direct sends past the splitter"),
        (["security.token_env=A", "security.token_file=t"], "are both set: keep one"),
        ([f"security.token_env={SECRET}"], "security.token_env is not the name of an environment variable"),
        ([f"security.token={SECRET}"], "security.token is unknown"),
    ],
)
def test_settings_that_contradict_or_have_no_effect_are_refused(settings: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        demo(*settings)
    assert "\n" not in str(caught.value)
    assert SECRET not in str(caught.value)


def test_what_is_named_is_looked_at_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pem = make_certificates(tmp_path)
    pair = [f"splitter.tls_certificate={pem.certificate}", f"splitter.tls_key={pem.key}"]
    monkeypatch.delenv("TAILGATE_TEST_TOKEN", raising=False)
    for settings, text in (
        (["security.token_env=TAILGATE_TEST_TOKEN"], "TAILGATE_TEST_TOKEN, which is not set"),
        ([pair[0], f"splitter.tls_key={pem.client_key}"], "does not belong to certificate"),
        ([*pair, "security.tls_ca=/nowhere/ca.pem"], '"/nowhere/ca.pem" cannot be read'),
    ):
        with pytest.raises(ConfigError, match=text):
            check_experiment(demo(*settings))


def test_the_written_experiment_names_files_and_variables_and_reads_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAILGATE_TEST_TOKEN", SECRET)
    experiment = demo(*LISTENER, "security.tls_ca=ca.pem", "security.token_env=TAILGATE_TEST_TOKEN")
    text = to_toml(experiment)
    assert SECRET not in text
    assert 'token_env = "TAILGATE_TEST_TOKEN"' in text
    assert from_table(tomllib.loads(text)) == experiment
    assert Path(experiment.security.tls_ca).is_absolute()  # the load generator runs in another folder


def test_files_are_relative_to_the_experiment_that_names_them(tmp_path: Path) -> None:
    text = to_toml(demo())
    text = text.replace('tls_ca = ""', 'tls_ca = "pem/ca.pem"')
    text = text.replace(
        'tls_certificate = ""\ntls_key = ""\ntls_client_ca', 'tls_certificate = "c"\ntls_key = "k"\ntls_client_ca'
    )
    (tmp_path / "own.toml").write_text(text)
    experiment = load(tmp_path / "own.toml")
    assert experiment.security.tls_ca == str(tmp_path / "pem" / "ca.pem")
    assert experiment.splitter.tls_key == str(tmp_path / "k")


def test_the_trial_of_a_load_process_reads_its_security(tmp_path: Path) -> None:
    path = tmp_path / "generator.json"
    path.write_text('{"targets": {"*": "https://h:1"}, "security": {"token_env": "TOKEN"}}')
    config = TrialConfig.read(path)
    assert config.security == SecurityConfig(token_env="TOKEN")
    path.write_text('{"targets": {"*": "https://h:1"}, "security": {"token": "x"}}')
    with pytest.raises(ConfigError, match=r"generator\.security\.token is unknown"):
        TrialConfig.read(path)


def test_nothing_that_is_configured_could_hold_a_secret() -> None:
    assert {item.name for item in fields(SecurityConfig)} == {
        *("tls_ca", "tls_server_name", "tls_certificate", "tls_key", "token_env", "token_file"),
    }
    assert set(asdict(SecurityConfig()).values()) == {""}


def test_calls_of_the_orchestrator_carry_the_token() -> None:
    with grpc_peer("aio", token=SECRET) as target:
        for token, code in ((SECRET, "OK"), ("", "UNAUTHENTICATED")):
            with arm_channel(target, token=token) as channel:
                health = health_pb2_grpc.HealthStub(channel)
                request = health_pb2.HealthCheckRequest(service="tailgate.v1.Inference")
                assert health.Check(request, timeout=20).status == health_pb2.HealthCheckResponse.SERVING
                stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
                call = stub.Generate(
                    inference_pb2.GenerateRequest(text="hi", max_tokens=2), timeout=20, wait_for_ready=True
                )
                try:
                    count = len(list(call))
                except grpc.RpcError:
                    count = 0
                assert (call.code().name, count) == (code, 2 if token else 0)
