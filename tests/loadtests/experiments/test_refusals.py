"""Experiments that contradict themselves: each refusal is one line with the key, the value and the remedy."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tailgate.loadtests.experiments.reading import from_table, load
from tailgate.loadtests.experiments.users import UsersConfig
from tailgate.loadtests.trials.preflight import check_experiment
from tailgate.servers.complaint import ConfigError
from tailgate.servers.fields import read
from tests.fakes.credentials import Certificates
from tests.fakes.processes import refusal

ROOT = Path(__file__).resolve().parents[3]
SECRET = "s3cret-T0ken"
MINIMAL = """
name = "canary"

[[arms]]
preset = "eager"
control = true

[[arms]]
name = "compiled"
preset = "compiled-padded"

[traffic]
rate = 2
duration_s = 100
"""
EXTERNAL = {"name": "vllm", "kind": "openai", "address": "http://127.0.0.1:9", "model_name": "m"}
CONTROL = {"preset": "eager", "control": True}


def merged(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The table with the changes laid over it; None removes a key. `arm` changes the second arm."""
    result = dict(table)
    for key, value in changes.items():
        if key == "arm":
            result["arms"] = [result["arms"][0], merged(result["arms"][1], value)]
        elif value is None:
            del result[key]
        elif isinstance(value, Mapping) and isinstance(result.get(key, {}), Mapping):
            result[key] = merged(result.get(key, {}), value)
        else:
            result[key] = value
    return result


def refused(changes: Mapping[str, Any], base: str = MINIMAL) -> str:
    message = refusal(ConfigError, from_table, merged(tomllib.loads(base), changes))
    assert SECRET not in message
    return message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"speed": 9}, ("speed is unknown: did you mean seed?",)),
        ({"name": None}, ("name is missing",)),
        ({"name": "a b"}, ('name is "a b"',)),
        ({"seed": "7"}, ('seed is "7": give a whole number',)),
        ({"model": 3}, ("model is 3: give a table",)),
        ({"arms": [CONTROL]}, ("arms has 1 entry", "2")),
        ({"arms": [{"preset": "eager"}, {"preset": "eager-padded"}]}, ("0 arms of eager, eager-padded",)),
        ({"arm": {"control": True}}, ("2 arms of eager, compiled",)),
        ({"arm": {"name": "eager"}}, ("arms have the names eager, eager",)),
        ({"arm": {"weight": -1}}, ("arms.compiled.weight is -1: give 0 or more",)),
        ({"arm": {"weight": 3}}, ("weight", 'design = "split"')),
        ({"arm": {"replicas": 2}}, ("replicas", "make them equal")),
        ({"arm": {"preset": "compiled-quickly"}}, ("arms.compiled.preset", "compiled-quickly")),
        ({"arm": {"preset": None}}, ("arms.compiled.preset is missing",)),
        ({"arm": {"model": {"dtype": "float16"}}}, ('arms.compiled.model.dtype is "float16"', "control")),
        ({"arm": {"model": {"seed": 5}}}, ("compare_models = true",)),
        ({"arm": {"engine": {"slots": 4}}}, ("arms.compiled.engine.slots is 4", "control")),
        ({"arm": {"model": {"device": "cpu"}}}, ('arms.compiled.model.device is "cpu"',)),
        (
            {"arm": {"compile": {"artifact": "x"}}, "trials": {"compile_cache": "shared"}},
            ("artifact is set", 'trials.compile_cache is "shared"'),
        ),
        (
            {"arm": {"preset": "compiled-bucketed", "compile": {"join_projections": True}}}
            | {"model": {"quantisation": "int4-weight-only"}},
            ("compile.join_projections is true", "model.quantisation"),
        ),
        (
            {"model": {"quantisation": "int8-weight-only", "device": "cpu"}, "parity": {"full": True}},
            ('control "eager"', "model.quantisation", "int8-weight-only"),
        ),
        (
            {"arm": {"model": {"quantisation": "int8-weight-only"}}}
            | {"model": {"id": "org/model"}, "parity": {"full": True}},
            ("parity.texts",),
        ),
        ({"traffic": {"design": "switchback", "duration_s": 40}}, ("traffic.duration_s is 40",)),
        ({"slo": {"p95ttft": 3}}, ("slo.p95ttft is unknown", "pQ_METRIC_ms")),
        ({"trials": {"compile_cache": "hot"}}, ('trials.compile_cache is "hot": use "fresh" or "shared"',)),
        ({"machines": {"sample_s": 0}}, ("machines.sample_s is 0: give 0.05 or more",)),
        ({"pressure": {"gpu_gib": 1}}, ("pressure.gpu_gib is 1", "on no GPU")),
        (
            {"arms": [CONTROL, EXTERNAL], "compare_models": True, "pressure": {"processors": 1}},
            ('arm "vllm" is external',),
        ),
        ({"splitter": {"port": 8080, "admin_port": 8080}}, ("splitter.port", "admin_port", "8080")),
        ({"splitter": {"admin_port": 443}}, ("splitter.admin_port", "443", "1024")),
        ({"traffic": {"remote_workers": 1}}, ('traffic.master_bind is ""', "give an IP address of this host")),
        ({"traffic": {"remote_workers": 1, "master_bind": "0.0.0.0:5557"}}, ("give an IP address of this host",)),
        ({"traffic": {"remote_workers": 1, "master_bind": "loadgen:5557"}}, ("give an IP address of this host",)),
        ({"traffic": {"master_bind": "10.0.0.5:5557"}}, ("remote_workers is 0", "remove master_bind")),
        ({"traffic": {"workers": 0}}, ("traffic.workers is 0", "give 1 or more")),
        (
            {"arms": [CONTROL, EXTERNAL], "compare_models": True}
            | {"traffic": {"remote_workers": 2, "master_bind": "10.0.0.5:5557"}},
            ("eager would be reached without the splitter",),
        ),
        (
            {"arms": [CONTROL, EXTERNAL], "compare_models": True, "machines": {"processor_turn_s": 1.0}},
            ('arm "vllm" is external',),
        ),
        ({"security": {"tls_ca": "ca.pem"}}, ("splitter.tls_certificate",)),
        ({"splitter": {"tls_key": "k.pem"}}, ("splitter.tls_key",)),
        ({"security": {"token_env": SECRET}}, ("security.token_env",)),
        ({"security": {"token": SECRET}}, ("security.token is unknown",)),
    ],
)
def test_an_experiment_that_cannot_be_run_is_refused(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    message = refused(changes)
    assert all(word in message for word in words), message


ENCODERS = """
name = "encoders"
model = { id = "example/encoder", task = "embed" }
arms = [{ preset = "eager", control = true }, { preset = "eager-padded" }]
traffic = { rate = 1 }
"""
GENERATE = {"task": "generate", "id": "random:tiny"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gates": {"metrics": ["ttft", "e2e"]}}, ("gates.metrics", "ttft")),
        ({"slo": {"p99_ttft_ms": 500}}, ("slo", "ttft")),
        ({"traffic": {"workload": "conversation"}}, ("traffic.workload", "conversation", "model.task")),
        ({"traffic": {"ignore_eos": False}}, ("traffic.ignore_eos is false",)),
        ({"engine": {"max_new_tokens": 8}}, ("engine.max_new_tokens is 8",)),
        ({"parity": {"tokens": 8}}, ("parity.tokens is 8",)),
        ({"model": GENERATE, "traffic": {"workload": "sentences"}}, ("traffic.workload", "sentences", "generate")),
        ({"model": GENERATE, "parity": {"min_cosine": 0.9}}, ("parity.min_cosine is 0.9",)),
        (
            {"arms": [CONTROL, {"name": "chat", "preset": "eager", "model": GENERATE}], "compare_models": True},
            ("arms.chat.model.task", "generate", "embed"),
        ),
        ({"arms": [CONTROL, EXTERNAL], "compare_models": True}, ('arm "vllm" is external', "model.task")),
    ],
)
def test_settings_without_a_meaning_for_the_task_are_refused(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    message = refused(changes, ENCODERS)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("traffic.rate", "KEY=VALUE"),
        ("=3", "KEY=VALUE"),
        ("traffic.speed=3", "traffic.speed is unknown"),
        ("arms[1].weight=3", "arms[1] is unknown: did you mean arms?"),
        ("arms.other.weight=3", '"other"'),
        ("arms.eager=3", "whole table"),
        ("name.first=3", "'canary'"),
        ("a b=3", "a b is unknown"),
        ("arms.compiled.compile.options" + 30 * ".a" + "=1", "a key has 34 parts; the limit is 32"),
        ("traffic.duration_s=1.2.3s", 'traffic.duration_s is "1.2.3s": give a number'),
    ],
)
def test_a_setting_of_no_key_is_refused(setting: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(MINIMAL)
    assert words in refusal(ConfigError, load, tmp_path / "small.toml", settings=[setting])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"admin": "9901"}, ("users.admin", "9901", "host:port")),
        ({"admin": "/tmp/a\nb"}, ("host:port",)),
        ({"route": "chat"}, ("users.route", "chat", "NAMESPACE/NAME")),
        ({"api": "127.0.0.1:8001"}, ("users.route is empty",)),
        ({"replicas": {"eager": ["h"]}}, ('users.replicas.eager holds "h"', "host:port")),
        ({"provider": "9466"}, ("users.provider", "9466", "HOST:PORT")),
        *(
            (settings, ("users.admin", "users.route"))
            for settings in ({"route": "a/b"}, {"provider": "h:1024", "access_log": "r.log"})
        ),
    ],
)
def test_production_traffic_that_cannot_be_found_or_moved_is_refused(
    settings: dict[str, Any], words: tuple[str, ...]
) -> None:
    message = refusal(ConfigError, read, UsersConfig, settings, where="users")
    assert all(word in message for word in words)


def test_files_and_variables_of_security_are_checked_before_the_start(
    pem: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = [f"splitter.tls_certificate={pem.certificate}", f"splitter.tls_key={pem.key}"]
    monkeypatch.delenv("TAILGATE_TEST_TOKEN", raising=False)
    for settings, words in (
        (["security.token_env=TAILGATE_TEST_TOKEN"], "TAILGATE_TEST_TOKEN"),
        ([pair[0], f"splitter.tls_key={pem.client_key}"], "does not belong to certificate"),
        ([*pair, "security.tls_ca=/nowhere/ca.pem"], "/nowhere/ca.pem"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_experiment(load("demo", settings=settings))


NAMED = re.compile(r'(?<![\w.])([a-z][a-z_.]*[a-z]) = ("[^"{}]*"|\d+(?:\.\d+)?|true|false)')
TABLES = (
    "",
    "engine.",
    "traffic.",
    "trials.",
    "gates.",
    "machines.",
    "arm.",
    "arm.shapes.",
    "arm.compile.",
    "arm.model.",
)
OPENAI = {**EXTERNAL, "preset": None}
ARMS: dict[str, Mapping[str, Any]] = {"openai": OPENAI, "oip": {**OPENAI, "kind": "oip", "address": "127.0.0.1:9"}}
# Of a request, and of the settings of `tailgate compare`.
ELSEWHERE = {("temperature", "0"), ("compare.need_references", "false")}


def named_settings() -> set[tuple[str, str]]:
    """Every `key = value` in a message of the product: in a text that is no docstring."""
    found = set()
    for path in (path for name in ("loadtests", "servers", "analysis") for path in (ROOT / name).rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        docstrings = [node.value for node in nodes if isinstance(node, ast.Expr)]
        for node in nodes:
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [part.value for part in parts if isinstance(part, ast.Constant) and part not in docstrings]
            found.update(NAMED.findall("{}".join(text for text in texts if isinstance(text, str))))
    return found - ELSEWHERE


def takes(key: str, value: Any) -> bool:
    """Whether there is such a setting and it may have such a value, whatever contradicts it in this experiment."""
    arm = ARMS.get(key.split(".")[0], {})
    place = f"arm.{key}" if arm else key
    changes: Any = value
    for name in reversed(place.split(".")):
        changes = {name: changes}
    try:
        from_table(merged(merged(tomllib.loads(MINIMAL), {"arm": arm}), changes))
    except ConfigError as refused:
        key, _, why = str(refused).partition(" is ")
        is_own = place.startswith(re.sub(r"^arms(\[1\]|\.\w+)", "arm", key))
        return not (is_own and re.match(r"unknown|for a server|.*: (use |give (a|true))", why))
    return True


def test_every_setting_that_a_message_names_exists_and_takes_the_value() -> None:
    found = named_settings()
    assert len(found) > 20
    assert not any(takes(f"{table}{key}", "x") for table in TABLES for key in ("preset.x", "prompts", "openai.prompt"))
    values = {(key, text): tomllib.loads(f"value = {text}")["value"] for key, text in found}
    wrong = {
        f"{key} = {text}"
        for (key, text), value in values.items()
        if not any(takes(f"{table}{key}", value) for table in TABLES)
    }
    assert wrong == set()
