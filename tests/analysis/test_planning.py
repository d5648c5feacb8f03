"""How long a run must be, from what a run saw."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from tailgate.analysis.judging.gates.latency import latency_gate
from tailgate.analysis.run.slo import judge_share
from tailgate.analysis.settings.gate_limits import GateLimits
from tailgate.analysis.settings.slo_targets import parse_slo
from tailgate.analysis.statistics.planning import (
    Noise,
    comparison_needed,
    needs,
    requests_for_share,
    share_needed_s,
)
from tests.fakes.runs import comparison, share

SEEN = comparison(spread=0.08, requests=4000)
TRIALS = replace(SEEN, blocks=120, groups=6, trials=6, spread=0.05)


def both(item, **more):
    return comparison_needed(item, block_s=30, min_blocks=20, power=0.8, **more)


def needed(item, **more):
    return both(item, **more)[0]


def test_a_fail_among_many_tests_asks_for_more_time_and_a_pass_does_not():
    worse = replace(SEEN, ratio=1.2)
    assert needed(replace(worse, tests=36)) > 1.5 * needed(worse)
    assert needed(replace(SEEN, tests=36)) == needed(SEEN)
    _, many = both(replace(worse, tests=36, restart_spread=0.03))
    assert many > both(replace(worse, restart_spread=0.03))[1]


def test_what_a_run_left_open_is_planned_half_as_long_again_at_least():
    assert needed(replace(TRIALS, ratio=2.0, tests=36)) == 1.5 * 120 * 30


def test_the_length_is_the_shortest_that_reaches_the_margin():
    seconds = needed(SEEN)
    noise = Noise.of(SEEN, block_s=30)
    assert noise.reach(round(seconds / 30), alpha=0.05, power=0.8) <= math.log(1.1)
    assert noise.reach(round(seconds / 30) - 1, alpha=0.05, power=0.8) > math.log(1.1)


def test_a_ratio_as_far_above_the_margin_as_below_it_takes_as_long():
    assert needed(replace(SEEN, ratio=0.9)) < needed(SEEN)
    above, below = (replace(SEEN, ratio=ratio) for ratio in (1.2, 1.1**2 / 1.2))
    assert needed(above) == pytest.approx(needed(below), rel=0.01)


def test_a_run_is_never_shorter_than_the_blocks_it_needs():
    short = replace(SEEN, spread=0.001, blocks=10)
    assert needed(short) == 600
    assert needed(short, overhead_s=30) == 630


@pytest.mark.parametrize(("sequential", "blocks"), [(False, [18, 24, 18]), (True, [6, 4, 4])])
def test_interim_analyses_pass_a_large_effect_on_fewer_blocks(sequential, blocks):
    targets = parse_slo({"p99_e2e_ms": 1000})
    assert [need.blocks for need in needs(GateLimits(sequential=sequential), targets)] == blocks


def test_no_length_decides_a_ratio_without_spread_at_the_margin():
    assert needed(replace(SEEN, ratio=1.0, margin=0.0, spread=0.0)) is None


def test_from_six_trials_on_trials_are_added_and_not_made_longer():
    trial_s = 120 * 30 / 6 + 30
    seconds = needed(TRIALS, overhead_s=180)
    assert seconds % trial_s == pytest.approx(0)
    assert seconds > 6 * trial_s


def test_a_gate_that_compares_nothing_has_no_length():
    assert needed(replace(SEEN, obstacle="no request", blocks=0, groups=0)) is None


def test_a_ratio_near_the_margin_is_planned_as_a_standard_error_away():
    """Lengths that grow without bound as the ratio nears its margin change from run to run and tell nothing."""
    at_margin, near = (needed(replace(SEEN, ratio=ratio)) for ratio in (1.1, 1.0999))
    away = needed(replace(SEEN, ratio=1.1 * math.exp(-SEEN.spread)))
    assert at_margin == near == away


def share_needed(result, rate=1.0):
    return share_needed_s(
        result.missed,
        result.requests,
        allowed=result.allowed,
        design_effect=result.design_effect,
        requests_per_s=rate,
        block_s=30,
        min_blocks=1,
        alpha=0.05,
    )


def test_a_share_near_the_limit_needs_longer():
    assert share_needed(share(9, 1000)) > share_needed(share(5, 1000)) > 0
    assert share_needed(share(20, 1000, design_effect=4.0)) > share_needed(share(20, 1000))
    assert share_needed(share(10, 1000)) == share_needed(share(11, 1000)) < 20_000


@pytest.mark.parametrize("result", [share(0, 0), share(0, 10, allowed=0.0)])
def test_a_share_that_no_length_decides_has_none(result):
    assert share_needed(result) is None


@pytest.mark.parametrize(("allowed", "count"), [(0.01, 299), (0.005, 598), (0.001, 2995), (0.5, 5)])
def test_as_many_clean_requests_pass_and_one_fewer_does_not(allowed, count):
    assert requests_for_share(0.0, allowed, alpha=0.05) == count
    verdicts = [
        judge_share(np.zeros(size, dtype=bool), np.zeros(size, dtype=int), allowed=allowed, alpha=0.05).verdict
        for size in (count - 1, count)
    ]
    assert verdicts == ["INCONCLUSIVE", "PASS"]
    assert requests_for_share(allowed, allowed, alpha=0.05) is None


def test_differences_between_machines_need_more_machines_and_not_time():
    alone = replace(SEEN, trials=3, spread=0.02, restart_spread=0.01)
    separate = replace(alone, machine_spread=0.05)
    assert both(alone)[1] == 3
    assert both(separate)[1] > 6
    assert Noise.of(separate, block_s=30).restart == pytest.approx(math.hypot(0.01, 0.05 * math.sqrt(3)))


def test_a_ratio_at_its_margin_needs_no_impossible_number_of_starts():
    open_one = replace(SEEN, trials=2, spread=0.02, machine_spread=0.05, ratio=1.05, verdict="INCONCLUSIVE")
    run = SimpleNamespace(separate=False, limits=GateLimits(), block_s=30.0, trials=[1, 2])
    for ratio in (1.05, 1.1 + 1e-12):
        gate = latency_gate(run, replace(open_one, ratio=ratio))
        assert gate.needed_starts is not None
        assert 2 < gate.needed_starts < 500
