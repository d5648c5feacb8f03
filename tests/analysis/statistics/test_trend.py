"""The slope of sampled quantities and how sure it is."""

from __future__ import annotations

import math

import numpy as np
import pytest

from analysis.statistics.trend import medians_of, slope_of, trend_of

TIMES = np.arange(8.0)


def test_the_slope_of_a_line_is_known_exactly_by_pairs() -> None:
    trend = trend_of([(TIMES, 3.0 + 2.0 * TIMES)], 0.025)
    assert trend is not None
    assert (trend.slope, trend.low, trend.high) == (2.0, 2.0, 2.0)
    assert slope_of(TIMES, 3.0 - TIMES) == -1.0


def test_nothing_and_one_value_have_no_trend() -> None:
    assert trend_of([], 0.025) is None
    assert trend_of([(TIMES[:1], TIMES[:1])], 0.025) is None


def test_too_few_values_set_no_limits() -> None:
    trend = trend_of([(TIMES[:3], TIMES[:3])], 0.025)
    assert trend is not None
    assert (trend.slope, trend.low, trend.high) == (1.0, -math.inf, math.inf)


@pytest.mark.parametrize("jump", range(1, 8))
def test_a_single_jump_is_no_sure_growth(jump: int) -> None:
    values = np.where(np.arange(8) >= jump, 100.0, 0.0)
    for series in (1, 2, 5):
        trend = trend_of([(TIMES, values)] * series, 0.025)
        assert trend is not None
        assert trend.low <= 0.0


def test_trials_that_differ_widen_the_limits() -> None:
    alike = trend_of([(TIMES, 2.0 * TIMES), (TIMES, 2.0 * TIMES)], 0.025)
    apart = trend_of([(TIMES, 1.0 * TIMES), (TIMES, 3.0 * TIMES)], 0.025)
    assert alike is not None
    assert apart is not None
    assert (alike.low, alike.high) == (2.0, 2.0)
    assert apart.low < 0 < 4 < apart.high


def test_a_stretch_with_too_few_samples_makes_a_series_unknown() -> None:
    times = np.linspace(0.0, 0.99, 40)
    known = medians_of(times, times, 0.0, 1.0, 8, fewest=5)
    assert known is not None
    assert known[0].tolist() == pytest.approx((np.arange(8) + 0.5) / 8)
    assert medians_of(times[times > 0.2], times[times > 0.2], 0.0, 1.0, 8, fewest=5) is None
    assert medians_of(times, times, 1.0, 1.0, 8, fewest=1) is None
