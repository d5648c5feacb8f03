"""Open-loop schedules: sorted, bounded, reproducible, and with the rate and burstiness that were asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests.traffic import arrivals
from loadtests.traffic.lengths import IntArray
from loadtests.traffic.settings import TrafficConfig
from servers.fields import ConfigError

SECOND = 1_000_000_000


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def gamma(rate: float, burstiness: float, duration_s: float, *, rng: np.random.Generator) -> IntArray:
    return arrivals.renewals(np.array([[0, duration_s, rate, rate]]), burstiness=burstiness, rng=rng)


def poisson(rate: float, duration_s: float, *, rng: np.random.Generator) -> IntArray:
    return gamma(rate, 1.0, duration_s, rng=rng)


def profiled(**settings_given: Any) -> IntArray:
    return arrivals.renewals(arrivals.rate_profile(TrafficConfig(**settings_given)), rng=rng())


rates = st.floats(min_value=0.01, max_value=500)
durations = st.floats(min_value=0.01, max_value=10)
shapes = st.floats(min_value=0.05, max_value=50)


@settings(max_examples=60)
@given(rate=rates, duration_s=durations, burstiness=shapes, seed=st.integers(0, 2**32))
def test_gamma_offsets_are_sorted_and_inside_the_duration(
    rate: float, duration_s: float, burstiness: float, seed: int
) -> None:
    offsets = gamma(rate, burstiness, duration_s, rng=rng(seed))
    assert offsets.dtype == np.int64
    assert (np.diff(offsets) >= 0).all()
    assert ((offsets >= 0) & (offsets < duration_s * 1e9)).all()
    assert np.array_equal(offsets, gamma(rate, burstiness, duration_s, rng=rng(seed)))


@settings(max_examples=60)
@given(
    levels=st.lists(st.just(0.0) | st.floats(min_value=1e-6, max_value=300), min_size=1, max_size=6).filter(any),
    duration_s=st.floats(min_value=0.5, max_value=10),
)
def test_steps_are_piecewise_rates_of_equal_length(levels: list[float], duration_s: float) -> None:
    step_s = duration_s / len(levels)
    segments = tuple((index * step_s, level) for index, level in enumerate(levels))
    by_steps = arrivals.rate_profile(TrafficConfig(arrivals="steps", rates=tuple(levels), duration_s=duration_s))
    piecewise = TrafficConfig(arrivals="piecewise", rates=segments, duration_s=duration_s)
    assert np.array_equal(by_steps, arrivals.rate_profile(piecewise))
    offsets = arrivals.renewals(by_steps, rng=rng())
    assert (np.diff(offsets) >= 0).all()
    assert ((offsets >= 0) & (offsets < duration_s * 1e9)).all()


@settings(max_examples=30)
@given(rate=rates, short_s=durations, factor=st.floats(min_value=1, max_value=5), burstiness=shapes)
def test_longer_schedule_starts_with_the_shorter_one(
    rate: float, short_s: float, factor: float, burstiness: float
) -> None:
    short = gamma(rate, burstiness, short_s, rng=rng())
    long = gamma(rate, burstiness, short_s * factor, rng=rng())
    assert np.array_equal(short, long[: len(short)])
    assert (long[len(short) :] >= np.floor(short_s * 1e9) - 1).all()


def test_poisson_has_the_asked_rate_and_exponential_gaps() -> None:
    offsets = poisson(200, 500, rng=rng())
    gaps = np.diff(offsets) / 1e9
    assert len(offsets) == pytest.approx(100_000, abs=4 * 100_000**0.5)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.02)
    assert np.mean(gaps > 1 / 200) == pytest.approx(np.exp(-1), abs=0.01)


@pytest.mark.parametrize("burstiness", [0.1, 0.25, 1.0, 4.0, 25.0])
def test_gamma_gaps_vary_by_burstiness_to_the_minus_half(burstiness: float) -> None:
    offsets = gamma(200, burstiness, 500, rng=rng(7))
    gaps = np.diff(offsets) / 1e9
    cv = burstiness**-0.5
    assert len(offsets) == pytest.approx(100_000, abs=4 * cv * 100_000**0.5)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.04)


def test_burstiness_one_is_the_poisson_schedule() -> None:
    assert np.array_equal(gamma(50, 1.0, 20, rng=rng()), poisson(50, 20, rng=rng()))


@pytest.mark.parametrize("burstiness", [0.1, 1.0, 20.0])
def test_short_schedules_hold_rate_times_duration_on_average(burstiness: float) -> None:
    # An ordinary first gap would give (CV^2 - 1) / 2 more: 4.5 of them at burstiness 0.1, 0.475 fewer at 20.
    generator = rng(3)
    counts = np.array([len(gamma(4, burstiness, 2.5, rng=generator)) for _ in range(4000)])
    assert counts.mean() == pytest.approx(10, abs=4 * counts.std() / 4000**0.5)
    assert counts.std() / 4000**0.5 < 0.2


def test_ramp_rises_linearly() -> None:
    offsets = profiled(arrivals="ramp", rates=(0.0, 400.0), duration_s=400)
    counts, _ = np.histogram(offsets / 1e9, bins=4, range=(0, 400))
    expected = np.array([5_000, 15_000, 25_000, 35_000])
    assert (np.abs(counts - expected) < 4 * np.sqrt(expected)).all()


def test_falling_ramp_is_heaviest_at_its_start() -> None:
    offsets = profiled(arrivals="ramp", rates=(300.0, 100.0), duration_s=200)
    assert np.sum(offsets < 100 * SECOND) == pytest.approx(25_000, abs=4 * 25_000**0.5)
    assert np.sum(offsets >= 100 * SECOND) == pytest.approx(15_000, abs=4 * 15_000**0.5)


def test_piecewise_pause_sends_nothing() -> None:
    offsets = profiled(arrivals="piecewise", rates=((0, 100), (10, 0), (20, 300)), duration_s=30) / 1e9
    assert not ((offsets >= 10) & (offsets < 20)).any()
    assert np.sum(offsets < 10) == pytest.approx(1000, abs=130)
    assert np.sum(offsets >= 20) == pytest.approx(3000, abs=220)


def test_steps_hold_each_rate_for_its_time() -> None:
    offsets = profiled(arrivals="steps", rates=(50, 100, 200), duration_s=180) / 1e9
    counts, _ = np.histogram(offsets, bins=3, range=(0, 180))
    expected = np.array([3000, 6000, 12_000])
    assert (np.abs(counts - expected) < 4 * np.sqrt(expected)).all()


def test_very_low_rate_may_give_no_request() -> None:
    assert len(poisson(1e-6, 1, rng=rng())) == 0


def test_replay_keeps_the_pattern_from_the_start_on() -> None:
    trace = np.array([0, 1, 2, 2, 5, 9, 20], dtype=np.int64) * SECOND
    offsets, rows = arrivals.replay(trace, 8, start_s=2)
    assert (offsets / SECOND).tolist() == [0, 0, 3, 7]
    assert rows == slice(2, 6)


def test_replay_time_scale_below_one_is_faster() -> None:
    trace = np.array([0, 1, 2, 2, 5, 9, 20], dtype=np.int64) * SECOND
    assert (arrivals.replay(trace, 5, time_scale=0.5)[0] / SECOND).tolist() == [0, 0.5, 1, 1, 2.5, 4.5]
    assert (arrivals.replay(trace, 11, time_scale=2)[0] / SECOND).tolist() == [0, 2, 4, 4, 10]


@settings(max_examples=60)
@given(
    gaps=st.lists(st.integers(0, 3 * SECOND), min_size=1, max_size=50),
    scale=st.floats(min_value=0.1, max_value=10),
    start_s=st.floats(min_value=0, max_value=20),
    duration_s=st.floats(min_value=0.1, max_value=30),
)
def test_replay_is_sorted_and_bounded_or_refused(
    gaps: list[int], scale: float, start_s: float, duration_s: float
) -> None:
    trace = np.concatenate([[0], np.cumsum(np.array(gaps, dtype=np.int64))])
    enough = (trace[-1] / 1e9 - start_s) * scale >= duration_s
    if not enough:
        with pytest.raises(ConfigError, match="lower duration_s"):
            arrivals.replay(trace, duration_s, time_scale=scale, start_s=start_s)
        return
    offsets, window = arrivals.replay(trace, duration_s, time_scale=scale, start_s=start_s)
    assert len(offsets) == window.stop - window.start
    assert (np.diff(offsets) >= 0).all()
    assert ((offsets >= 0) & (offsets < round(duration_s * 1e9))).all()


def test_rampup_thins_linearly_and_leaves_the_rest() -> None:
    offsets = poisson(1000, 100, rng=rng())
    kept = arrivals.rampup_kept(offsets, 40, rng=rng(2))
    early = offsets < 40 * SECOND
    assert kept[~early].all()
    share, _ = np.histogram(offsets[early & kept], bins=4, range=(0, 40 * SECOND))
    expected = 10_000 * np.array([0.125, 0.375, 0.625, 0.875])
    assert (np.abs(share - expected) < 4 * np.sqrt(expected)).all()
    assert arrivals.rampup_kept(offsets, 0, rng=rng(2)).all()


def test_a_schedule_too_large_for_memory_is_refused_before_it_is_built() -> None:
    with pytest.raises(ConfigError, match="the limit is 20000000"):
        poisson(1e6, 1e6, rng=rng())
