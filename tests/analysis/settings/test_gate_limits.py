import math
from dataclasses import fields

import pytest

from analysis.records.tables import RecordError
from analysis.settings.gate_limits import CompileBudget, GateLimits


class TestLimits:
    def test_defaults_hold_where_the_table_is_silent(self):
        limits = GateLimits.from_table({"margin": 0.2, "metrics": ["tpot"], "max_recompiles": 3, "unheard_of": 1})
        assert (limits.margin, limits.metrics, limits.max_recompiles, limits.min_blocks) == (0.2, ("tpot",), 3, 18)

    @pytest.mark.parametrize(
        "table",
        [
            {"margin": "wide"},
            {"margin": True},
            {"margin": -0.1},
            {"margin": math.nan},
            {"max_recompiles": math.inf},
            {"alpha": 0.0},
            {"metrics": ["speed"]},
            {"metrics": "ttft"},
            {"quantile": 1.0},
            {"min_blocks": 1},
        ],
    )
    def test_a_bad_value_is_named(self, table):
        with pytest.raises(RecordError, match=f"gates.{next(iter(table))}"):
            GateLimits.from_table(table)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"quantiles": (0.3,)}, "gates.quantiles is 0.3: give a value from 0.5 to 0.9999"),
        ({"max_error_pct": 101.0}, "gates.max_error_pct is 101: give a value from 0 to 100"),
        ({"margin": math.nan}, "gates.margin is nan: give a value from 0 to 10"),
        ({"metrics": ()}, "gates.metrics is empty: name one or more of ttft, e2e, tpot, max_itl, itl"),
        ({"metrics": ("speed",)}, "gates.metrics holds 'speed': use ttft, e2e, tpot, max_itl, itl"),
        ({"quantiles": ()}, "gates.quantiles is []: name one or more, each once, such as 0.99"),
        ({"quantiles": (0.9, 0.9)}, "gates.quantiles is [0.9, 0.9]: name one or more, each once, such as 0.99"),
        ({"margins": {"ttft": -1.0}}, "gates.margins.ttft is -1: give a value from 0 to 10"),
        ({"margins": {"tpot": 0.1}}, "gates.margins.tpot is for a metric that is not in gates.metrics: add it there"),
        ({"method": "guess"}, "gates.method is 'guess': use label swap or block bootstrap"),
        ({"metrics": ("e2e", "e2e")}, "gates.metrics is ['e2e', 'e2e']: name each metric once"),
    ],
)
def test_a_limit_out_of_range_is_refused_with_the_remedy(change, expected):
    with pytest.raises(RecordError) as caught:
        GateLimits(**change)
    assert str(caught.value) == expected


def test_every_number_has_a_range():
    for item in fields(GateLimits):
        if item.name not in ("metrics", "quantiles", "margins", "cold", "method", "sequential"):
            with pytest.raises(RecordError, match=f"^gates.{item.name} is -1"):
                GateLimits(**{item.name: -1})
    for item in fields(CompileBudget):
        with pytest.raises(RecordError, match=f"^gates.cold.{item.name} is -1"):
            CompileBudget(**{item.name: -1})


class TestQuantiles:
    def test_the_key_of_old_experiments_is_a_list_of_one(self):
        assert GateLimits.from_table({"quantile": 0.95}).quantiles == (0.95,)

    def test_the_highest_decides_what_a_tail_needs(self):
        assert GateLimits.from_table({"quantiles": [0.5, 0.999, 0.9]}).quantile == 0.999

    def test_both_keys_are_one_too_many(self):
        with pytest.raises(RecordError, match=r"keep quantiles"):
            GateLimits.from_table({"quantile": 0.9, "quantiles": [0.9]})


def test_a_metric_may_have_a_margin_of_its_own():
    limits = GateLimits.from_table({"margin": 0.1, "margins": {"e2e": 0.2}})
    assert (limits.margin_of("ttft"), limits.margin_of("e2e")) == (0.1, 0.2)


class TestColdBudget:
    def test_what_it_does_not_say_is_the_tables(self):
        limits = GateLimits.from_table({"max_stall_s": 3, "cold": {"max_recompiles": 4}})
        assert limits.cold == CompileBudget(max_recompiles=4, max_stall_s=3.0)
        assert (limits.max_recompiles, limits.max_stall_s) == (0, 3.0)

    def test_without_it_there_is_one_budget(self):
        assert GateLimits.from_table({}).cold is None

    @pytest.mark.parametrize(
        ("cold", "expected"),
        [
            (3, "gates.cold is 3: give a table"),
            ({"max_errors": 3}, "gates.cold.max_errors is unknown"),
            ({"max_stall_s": "x"}, "gates.cold.max_stall_s is 'x': give a number"),
        ],
    )
    def test_a_bad_one_is_named(self, cold, expected):
        with pytest.raises(RecordError, match=expected):
            GateLimits.from_table({"cold": cold})
