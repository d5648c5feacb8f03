"""Settings that analysis reads from an experiment: limits of gates, SLO targets and the rollout."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from tailgate.analysis.records.tables import RecordError
from tailgate.analysis.settings.gate_limits import GateLimits
from tailgate.analysis.settings.ramp_limits import RampLimits, Rollout
from tailgate.analysis.settings.slo_targets import parse_slo
from tests.fakes.processes import refusal


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        *(("margin", value, f"gates.margin is {value!r}") for value in ("wide", True, math.nan)),
        ("margin", -0.1, "gates.margin is -0.1: input should be greater than or equal to 0"),
        ("max_recompiles", math.inf, "gates.max_recompiles"),
        ("max_error_pct", 101.0, "gates.max_error_pct is 101"),
        ("max_error_pct", 0.0, "gates.max_error_pct is 0.0: input should be greater than or equal to 0.001"),
        ("alpha", 0.0, "gates.alpha"),
        *(("metrics", value, "gates.metrics") for value in ("ttft", [], ["e2e", "e2e"])),
        ("metrics", ["speed"], "gates.metrics holds 'speed': use ttft"),
        *(("quantiles", value, f"gates.quantiles is {value}") for value in ([], [0.9, 0.9])),
        ("quantiles", [0.3], "gates.quantiles is 0.3: input should be greater than or equal to 0.5"),
        ("min_blocks", 1, "gates.min_blocks"),
        ("margins", {"ttft": -1.0}, "gates.margins.ttft is -1"),
        ("margins", {"tpot": 0.1}, "gates.margins.tpot"),
        ("steps", [1, 5], "ramp.steps is [1.0, 5.0]: give percents that rise to 100"),
        ("steps", [5, 1, 100], "ramp.steps is [5.0, 1.0, 100.0]"),
        ("steps", [0, 100], "ramp.steps is 0: input should be greater than or equal to 0.01"),
        ("steps", 5, "ramp.steps is 5"),
        ("step_s", 3600.0, "ramp.step_s is 3600: give at most ramp.most_step_s, 1800"),
        ("on_inconclusive", "ask", "ramp.on_inconclusive is 'ask': input should be 'hold' or 'rollback'"),
    ],
)
def test_a_limit_that_cannot_be_used_is_refused_with_the_remedy(key: str, value: Any, words: str) -> None:
    model = RampLimits if words.startswith("ramp") else GateLimits
    assert words in refusal(RecordError, model.recorded, {key: value})


def test_every_number_has_a_range() -> None:
    for model in (GateLimits, RampLimits, Rollout):
        for key, field in model.model_fields.items():
            if field.annotation in (int, float, float | None):
                value = -1 if field.annotation is int else -1.0
                assert refusal(RecordError, model.recorded, {key: value}).startswith(
                    f"{model.table}.{key} is {value}: input should be gr"
                )


def test_limits_have_defaults_and_exceptions_by_metric() -> None:
    limits = GateLimits.recorded({"margin": 0.2, "metrics": ["tpot"], "max_recompiles": 3})
    assert (limits.margin, limits.metrics, limits.max_recompiles, limits.min_blocks) == (0.2, ("tpot",), 3, 18)
    assert GateLimits.recorded({"quantiles": [0.5, 0.999, 0.9]}).quantile == 0.999
    own = GateLimits.recorded({"margin": 0.1, "margins": {"e2e": 0.2}})
    assert (own.margin_of("ttft"), own.margin_of("e2e")) == (0.1, 0.2)


@pytest.mark.parametrize(
    ("key", "metric", "quantile"),
    [
        ("p99_ttft_ms", "ttft", 0.99),
        ("p50_itl_ms", "itl", 0.5),
        ("p99_9_e2e_ms", "e2e", 0.999),
        ("p95_max_itl_ms", "max_itl", 0.95),
        ("error_pct", "error", None),
    ],
)
def test_a_target_is_named_by_quantile_and_metric(key: str, metric: str, quantile: float | None) -> None:
    (target,) = parse_slo({key: 20})
    assert (target.key, target.metric, target.quantile, target.limit) == (key, metric, quantile, 20.0)
    assert target.allowed_share == pytest.approx(0.2 if quantile is None else 1.0 - quantile)


@pytest.mark.parametrize(
    ("parse", "table", "words"),
    [
        *(
            (parse_slo, {key: 1}, f"slo.{key} is unknown: give")
            for key in ("p99_latency_ms", "p999_ttft_ms", "p0_e2e_ms")
        ),
        *((parse_slo, {key: 1}, f"slo.{key} is unknown: give") for key in ("targets", "p99_ttft", "error_rate")),
        *((parse_slo, {"p99_ttft_ms": value}, "above 0") for value in (-1, 0, "fast", True, math.nan, math.inf, None)),
        *((parse_slo, {"error_pct": value}, "from 0 to 100") for value in (-1, 101, "1", math.nan)),
    ],
)
def test_a_table_of_targets_that_cannot_be_used_is_refused(
    parse: Callable[..., object], table: dict[str, Any], words: str
) -> None:
    assert words in refusal(RecordError, parse, table)
