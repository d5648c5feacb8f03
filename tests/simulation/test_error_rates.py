"""Error rates and coverage of the statistics on simulated data: no method errs more often than it says."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from analysis.judging.checks.traffic import check_shares_by_stretch
from analysis.parity.accuracy import LEAST_TEXTS, estimated
from analysis.run.slo import judge_share
from analysis.statistics.compare import Sample
from analysis.statistics.machines import lasting_reach, mean_over_trials
from analysis.statistics.quantiles import quantile_interval
from analysis.statistics.resampling import ewc_p_values
from analysis.statistics.trend import trend_of
from tests.analysis.releases.test_gates import BUILD, compared
from tests.analysis.statistics import test_resampling, test_sequential, test_windows
from tests.analysis.statistics.test_compare import judged, mirrored


def few_of_one_arm(seed: int) -> bool:
    """Whether equal arms are called different where one has a tenth of the traffic."""
    treatment, control = mirrored(5000 + seed, blocks=20, per_block=40)
    few = np.random.default_rng(seed).uniform(size=len(treatment)) < 0.1
    treatment = Sample(values=treatment.values[few], block=treatment.block[few], trial=treatment.trial[few])
    return judged(treatment, control, q=0.9, draws=199, paired=False).p_worse <= 0.05


def at_the_margin(seed: int) -> bool:
    return judged(*mirrored(1000 + seed, blocks=20, per_block=30, ratio=1.1), draws=199).verdict == "PASS"


def drifting_equal_arms(seed: int) -> bool:
    return judged(*mirrored(seed, blocks=20, per_block=30), draws=199).p_worse <= 0.05


@pytest.mark.parametrize("errs", [drifting_equal_arms, at_the_margin, few_of_one_arm])
def test_block_swaps_keep_their_level(errs: Callable[[int], bool]) -> None:
    """At a one-sided level of 0.05, at most 10 of 100 runs."""
    assert sum(errs(seed) for seed in range(100)) <= 10


def test_sequential_evidence_at_the_margin_errs_at_most_alpha_over_all_analyses() -> None:
    wrong = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        arms = test_sequential.arm(rng, ratio=1.0 + test_sequential.MARGIN), test_sequential.arm(rng)
        wrong += test_sequential.of(*arms).decision(alpha=0.05) is not None
    assert wrong <= 10


def test_limits_of_a_typical_window_hold_the_truth_of_equal_arms() -> None:
    held = 0
    for seed in range(60):
        found = test_windows.limits(test_windows.windows(*test_windows.arms(100 + seed)), alpha=0.025)
        held += found.low <= 0.0 <= found.high
    assert held >= 51  # 95 % of 60 are 57; fewer than 51 occur by chance once in 300


@pytest.mark.parametrize("between", [0.0, 1.0, 2.0, 4.0])
@pytest.mark.parametrize(("machines", "trials"), [(2, 3), (3, 2), (3, 3)])
def test_limits_over_machines_keep_their_level(machines: int, trials: int, between: float) -> None:
    rng = np.random.default_rng(7)
    machine = np.repeat(np.arange(machines), trials)
    below = 0
    for _ in range(2000):
        ratios = between * rng.standard_normal(machines)[machine] + rng.standard_normal(len(machine))
        plain = ratios.mean() + stats.t.ppf(0.95, len(ratios) - 1) * ratios.std(ddof=1) / math.sqrt(len(ratios))
        known = mean_over_trials(ratios, machine)
        degrees, spread = known.reach
        below += max(plain, known.mean + float(stats.t.ppf(0.95, degrees)) * spread) < 0
    assert below / 2000 <= 0.08


@pytest.mark.parametrize("trials", [6, 8, 12])
@pytest.mark.parametrize("stays", [0.5, 0.7, 0.85])
def test_limits_hold_where_the_speed_of_a_host_outlasts_a_trial(trials: int, stays: float) -> None:
    """A host of two speeds keeps its speed from one trial to the next with the probability `stays`."""
    rng = np.random.default_rng(11)
    plain = lasting = seen = 0
    while seen < 1000:
        turns = rng.random(trials) > stays
        turns[0] = rng.random() < 0.5
        state = np.cumsum(turns) % 2
        if np.ptp(state) == 0:
            continue  # a run that met one speed
        seen += 1
        ratios = 0.1 * (state - 0.5) + 0.02 * rng.standard_normal(trials)
        reach = stats.t.ppf(0.95, trials - 1) * ratios.std(ddof=1) / math.sqrt(trials)
        plain += ratios.mean() + reach < 0
        lasting += ratios.mean() + max(reach, lasting_reach(ratios, 0.05)) < 0
    assert lasting / 1000 <= 0.11
    assert lasting < plain


def test_limits_of_a_slope_hold_it_as_often_as_they_say() -> None:
    rng = np.random.default_rng(5)
    times = np.arange(8.0)
    missed = 0
    for _ in range(400):
        trend = trend_of([(times, 0.5 * times + rng.standard_normal(8)) for _ in range(2)], 0.025)
        assert trend is not None
        missed += not trend.low <= 0.5 <= trend.high
    assert missed <= 20


def test_an_interval_covers_the_quantile_as_often_as_it_says() -> None:
    rng = np.random.default_rng(5)
    covered = 0
    for _ in range(400):
        low, high = quantile_interval(rng.lognormal(0, 1, 500), 0.95, confidence=0.9)
        covered += low <= math.exp(1.6448536) <= high
    assert 0.86 <= covered / 400 <= 0.97


def test_exceedance_scores_keep_their_level_on_drifting_series() -> None:
    hits = 0
    for seed in range(400):
        p_greater, _ = ewc_p_values(test_resampling.drifting(np.random.default_rng(seed), 60, rho=0.3))
        hits += p_greater <= 0.05
    assert hits / 400 <= 0.10


def test_a_share_at_the_limit_seldom_passes() -> None:
    """At a one-sided level of 0.05, at most 20 of 200 samples whose misses are bunched by block."""
    passed = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        level = 0.05 * rng.lognormal(-0.125, 0.5, size=40)
        block = np.repeat(np.arange(40), 100)
        passed += judge_share(rng.uniform(size=4000) < level[block], block, allowed=0.05, alpha=0.05).verdict == "PASS"
    assert passed <= 20


def test_an_even_split_looks_uneven_in_one_run_of_a_thousand_at_most() -> None:
    rng = np.random.default_rng(5)
    alarms = 0
    for _ in range(400):
        counts = rng.binomial(40, 0.05, size=6)
        stretches = [({"a": 40 - int(n), "b": int(n)}, {"a": 19.0, "b": 1.0}) for n in counts]
        alarms += not check_shares_by_stretch(stretches).ok
    assert alarms <= 2


@pytest.mark.parametrize(("spread", "most"), [(0.5, 0.055), (1.0, 0.075)])
def test_a_loss_of_accuracy_at_the_limit_seldom_passes(spread: float, most: float) -> None:
    """The nominal share is .025; skew costs some of it."""
    rng = np.random.default_rng(2)
    truth = math.exp(spread**2 / 2)
    passed = 0
    for _ in range(1000):
        sums = np.exp(spread * rng.standard_normal(LEAST_TEXTS))
        high = estimated(sums, np.ones(LEAST_TEXTS), truth, rng, of_divergence=True).high
        passed += high is not None and high <= truth
    assert passed / 1000 <= most


@pytest.mark.parametrize("trials", [1, 2, 3, 6])
def test_equal_builds_fail_on_at_most_a_twentieth_of_days(trials: int) -> None:
    build = replace(BUILD, trials=trials)
    assert sum(compared(build, build, seed=seed)["overall"] == "FAIL" for seed in range(100)) <= 5


def test_a_spread_of_days_beyond_the_allowance_is_learnt_from_earlier_runs() -> None:
    build = replace(BUILD, day_spread=0.03)
    assert sum(compared(build, build, days=8, seed=seed)["overall"] == "FAIL" for seed in range(60)) <= 3
