"""Drift and start-to-start variance, from blocks of log latencies."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats

from tailgate.analysis.statistics.dependence import (
    FEWEST_GROUPS,
    MOST_GROUPS,
    Dependence,
    dependence_of,
    group_correlation,
    groups_of,
)
from tailgate.analysis.statistics.machines import (
    Part,
    between_machines,
    disagreement,
    error_over_trials,
    lasting_reach,
    summed,
)
from tailgate.analysis.statistics.unpaired import Level, difference, level_of
from tests.fakes.runs import correlated


@given(per_trial=st.lists(st.integers(1, 60), min_size=1, max_size=5))
@example(per_trial=[9, 9, 11])  # each trial's share of eight, rounded by itself, makes seven
def test_groups_are_neighbours_of_one_trial_and_of_like_size(per_trial):
    trials = np.repeat(np.arange(len(per_trial)), per_trial)
    group = groups_of(trials)
    assert group[0] == 0
    assert set(np.diff(group)) <= {0, 1}
    for number in range(group[-1] + 1):
        assert len(np.unique(trials[group == number])) == 1
    for trial in range(len(per_trial)):
        sizes = np.unique(group[trials == trial], return_counts=True)[1]
        assert sizes.max() - sizes.min() <= 1
    assert min(len(trials), FEWEST_GROUPS) <= group[-1] + 1 <= MOST_GROUPS + len(per_trial)


@pytest.mark.parametrize(("blocks", "groups"), [(1, 1), (5, 5), (8, 8), (20, 8), (36, 9), (40, 10), (400, 10)])
def test_a_longer_run_has_longer_groups_rather_than_many(blocks, groups):
    assert groups_of(np.ones(blocks, dtype=int))[-1] + 1 == groups


def test_blocks_predict_how_groups_correlate():
    """Over many series the estimate from 40 blocks is near the truth, which few groups could not show themselves."""
    group = groups_of(np.ones(40, dtype=int))
    found = [group_correlation(correlated(np.random.default_rng(seed), 40, 1.0, 0.6), group) for seed in range(300)]
    phi, length = 0.6, 4
    faded = phi**length
    truth = phi * (1 - faded) ** 2 / (length * (1 - phi**2) - 2 * phi * (1 - faded))
    assert np.mean(found) == pytest.approx(truth, abs=0.05)
    independent = [group_correlation(np.random.default_rng(seed).standard_normal(40), group) for seed in range(300)]
    assert np.mean(independent) < 0.05
    assert group_correlation(np.zeros(40), group) is None
    assert group_correlation(np.arange(5.0), group[:5]) is None


ONE_TRIAL = np.ones(40, dtype=int)


def wandering(seed):
    """A level that lasts for six blocks."""
    return 0.04 * correlated(np.random.default_rng(seed), 40, 1.0, math.exp(-1.0 / 6.0))


def of(differences, trial=ONE_TRIAL, restart_spread=0.0):
    machine = np.zeros_like(trial)
    return dependence_of(differences, groups_of(trial), trial, restart_spread=restart_spread, machine=machine)


def test_a_speed_that_wanders_for_minutes_adds_variance_and_noise_of_blocks_adds_little():
    wander = np.mean([of(wandering(seed)).drift for seed in range(200)])
    noise = np.mean([of(0.04 * np.random.default_rng(seed).standard_normal(40)).drift for seed in range(200)])
    # The variance of the mean is about .04² × 2 × 6 / 40 = 4.8e-4, of which ten groups show the greater part.
    assert wander > 6e-5 > 4 * noise


def test_starts_that_differ_raise_the_allowance_and_starts_alike_lower_it():
    trial = np.repeat([1, 2, 3], 14)
    rng = np.random.default_rng(1)
    alike = 0.01 * rng.standard_normal(42)
    separate = alike + np.array([-0.06, 0.0, 0.06])[trial - 1]
    allowed = 0.01 * math.sqrt(2.0)
    assert of(separate, trial, 0.01).restart > 0.03 > allowed > of(alike, trial, 0.01).restart
    assert of(np.zeros(40), restart_spread=0.01).restart == pytest.approx(allowed), "one start has the allowance alone"
    assert of(separate, trial, 0.01).drift < 1e-5, "the variance of a start is no drift"


def widening(spread=0.02, **more):
    return Dependence(**more).widening(spread, groups=10, alpha=0.05)


def test_variances_add_up_and_their_poorer_knowledge_counts():
    assert (widening(), widening(0.0)) == pytest.approx((1.0, 1.0))
    assert widening(drift=0.02**2) >= math.sqrt(2.0)
    assert widening(drift=0.02**2) > widening(restart=0.02, trials=1) * 0.99
    assert 1.0 < widening(restart=0.03, trials=3) < widening(restart=0.03), "more starts, less variance between them"


def test_few_blocks_know_the_allowance_alone():
    found = of(np.arange(5.0), np.ones(5, dtype=int), 0.01)
    assert (found.drift, found.correlation, found.restart > 0.0) == (0.0, None, True)


def test_a_ratio_that_differs_by_machine_counts_by_machines_and_not_by_starts():
    trial = np.repeat([1, 2, 3, 4], 10)
    rng = np.random.default_rng(2)
    separate = 0.01 * rng.standard_normal(40) + np.array([-0.05, -0.05, 0.05, 0.05])[trial - 1]
    machine = np.repeat([0, 0, 1, 1], 10)
    blind = of(separate, trial, 0.01)
    seen = dependence_of(separate, groups_of(trial), trial, restart_spread=0.01, machine=machine)
    assert (blind.machine, blind.machines, seen.machines) == (0.0, 1, 2)
    assert seen.restart < blind.restart
    assert seen.machine > 0.05**2
    assert seen.widening(0.02, groups=10, alpha=0.05) > 2 * blind.widening(0.02, groups=10, alpha=0.05)


def test_machines_that_agree_add_nothing_and_one_machine_never_does():
    assert between_machines(np.array([0.1, 0.1]), np.array([0.5, 0.5]), within=1e-4, degrees=4) == 0.0
    assert between_machines(np.array([0.1]), np.array([1.0]), within=0.0, degrees=0) == 0.0
    error, between = error_over_trials(np.array([0.01, 0.03, 0.02]), np.zeros(3, dtype=int))
    assert between == 0.0
    assert (error.degrees, error.variance) == pytest.approx((2.0, 0.01**2 / 3))


def test_machines_apart_leave_the_freedom_of_their_number():
    ratios = np.array([0.02, -0.03, 0.05, 0.01])
    error, _ = error_over_trials(ratios, np.arange(4))
    assert (error.degrees, error.variance) == pytest.approx((3.0, ratios.var(ddof=1) / 4.0)), "the t test over trials"
    ratios = np.array([0.100, 0.101, -0.100, -0.101, 0.0, 0.001])
    error, _ = error_over_trials(ratios, np.repeat([0, 1, 2], 2))
    assert error.degrees == pytest.approx(2.0, abs=0.01)
    assert error.variance == pytest.approx(0.1**2 / 3 / stats.f.ppf(0.5, 2, 3), rel=0.02)


def test_cochran_q_is_chi_square_over_machines_that_share_a_ratio():
    rng = np.random.default_rng(3)
    spreads = np.array([0.01, 0.02, 0.04])
    p_values = [disagreement(0.3 + spreads * rng.standard_normal(3), spreads) for _ in range(2000)]
    assert np.mean(np.array(p_values) <= 0.1) == pytest.approx(0.1, abs=0.02)
    assert disagreement(np.array([0.0, 0.2]), np.array([0.02, 0.02])) < 1e-6
    assert disagreement(np.array([0.1]), np.array([0.02])) is None
    assert disagreement(np.array([0.1, 0.2]), np.array([0.02, 0.0])) is None


def test_lasting_reach_is_student_t_over_three_groups_of_neighbours():
    ratios = np.array([0.0, 0.2, 0.1, 0.5, 0.4, 0.6])
    means = [0.1, 0.3, 0.5]
    assert lasting_reach(ratios, 0.05) == pytest.approx(stats.t.ppf(0.95, 2) * stats.sem(means))
    assert lasting_reach(np.full(6, 0.1), 0.05) == pytest.approx(0.0)


NO_DAY = Part(variance=0.0, degrees=4.0)
TRAFFIC = Part(variance=0.02**2, degrees=19.0)


def level(values, traffic=TRAFFIC, restart=0.0):
    return level_of(np.asarray(values, dtype=float), [traffic] * len(values), restart_spread=restart)


def limits_of(one: Level, two: Level, day: Part = NO_DAY, bound: float = 0.0):
    return difference(one, two, day, bound=bound, alpha=0.05)


def test_from_six_trials_on_it_is_welchs_test() -> None:
    rng = np.random.default_rng(3)
    one, two = rng.normal(0.0, 0.02, 6), rng.normal(0.05, 0.06, 9)
    separate = limits_of(level(one), level(two))
    welch = stats.ttest_ind(two, one, equal_var=False, alternative="greater")
    assert separate.p_inferior == pytest.approx(welch.pvalue)
    wide = stats.ttest_ind(two, one, equal_var=False).confidence_interval(0.9)
    assert (separate.low, separate.high) == pytest.approx((wide.low, wide.high))


def test_sum_of_variances_has_satterthwaites_degrees() -> None:
    alike = summed([Part(variance=2.0, degrees=5.0), Part(variance=2.0, degrees=5.0)])
    assert (alike.variance, alike.degrees) == (4.0, pytest.approx(10.0))
    one_sided = summed([Part(variance=2.0, degrees=5.0), Part(variance=0.0, degrees=1.0)])
    assert one_sided.degrees == pytest.approx(5.0)
    assert math.isinf(summed([Part(variance=0.0, degrees=1.0)]).degrees)


@pytest.mark.parametrize(
    ("values", "traffic", "variance"),
    [
        ([0.3], TRAFFIC, 0.02**2 + 0.01**2),
        ([0.300, 0.3001], TRAFFIC, 0.02**2 + 0.01**2),  # they agree by chance
        ([0.2, 0.4], TRAFFIC, 0.02),
        ([0.1, 0.2, 0.3], None, 0.01),
        ([0.3], None, None),
        ([0.1, 0.2], None, None),
    ],
)
def test_few_trials_rest_on_what_blocks_predict_and_speak_for_themselves_from_three_on(values, traffic, variance):
    found = level(values, traffic, restart=0.01)
    assert (found.each and found.each.variance) == (variance and pytest.approx(variance))
    assert (limits_of(found, level([0.3])) is None) == (variance is None)


def test_difference_without_any_variance_is_exact() -> None:
    same = Level(mean=1.0, trials=3, each=Part(variance=0.0, degrees=2.0))
    more = Level(mean=1.1, trials=3, each=Part(variance=0.0, degrees=2.0))
    assert limits_of(same, more, bound=0.05).p_inferior == 0.0
    assert limits_of(same, same).p_inferior == 1.0


def test_more_trials_do_not_reduce_the_day_to_day_variance() -> None:
    day = Part(variance=0.01**2, degrees=4.0)
    separate = limits_of(level([0.0] * 400), level([0.0] * 400), day)
    assert separate.spread == pytest.approx(math.sqrt(2.0) * 0.01, rel=1e-3)
