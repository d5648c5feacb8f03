"""Settings that analysis reads from an experiment: limits of gates, SLO targets and the rollout."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from analysis.records.tables import RecordError
from analysis.settings.gate_limits import GateLimits
from analysis.settings.model import Settings
from analysis.settings.ramp_limits import RampLimits
from analysis.settings.rollout import Rollout
from analysis.settings.slo_targets import merged, parse_slo, parse_target
from tests.fakes.processes import refusal


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        *(("margin", value, f"gates.margin is {value!r}") for value in ("wide", True, math.nan)),
        ("margin", -0.1, "gates.margin is -0.1: give a value from 0 to 10"),
        ("max_recompiles", math.inf, "gates.max_recompiles"),
        ("max_error_pct", 101.0, "gates.max_error_pct is 101"),
        ("max_error_pct", 0.0, "gates.max_error_pct is 0: give a value from 0.001"),
        ("alpha", 0.0, "gates.alpha"),
        *(("metrics", value, "gates.metrics") for value in ("ttft", [], ["e2e", "e2e"])),
        ("metrics", ["speed"], "gates.metrics holds 'speed': use ttft"),
        *(("quantiles", value, f"gates.quantiles is {value}") for value in ([], [0.9, 0.9])),
        ("quantiles", [0.3], "gates.quantiles is 0.3: give a value from 0.5"),
        ("min_blocks", 1, "gates.min_blocks"),
        ("margins", {"ttft": -1.0}, "gates.margins.ttft is -1"),
        ("margins", {"tpot": 0.1}, "gates.margins.tpot"),
    ],
)
def test_a_limit_that_cannot_be_used_is_refused_with_the_remedy(key: str, value: Any, words: str) -> None:
    assert words in refusal(RecordError, GateLimits.read, {key: value})


def test_every_number_has_a_range() -> None:
    for model in (GateLimits, RampLimits, Rollout):
        for key, field in model.model_fields.items():
            if field.annotation in (int, float, float | None):
                value = -1 if field.annotation is int else -1.0
                assert refusal(RecordError, model.read, {key: value}).startswith(f"{model.table}.{key} is -1: give a v")


@pytest.mark.parametrize(
    ("model", "key", "closest"),
    [
        (GateLimits, "magrin", "gates.margin"),
        (GateLimits, "quantile", "gates.quantiles"),
        (RampLimits, "step", "ramp.steps"),
        (Rollout, "load", "rollout.load_rps"),
    ],
)
def test_an_unknown_key_is_refused_with_the_closest(model: type[Settings], key: str, closest: str) -> None:
    said = refusal(RecordError, model.read, {key: 1})
    assert said == f"{model.table}.{key} is unknown: the closest is {closest}"


def test_limits_have_defaults_and_exceptions_by_metric() -> None:
    limits = GateLimits.read({"margin": 0.2, "metrics": ["tpot"], "max_recompiles": 3})
    assert (limits.margin, limits.metrics, limits.max_recompiles, limits.min_blocks) == (0.2, ("tpot",), 3, 18)
    assert GateLimits.read({"quantiles": [0.5, 0.999, 0.9]}).quantile == 0.999
    own = GateLimits.read({"margin": 0.1, "margins": {"e2e": 0.2}})
    assert (own.margin_of("ttft"), own.margin_of("e2e")) == (0.1, 0.2)


def test_a_rollout_has_a_load_and_the_gpus_of_a_replica() -> None:
    assert Rollout.read({}) == Rollout(load_rps=None, gpus_per_replica=1)
    found = Rollout.read({"load_rps": 200, "gpus_per_replica": 2})
    assert found == Rollout(load_rps=200.0, gpus_per_replica=2)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("load_rps", value) for value in (0, "many", True, math.nan)),
        *(("gpus_per_replica", value) for value in (0, 1.5)),
    ],
)
def test_a_value_of_the_rollout_that_cannot_be_used_is_refused(key: str, value: Any) -> None:
    assert refusal(RecordError, Rollout.read, {key: value}).startswith(f"rollout.{key} is {value!r}: give ")


@pytest.mark.parametrize(
    ("text", "key", "limit", "strict"),
    [
        ("p99_ttft_ms <= 500", "p99_ttft_ms", 500.0, False),
        ("p50_itl_ms < 40", "p50_itl_ms", 40.0, True),
        ("p99.9_e2el <= 2s", "p99_9_e2e_ms", 2000.0, False),
        ("p95_max_itl_ms<=1.5e2", "p95_max_itl_ms", 150.0, False),
        ("p90_tpot ≤ 40 ms", "p90_tpot_ms", 40.0, False),
        ("error_rate <= 0.5%", "error_pct", 0.5, False),
        ("error_pct < 1", "error_pct", 1.0, True),
    ],
)
def test_a_target_is_read_as_it_is_written(text: str, key: str, limit: float, strict: bool) -> None:
    target = parse_target(text, "slo.targets")
    assert (target.key, target.limit, target.strict) == (key, limit, strict)
    assert parse_target(target.text, "--slo") == target
    allowed = {"p99_9_e2e_ms": 0.001, "error_pct": limit / 100}.get(key)
    assert allowed is None or target.allowed_share == pytest.approx(allowed)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("p99_ttft_ms >= 500", "p99_ttft_ms <= 500"),
        ("p99_ttft_ms = 500", "p99_ttft_ms <= 500"),
        ("p99_ttft_ms 500", "operator"),
        ("p99_ttft_ms <=", "p99_ttft_ms <= 500"),
        ("p99_ttft_ms <= fast", "500"),
        ("p99_ttft_ms <= nan", "500"),
        ("p99_ttft_ms <= -inf", "number"),
        ("p99_ttft_ms <= 1.2.3", "number"),
        ("p99_ttft_ms <= -3", "above 0"),
        ("p99_ttft <= 500", "p99_ttft_ms <= 500"),
        ("p99_ttft_ms <= 0.5s", "p99_ttft <= 0.5s"),
        ("p99_latency_ms <= 5", "pQ_METRIC_ms"),
        ("p0_ttft_ms <= 5", "quantile 0"),
        ("error_rate <= 0.005", "error_rate <= 0.5%"),
        ("error_rate <= 101%", "from 0 to 100"),
        ("", "KEY <= LIMIT"),
    ],
)
def test_a_target_that_cannot_be_used_is_refused_with_the_remedy(text: str, remedy: str) -> None:
    message = refusal(RecordError, parse_target, text, "slo.targets")
    assert message.startswith(f'slo.targets holds "{text}": ')
    assert remedy in message


@pytest.mark.parametrize(
    ("parse", "table", "words"),
    [
        (parse_slo, {"p99_ttft_ms": 500, "targets": ["p99_ttft_ms <= 400"]}, "p99_ttft_ms <= 500 and p99_ttft_ms <= 4"),
        (parse_slo, {"p99_ttft_ms": 500, "targets": ["p99_ttft_ms < 500"]}, "p99_ttft_ms <= 500 and p99_ttft_ms < 5"),
        *((parse_slo, {"targets": value}, "give a list such as") for value in ("p99_ttft_ms <= 5", [5], None)),
        *((parse_slo, {key: 1}, f"slo.{key}") for key in ("p99_latency_ms", "p999_ttft_ms")),
        *((parse_slo, {"p99_ttft_ms": value}, "p99_ttft_ms") for value in (-1, "fast", True, math.nan, None)),
    ],
)
def test_a_table_of_targets_that_cannot_be_used_is_refused(
    parse: Callable[..., object], table: dict[str, Any], words: str
) -> None:
    assert words in refusal(RecordError, parse, table)


def test_keys_and_texts_add_up() -> None:
    table = {"p99_ttft_ms": 500, "targets": ["p50_itl_ms < 40", "p99_ttft_ms <= 500"]}
    assert [target.text for target in parse_slo(table)] == ["p99_ttft_ms <= 500", "p50_itl_ms < 40"]


def test_a_target_of_the_command_line_replaces_the_one_of_the_same_key() -> None:
    table = {"p99_ttft_ms": 500, "p99_e2e_ms": 6000}
    changed = merged(table, ["p99_ttft_ms <= 300", "error_rate <= 1%"])
    texts = [target.text for target in parse_slo(changed)]
    assert texts == ["p99_e2e_ms <= 6000", "p99_ttft_ms <= 300", "error_rate <= 1%"]
    assert refusal(RecordError, merged, {}, ["p99_ttft_ms"]).startswith('--slo holds "p99_ttft_ms"')
