"""Runs that shared neither schedule nor machine nor day are told apart by their trials, and never by less."""

import math

import numpy as np
import pytest
from scipy import stats

from analysis.statistics.unpaired import Level, Luck, day_part, difference, level_of, pooled, trials_needed
from analysis.statistics.variances import Part, summed

NO_DAY = Part(variance=0.0, degrees=4.0)
LUCK = Luck(spread=0.02, degrees=19.0)


def level(values, luck=LUCK, restart=0.0):
    return level_of(np.asarray(values, dtype=float), [luck] * len(values), restart_spread=restart)


def test_from_six_trials_on_it_is_welchs_test() -> None:
    rng = np.random.default_rng(3)
    one, two = rng.normal(0.0, 0.02, 6), rng.normal(0.05, 0.06, 9)
    apart = difference(level(one), level(two), NO_DAY)
    welch = stats.ttest_ind(two, one, equal_var=False, alternative="greater")
    assert apart.part is not None
    assert apart.part.degrees == pytest.approx(welch.df)
    assert apart.p_above(0.0) == pytest.approx(welch.pvalue)
    low, high = apart.limits(0.05)
    wide = stats.ttest_ind(two, one, equal_var=False).confidence_interval(0.9)
    assert (low, high) == pytest.approx((wide.low, wide.high))


def test_sum_of_variances_has_satterthwaites_degrees() -> None:
    alike = summed([Part(variance=2.0, degrees=5.0), Part(variance=2.0, degrees=5.0)])
    assert (alike.variance, alike.degrees) == (4.0, pytest.approx(10.0))
    one_sided = summed([Part(variance=2.0, degrees=5.0), Part(variance=0.0, degrees=1.0)])
    assert one_sided.degrees == pytest.approx(5.0)
    assert math.isinf(summed([Part(variance=0.0, degrees=1.0)]).degrees)


def test_one_trial_rests_on_what_its_blocks_foretell_and_on_the_allowance() -> None:
    alone = level([0.3], restart=0.01)
    assert alone.each is not None
    assert alone.each.variance == pytest.approx(0.02**2 + 0.01**2)
    assert level([0.3], luck=Luck(spread=None)).each is None


def test_two_trials_that_agree_by_chance_keep_the_expected_variance() -> None:
    agreeing = level([0.300, 0.3001], restart=0.01)
    assert agreeing.each is not None
    assert agreeing.each.variance == pytest.approx(0.02**2 + 0.01**2)
    apart = level([0.2, 0.4], restart=0.01)
    assert apart.each is not None
    assert apart.each.variance == pytest.approx(0.02)
    assert apart.each.degrees == 1.0


def test_trials_without_any_foretelling_speak_for_themselves_from_three_on() -> None:
    unknown = Luck(spread=None)
    assert level([0.1, 0.2], luck=unknown).each is None
    three = level([0.1, 0.2, 0.3], luck=unknown)
    assert three.each == Part(variance=pytest.approx(0.01), degrees=2.0)


def test_nothing_is_decided_where_a_level_has_no_variance() -> None:
    apart = difference(level([0.3], luck=Luck(spread=None)), level([0.3]), NO_DAY)
    assert apart.limits(0.05) == (None, None)
    assert apart.p_above(0.0) is None
    assert apart.spread is None


def test_difference_without_any_variance_is_exact() -> None:
    same = Level(mean=1.0, trials=3, each=Part(variance=0.0, degrees=2.0))
    more = Level(mean=1.1, trials=3, each=Part(variance=0.0, degrees=2.0))
    assert difference(same, more, NO_DAY).p_above(0.05) == 0.0
    assert difference(same, same, NO_DAY).p_above(0.0) == 1.0


def test_more_trials_do_not_reduce_the_day_to_day_variance() -> None:
    day = Part(variance=0.01**2, degrees=4.0)
    apart = difference(level([0.0] * 400), level([0.0] * 400), day)
    assert apart.spread == pytest.approx(math.sqrt(2.0) * 0.01, rel=1e-3)


def test_history_teaches_how_days_differ() -> None:
    quiet = [Level(mean=0.0, trials=4, each=Part(variance=0.0, degrees=3.0))] * 9
    assert day_part(quiet, day_spread=0.02).variance < 0.5 * 0.02**2
    loud = [Level(mean=0.05 * (-1) ** n, trials=4, each=Part(variance=0.0, degrees=3.0)) for n in range(9)]
    assert day_part(loud, day_spread=0.02).variance > 4 * 0.02**2
    assert day_part(quiet[:1], day_spread=0.02) == Part(variance=0.02**2, degrees=4.0)


def test_step_between_releases_counts_once_in_how_days_differ() -> None:
    """A release that is 20 % faster for good makes days no more than one step different."""
    levels = [Level(mean=0.0 if n < 6 else -0.2, trials=4, each=Part(variance=0.0, degrees=3.0)) for n in range(12)]
    spread = math.sqrt(day_part(levels, day_spread=0.0).variance)
    assert spread < 0.5 * float(np.std([item.mean for item in levels]))


def test_trial_to_trial_variance_is_not_taken_for_that_of_days() -> None:
    rng = np.random.default_rng(5)
    levels = [level(rng.normal(0.0, 0.05, 6)) for _ in range(40)]
    assert math.sqrt(day_part(levels, day_spread=0.0).variance) < 0.01


def test_needed_trials_fall_with_the_distance_to_the_limit() -> None:
    one, two = level([0.0, 0.05, -0.05]), level([0.01, 0.06, -0.04])
    day = Part(variance=0.001**2, degrees=4.0)
    near = trials_needed(one, two, day, bound=0.05, alpha=0.05)
    far = trials_needed(one, two, day, bound=0.2, alpha=0.05)
    assert near is not None
    assert far is not None
    assert near > far
    assert trials_needed(one, two, day, bound=0.0, alpha=0.05) is None


def test_runs_of_one_build_average_the_day_to_day_variance() -> None:
    day = Part(variance=0.01**2, degrees=4.0)
    one = Level(mean=0.1, trials=4, each=Part(variance=0.0, degrees=3.0))
    other = Level(mean=0.3, trials=6, each=Part(variance=0.0, degrees=5.0))
    both = pooled([one, other])
    assert (both.mean, both.trials, both.runs) == (pytest.approx(0.2), 10, 2)
    assert difference(both, one, day).spread == pytest.approx(0.01 * math.sqrt(1.5))
    assert difference(one, one, day).spread == pytest.approx(0.01 * math.sqrt(2.0))


def test_pooled_variance_is_that_of_the_mean_of_runs() -> None:
    noisy = Level(mean=0.0, trials=4, each=Part(variance=0.04, degrees=3.0))
    assert pooled([noisy] * 5).part == Part(variance=pytest.approx(0.002), degrees=pytest.approx(15.0))
    assert pooled([noisy]) == noisy
    unknown = Level(mean=0.0, trials=1, each=None)
    assert pooled([noisy, unknown]).part is None
