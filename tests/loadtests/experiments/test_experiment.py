"""Experiments as they are read, changed by flags, written and read back."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailgate.analysis.settings.gate_limits import GateLimits
from tailgate.analysis.settings.slo_targets import parse_slo
from tailgate.analysis.statistics.planning import shortest_trial_s
from tailgate.loadtests.experiments.files import builtin_names
from tailgate.loadtests.experiments.model import Experiment
from tailgate.loadtests.experiments.reading import from_table, load, load_table, set_path, to_table, to_toml
from tailgate.loadtests.experiments.users import production_table
from tailgate.servers.complaint import ConfigError
from tests.loadtests.experiments.test_refusals import MINIMAL

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"


def changed(**tables: Any) -> Experiment:
    """The experiment with other tables; `arm` adds to the second arm."""
    table = tomllib.loads(MINIMAL)
    table["arms"][1] |= tables.pop("arm", {})
    return from_table({**table, **tables})


@pytest.mark.parametrize(
    "tables",
    [
        {"arm": {"preset": "compiled-bucketed", "shapes": {"batch_ladder": [1, 8]}}, "trials": {"count": 3}},
        {"arm": {"compile": {"enabled": False, "warmup": "minimal"}}, "users": {"replicas": {"eager": ["h:1"]}}},
        {"arm": {"model": {"dtype": "float16"}, "engine": {"slots": 4}}, "compare_models": True},
        {"slo": {"p99_e2e_ms": 50, "error_pct": 1}},
    ],
)
def test_an_experiment_survives_a_round_trip(tables: dict[str, Any]) -> None:
    experiment = changed(**tables)
    assert from_table(tomllib.loads(to_toml(experiment))) == experiment


def test_an_arm_has_its_preset_with_its_own_changes() -> None:
    experiment = changed(
        arm={"model": {"device": "cuda:1"}, "compile": {"warmup": "minimal"}}, model={"device": "cuda:0"}
    )
    assert [arm.name for arm in experiment.arms] == ["eager", "compiled"]
    assert experiment.control.name == "eager"
    config = arm_of(experiment).config
    assert (config.shapes.kind, config.compile.mode, config.compile.warmup) == ("pad", "reduce-overhead", "minimal")
    assert config.model.device == "cuda:1"
    assert arm_of(experiment).replica_names == ("compiled-0",)
    assert experiment.gates == GateLimits(block_s=experiment.traffic.block_s)


def test_a_quantised_arm_is_comparable_and_its_projections_are_not_joined(tmp_path: Path) -> None:
    quantised = {"preset": "compiled-bucketed", "model": {"quantisation": "int4-weight-only"}}
    experiment = changed(arm=quantised)
    config = arm_of(experiment).config
    assert (config.model.quantisation, config.compile.join_projections) == ("int4-weight-only", False)
    assert [arm.name for arm in experiment.quantised_arms] == ["compiled"]
    assert changed(model={"quantisation": "int8-weight-only", "device": "cpu"}).quantised_arms == ()
    text = to_toml(experiment).replace('texts = ""', 'texts = "own.jsonl"')
    assert load(write(tmp_path, text)).parity.texts == str(tmp_path / "own.jsonl")


def arm_of(experiment: Experiment, name: str = "compiled") -> Any:
    return next(arm for arm in experiment.arms if arm.name == name)


def write(folder: Path, text: str) -> Path:
    path = folder / "experiment.toml"
    path.write_text(text)
    return path


SEARCHES_AND_SHORT_ONES = {"demo", "embed", "frontier-demo"}


@pytest.mark.parametrize("name", sorted({*builtin_names()} - {"minilm"}))  # which needs a package with its weights
def test_a_built_in_experiment_survives_a_round_trip_and_is_long_enough_to_decide(name: str, tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(TRACE)
    experiment = load(name, trace=str(tmp_path / "trace.csv") if name == "h200" else "")
    assert from_table(tomllib.loads(to_toml(experiment))) == experiment
    traffic, gates = experiment.traffic, experiment.gates
    rate = traffic.rate or 4.3 / traffic.time_scale  # the mean pace of the trace over these minutes
    pace = {"rate": rate, "block_s": gates.block_s, "trials": experiment.trials.count}
    least_s = shortest_trial_s(gates, parse_slo(experiment.slo), **pace)
    assert name in SEARCHES_AND_SHORT_ONES or traffic.duration_s >= least_s


@given(st.text(alphabet="ab.[]0=_- ", max_size=12), st.integers())
def test_setting_a_path_never_fails_but_with_a_config_error(key: str, value: int) -> None:
    table: dict[str, object] = {"a": {"b": 1}, "b": [{"name": "a", "a": 0}]}
    try:
        set_path(table, key, value)
    except ConfigError:
        return
    assert str(value) in str(table)


def test_a_trace_replaces_arrivals_and_lengths_but_keeps_the_scale(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE)
    text = MINIMAL + "burstiness = 0.5\narrivals = 'gamma'\nlength_scale = 0.1\n"
    traffic = load(write(tmp_path, text), trace=str(trace)).traffic
    assert (traffic.arrivals, traffic.workload, traffic.trace) == ("trace", "trace", str(trace.resolve()))
    assert traffic.length_scale == 0.1


def test_a_hub_tokenizer_of_a_file_is_not_a_folder_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, MINIMAL + 'tokenizer = "org/model"\nprompts = "text"\n')
    (tmp_path / "work" / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    assert load(path).traffic.tokenizer == "org/model"
    chosen = load(path, settings=["traffic.tokenizer=org/model"])
    assert chosen.traffic.tokenizer == str(tmp_path / "work" / "org" / "model")


SECRET = "s3cret-T0ken"


def test_a_written_experiment_names_the_token_s_variable_and_not_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILGATE_TEST_TOKEN", SECRET)
    listener = ("splitter.tls_certificate=c.pem", "splitter.tls_key=k.pem")
    experiment = load("demo", settings=[*listener, "security.tls_ca=ca.pem", "security.token_env=TAILGATE_TEST_TOKEN"])
    text = to_toml(experiment)
    assert SECRET not in text
    assert 'token_env = "TAILGATE_TEST_TOKEN"' in text
    assert from_table(tomllib.loads(text)) == experiment
    assert Path(experiment.security.tls_ca).is_absolute()  # the load generator runs in another folder


def test_an_encoder_experiment_is_judged_by_e2e_on_sentences_by_default() -> None:
    encoders = {"model": {"id": "example/encoder", "task": "embed"}, "arm": {"preset": "eager-padded"}}
    plain = changed(**encoders)
    assert (plain.task, plain.gates.metrics, plain.traffic.workload) == ("embed", ("e2e",), "sentences")
    assert from_table(to_table(plain)) == plain
    traced = changed(**encoders, traffic={"rate": 1, "workload": "trace", "trace": "texts.csv"})
    assert traced.traffic.workload == "trace"


def test_production_traffic_keeps_the_settings_that_judge_it() -> None:
    table = load_table("demo", settings=["traffic.block_s=3", "traffic.timeout_s=7"])
    traffic = from_table(production_table(table)).traffic
    assert (traffic.arrivals, traffic.design, traffic.block_s, traffic.timeout_s) == ("users", "split", 3.0, 7.0)
    assert traffic.rate == 0
