"""GPUs and costs of each arm by load, with the intervals of the frontier carried through."""

from __future__ import annotations

import pytest

from analysis.foresight.costs import Span
from analysis.frontier.holdings import frontier_of
from analysis.frontier.load_costs import LoadCost, load_costs, shown_loads
from analysis.settings.rollout import Rollout
from tests.analysis.frontier.test_answer import CLEAR

TOKENS = {"eager": 100.0, "bucketed": 100.0, "dynamic": None}


def costs(load: float, **more: object) -> dict[str, LoadCost]:
    rows = load_costs(CLEAR, [load], rollout=Rollout(**more), tokens=TOKENS)  # type: ignore[arg-type]
    return {row.arm: row for row in rows}


def test_gpus_follow_from_the_ends_of_the_intervals() -> None:
    found = costs(200.0, gpus_per_replica=2)
    assert found["eager"].gpus == Span(low=40.0, seen=46.0, high=46.0)
    assert found["bucketed"].gpus == Span(low=10.0, seen=10.0, high=10.0)


def test_tokens_cost_the_gpus_that_carry_the_load_busy_or_not() -> None:
    found = costs(200.0, gpu_hour_price=3.6)
    assert found["eager"].token_gpu_s.seen == pytest.approx(23 / 200 / 100 * 1e6)
    assert found["eager"].token_price.seen == pytest.approx(23 / 200 / 100 * 1e6 * 3.6 / 3600)
    assert found["dynamic"].token_gpu_s == Span(), "an arm that counts no tokens has no cost of one"
    assert costs(200.0)["eager"].token_price == Span()


def test_the_fewest_gpus_are_named_only_where_no_other_arm_may_need_as_few() -> None:
    assert [arm for arm, row in costs(1000.0).items() if row.surely_fewest] == ["bucketed"]
    assert not any(row.surely_fewest for row in costs(5.0).values()), "one replica of any arm carries it"


def test_the_load_of_the_rollout_is_shown_alone() -> None:
    assert shown_loads(CLEAR, Rollout(load_rps=200.0)) == [200.0]
    loads = shown_loads(CLEAR, Rollout())
    assert loads[0] < 9.0
    assert loads[-1] > 41.0 * 32
    assert loads == sorted(set(loads))
    assert shown_loads(frontier_of([], ["eager", "new"]), Rollout()) == []
