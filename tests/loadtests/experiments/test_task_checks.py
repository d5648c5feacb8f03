from typing import Any

import pytest

from loadtests.experiments.model import Experiment
from loadtests.experiments.reading import from_table
from loadtests.experiments.writing import to_table
from servers.fields import ConfigError


def encoders(**tables: Any) -> Experiment:
    table: dict[str, Any] = {
        "name": "encoders",
        "model": {"id": "example/encoder", "task": "embed"},
        "arms": [{"preset": "eager", "control": True}, {"preset": "eager-padded"}],
        "traffic": {"rate": 1},
    }
    for key, value in tables.items():
        table[key] = {**table.get(key, {}), **value} if isinstance(value, dict) else value
    return from_table(table)


def test_an_encoder_experiment_is_judged_by_e2e_on_sentences_unless_it_says_else() -> None:
    plain = encoders()
    assert plain.task == "embed"
    assert plain.gates.metrics == ("e2e",)
    assert plain.traffic.workload == "sentences"
    assert from_table(to_table(plain)) == plain
    assert encoders(traffic={"workload": "trace", "trace": "texts.csv"}).traffic.workload == "trace"


def test_e2e_targets_and_goodput_are_taken() -> None:
    held = encoders(slo={"p99_e2e_ms": 50, "error_pct": 1, "cold": {"p99_e2e_ms": 500}}, goodput={"e2el": 50})
    assert held.slo["p99_e2e_ms"] == 50


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"gates": {"metrics": ["ttft", "e2e"]}}, "gates.metrics names ttft, and an embedding has no tokens: with"),
        ({"slo": {"p99_ttft_ms": 500}}, "slo names ttft, and an embedding has no tokens"),
        ({"slo": {"targets": ["p50_itl_ms < 40"]}}, "slo names itl, and an embedding has no tokens"),
        ({"slo": {"cold": {"p99_tpot_ms": 5}}}, "slo.cold names tpot, and an embedding has no tokens"),
        ({"goodput": {"max_itl": 5}}, "goodput names max_itl, and an embedding has no tokens"),
        (
            {"traffic": {"workload": "conversation"}},
            'traffic.workload is "conversation" but model.task is "embed": use',
        ),
        (
            {"traffic": {"turns_mean": 3}},
            "traffic.turns_mean is 3.0 but an embedding has no next turn: remove turns_mean",
        ),
        ({"traffic": {"ignore_eos": False}}, "traffic.ignore_eos is false but an embedding has no answer of tokens"),
        ({"traffic": {"prompts": "chat"}}, 'traffic.prompts is "chat" and a text to embed is no chat'),
        ({"engine": {"max_new_tokens": 8}}, "engine.max_new_tokens is 8 but an embedding has no answer of tokens"),
        ({"parity": {"tokens": 8}}, "parity.tokens is 8 but an embedding has no answer of tokens"),
        (
            {"model": {"task": "generate", "id": "random:tiny"}, "traffic": {"workload": "sentences"}},
            'traffic.workload is "sentences" but model.task is "generate": use code, conversation, long-context',
        ),
        (
            {"model": {"task": "generate", "id": "random:tiny"}, "parity": {"min_cosine": 0.9}},
            "parity.min_cosine is 0.9 but it compares vectors: remove min_cosine",
        ),
    ],
)
def test_what_has_no_meaning_for_the_task_is_one_line(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        encoders(**tables)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def test_arms_of_two_tasks_are_refused_also_where_models_are_compared() -> None:
    arms = [
        {"preset": "eager", "control": True},
        {"name": "chat", "preset": "eager", "model": {"id": "random:tiny", "task": "generate"}},
    ]
    with pytest.raises(ConfigError, match=r'arms\[1\].model.task is "generate" but \[model\] says "embed"'):
        encoders(arms=arms, compare_models=True)


def test_an_external_arm_is_asked_for_tokens_alone() -> None:
    arms = [
        {"preset": "eager", "control": True},
        {"name": "theirs", "kind": "openai", "address": "http://10.0.0.7:8000/v1", "model_name": "m"},
    ]
    with pytest.raises(ConfigError, match=r'arm "theirs" is external and model\.task is "embed"'):
        encoders(arms=arms, compare_models=True)
