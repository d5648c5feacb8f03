"""Addresses and settings of arms that tailgate does not start."""

from __future__ import annotations

from datetime import date
from math import nan
from pathlib import Path
from typing import Any

import pytest

from tailgate.loadtests.experiments.model import Experiment
from tailgate.loadtests.experiments.reading import from_table, to_table
from tailgate.loadtests.external.addresses import Address, parse_address
from tailgate.loadtests.external.client_security import SecurityConfig
from tailgate.servers.complaint import ConfigError
from tests.fakes.credentials import Certificates
from tests.fakes.processes import refusal

TRAFFIC = {"duration_s": 3, "rate": 6, "length_scale": 0.05, "block_s": 1}
EAGER = {"name": "eager", "preset": "eager", "control": True}
VLLM = {"name": "vllm", "kind": "openai", "address": "http://10.0.0.7:8000/v1", "model_name": "llama"}
TRITON = {"name": "triton", "kind": "oip", "address": "grpc://10.0.0.8:8001", "model_name": "llama"}


def experiment(*arms: dict[str, Any], **more: Any) -> Experiment:
    table = {"name": "external", "compare_models": True, "arms": list(arms), "traffic": TRAFFIC}
    return from_table({**table, **more})


@pytest.mark.parametrize(
    ("text", "kind", "address"),
    [
        ("http://host:8000/v1", "openai", Address(host="host", port=8000, path="/v1")),
        ("HTTPS://api.example.com/v1/", "openai", Address(host="api.example.com", port=443, tls=True, path="/v1")),
        ("http://[::1]:8000", "openai", Address(host="::1", port=8000)),
        ("http://host/", "openai", Address(host="host", port=80)),
        ("grpc://host:8001", "oip", Address(host="host", port=8001)),
        ("host:8001", "oip", Address(host="host", port=8001)),
        ("grpcs://host:8001", "oip", Address(host="host", port=8001, tls=True)),
    ],
)
def test_address_has_the_parts_that_its_protocol_needs(text: str, kind: Any, address: Address) -> None:
    assert parse_address(text, kind) == address
    assert address.host_header.endswith(f":{address.port}") is (address.port > 1000)


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ("host:8000", "openai", "is not http:// or https:// with a host"),
        ("http://host:99999/v1", "openai", "port from 1 to 65535"),
        ("http://host:0/v1", "openai", "port from 1 to 65535"),
        ("http://me:s3cret@host/v1", "openai", "token_env"),
        ("http://host/v1?key=s3cret", "openai", "token_env"),
        ("https://me:s3cret@arms.example:443", "oip", "leave out user, password"),
        ("unix:///run/x.sock", "oip", 'the scheme "unix"'),
        ("http://ho st/v1", "openai", "with a host"),
        ("grpc://host:1/path", "oip", "is not host:port"),
    ],
)
def test_unusable_address_says_what_to_write(text: str, kind: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        parse_address(text, kind)
    assert "s3cret" not in str(caught.value)


def test_own_and_external_arms_may_be_mixed_and_written_back() -> None:
    two = {**VLLM, "address": ["http://a:1/v1", "http://b:1/v1"], "openai": {"endpoint": "chat", "extra": {"top_k": 1}}}
    found = experiment(EAGER, two, {**TRITON, "token_env": "T", "oip": {"batched": True}})
    assert [arm.kind for arm in found.arms] == ["tailgate", "openai", "oip"]
    assert [arm.name for arm in found.managed_arms] == ["eager"]
    assert found.external_arms[0].replica_names == ("vllm-0", "vllm-1")
    assert from_table(to_table(found)) == found


def oip(**options: Any) -> dict[str, Any]:
    return {**TRITON, "oip": options}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"preset": "eager"}, "arms.vllm.preset describes a server that tailgate starts"),
        ({"replicas": 2}, "list the replicas in address"),
        ({"oip": {}}, "arms.vllm.oip is unknown"),
        ({"kind": "http"}, 'arms.vllm.kind is "http": use "tailgate", "openai", "oip"'),
        ({"address": []}, "arms.vllm.address is []: give 1 or more"),
        ({"address": ["http://a/v1", "http://a/v1"]}, "there twice"),
        ({"address": "host"}, 'arms.vllm.address "host" is not http://'),
        ({"model_name": ""}, 'arms.vllm.model_name is "": string should have at least 1'),
        ({"token_env": "sk-1234-secret"}, "arms.vllm.token_env is not the name of an environment variable"),
        ({"tls_ca": "ca.pem"}, "no address uses TLS"),
        ({"tls_key": "k.pem"}, "arms.vllm.tls_key is set alone"),
        (
            {"openai": {"endpoint": "embeddings"}},
            'arms.vllm.openai.endpoint is "embeddings": use "completions" or "chat"',
        ),
        ({"openai": {"length_fields": ["max"]}}, 'arms.vllm.openai.length_fields[0] is "max": use "ignore_eos" or'),
        ({"openai": {"extra": {"stream": False}}}, "arms.vllm.openai.extra.stream is what tailgate itself must set"),
        ({"openai": {"extra": {"stop": date(2026, 1, 1)}}}, "arms.vllm.openai.extra.stop is"),
        ({"openai": {"extra": {"stop": nan}}}, "extra.stop is NaN: give a finite number"),
        (oip(prompt_tensor=""), '.oip.prompt_tensor is "": string'),
        (oip(parameters_tensor=""), "length of an answer cannot be asked for"),
        (oip(parameters_tensor="", max_tokens_tensor="n", length_fields=["min_tokens"]), "travel in"),
        ({"telemetry": "a.log"}, 'arms.vllm.telemetry is "a.log": give a table'),
        ({"telemetry": {"log": ["a", "a"]}}, "arms.vllm.telemetry.log names one file twice"),
        ({"telemetry": {"log": ["a", "b", "c"]}}, "telemetry.log has 3 and address 1: give one for each"),
        ({"telemetry": {"log": "a", "log_command": ["tail"]}}, "telemetry.log and log_command are both set"),
        ({"telemetry": {"log": ""}}, 'telemetry.log is "": string'),
        ({"telemetry": {"log_command": "tail -F x"}}, 'telemetry.log_command is "tail -F x": give a list'),
        ({"telemetry": {"log_command": [""]}}, 'telemetry.log_command[0] is "": string'),
        ({"telemetry": {"log_command": ["tail", 3]}}, 'telemetry.log_command[0] is "tail": give a list'),
    ],
)
def test_setting_that_makes_no_sense_is_refused(change: dict[str, Any], says: str) -> None:
    said = refusal(ConfigError, experiment, EAGER, {**VLLM, **change})
    assert says in said
    assert "sk-1234" not in said


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"compare_models": False}, "arms.vllm is external"),
        ({"traffic": {**TRAFFIC, "design": "split"}}, 'use design = "mirrored" or "switchback"'),
        ({"splitter": {"workers": 3}}, "[splitter] is set"),
        ({"parity": {"full": True}}, "parity looks into the arms that it starts"),
    ],
)
def test_experiments_that_an_external_arm_cannot_join_are_refused(settings: dict[str, Any], says: str) -> None:
    assert says in refusal(ConfigError, experiment, EAGER, VLLM, **settings)


def test_external_keys_on_an_managed_arm_ask_for_the_kind() -> None:
    said = refusal(ConfigError, experiment, {**EAGER, "address": "http://a/v1"}, VLLM)
    assert "arms.eager.address is for a server that already runs: add kind" in said


def test_what_an_arm_names_is_looked_for_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(**change: Any) -> None:
        experiment(EAGER, {**VLLM, **change}).external_arms[0].check("arms.vllm")

    monkeypatch.delenv("VLLM_TOKEN", raising=False)
    with pytest.raises(ConfigError, match=r"arms.vllm: token_env .*VLLM_TOKEN, which is not set"):
        check(token_env="VLLM_TOKEN")
    with pytest.raises(ConfigError, match=r'arms.vllm.openai.tokenizer is ".*nowhere", no folder'):
        check(openai={"tokenizer": str(tmp_path / "nowhere")})
    log = tmp_path / "vllm.log"
    with pytest.raises(ConfigError, match=r'arms.vllm: telemetry.log ".*vllm.log" is no file: give the one'):
        check(telemetry={"log": str(log)})
    with pytest.raises(ConfigError, match=r'arms.vllm: telemetry.log_command "no-such-program" is no program here'):
        check(telemetry={"log_command": ["no-such-program"]})
    monkeypatch.setenv("VLLM_TOKEN", "abc")
    log.touch()
    check(token_env="VLLM_TOKEN", openai={"tokenizer": str(tmp_path)}, telemetry={"log": str(log)})


def test_files_that_are_missing_or_hold_something_else_are_named(pem: Certificates, tmp_path: Path) -> None:
    junk = tmp_path / "junk.pem"
    junk.write_text("no certificate")
    for security, text in (
        (SecurityConfig(tls_ca=str(tmp_path / "none.pem")), "none.pem.* cannot be read"),
        (SecurityConfig(tls_ca=str(junk)), "junk.pem.* holds no certificate"),
        (SecurityConfig(tls_certificate=str(junk), tls_key=str(junk)), "junk.pem"),
        (SecurityConfig(tls_certificate=pem.certificate, tls_key=pem.client_key), "does not belong to"),
    ):
        with pytest.raises(ConfigError, match=text) as caught:
            security.check("security")
        assert "\n" not in str(caught.value)
