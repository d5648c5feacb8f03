import math
from dataclasses import fields

import pytest

from analysis.limits import GateLimits
from analysis.records import RecordError


class TestLimits:
    def test_defaults_hold_where_the_table_is_silent(self):
        limits = GateLimits.from_table({"margin": 0.2, "metrics": ["tpot"], "max_recompiles": 3, "unheard_of": 1})
        assert (limits.margin, limits.metrics, limits.max_recompiles, limits.min_blocks) == (0.2, ("tpot",), 3, 20)

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
        ({"quantile": 0.3}, "gates.quantile is 0.3: give a value from 0.5 to 0.9999"),
        ({"max_error_pct": 101.0}, "gates.max_error_pct is 101: give a value from 0 to 100"),
        ({"margin": math.nan}, "gates.margin is nan: give a value from 0 to 10"),
        ({"metrics": ()}, "gates.metrics is empty: name one or more of ttft, e2e, tpot, max_itl"),
        ({"metrics": ("itl",)}, "gates.metrics holds 'itl': use ttft, e2e, tpot, max_itl"),
        ({"metrics": ("e2e", "e2e")}, "gates.metrics is ['e2e', 'e2e']: name each metric once"),
    ],
)
def test_a_limit_out_of_range_is_refused_with_the_remedy(change, expected):
    with pytest.raises(RecordError) as caught:
        GateLimits(**change)
    assert str(caught.value) == expected


def test_every_number_has_a_range():
    for item in fields(GateLimits):
        if item.name != "metrics":
            with pytest.raises(RecordError, match=f"^gates.{item.name} is -1"):
                GateLimits(**{item.name: -1})
