from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from analysis.arrays import Floats
from benchmarks.other_rules import (
    CANNOT_SAY,
    FAIL,
    PASS,
    RULES,
    Answers,
    kayenta,
    p99_interval,
    shift_interval,
    threshold,
)

WINDOW_S = 600.0


def made(seed: int, *, slower: float = 1.0, trials: int = 3, count: int = 900) -> Answers:
    """Answers to requests that come evenly over each trial, lognormal with a coefficient of variation of about 0.3."""
    rng = np.random.default_rng(seed)
    return Answers(
        latency_ms=slower * rng.lognormal(5.0, 0.3, trials * count),
        trial=np.repeat(np.arange(1, trials + 1), count),
        ended_s=np.tile(np.linspace(0, WINDOW_S, count, endpoint=False), trials),
        window_s=dict.fromkeys(range(1, trials + 1), WINDOW_S),
    )


def of(latency_ms: Floats, *, window_s: float = WINDOW_S) -> Answers:
    """One trial with these latencies, which end one a second."""
    return Answers(
        latency_ms=latency_ms,
        trial=np.ones(latency_ms.size, dtype=np.int64),
        ended_s=np.arange(latency_ms.size, dtype=np.float64),
        window_s={1: window_s},
    )


@pytest.mark.parametrize("name", RULES)
def test_a_rule_calls_an_arm_that_takes_half_as_long_again_slower(name: str) -> None:
    assert RULES[name](made(1, slower=1.5), made(2)).verdict == FAIL


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("slower", [1.0, 0.5])
def test_a_rule_lets_an_arm_pass_that_is_equal_or_faster(name: str, slower: float) -> None:
    assert RULES[name](made(3, slower=slower), made(4)).verdict == PASS


def test_a_threshold_fails_an_arm_by_chance_alone() -> None:
    few = [threshold(made(seed, trials=1, count=90), made(seed + 1000, trials=1, count=90)) for seed in range(200)]
    assert sum(item.verdict == FAIL for item in few) > 20


def test_kayenta_fails_a_shift_of_any_size_that_is_known_well_and_its_allowance_lets_it_pass() -> None:
    base = np.linspace(100.0, 101.0, 2000)
    slightly = of(base + 0.5)
    assert kayenta(slightly, of(base)).verdict == FAIL
    assert kayenta(slightly, of(base), allowed_increase=1.1).verdict == PASS


def test_kayenta_calls_a_faster_arm_low() -> None:
    assert kayenta(made(5, slower=0.5), made(6)).figures["class"] == "Low"


def test_kayenta_fails_three_points_that_lie_above_three_others_whatever_its_confidence() -> None:
    """The chance of that among equals is one in twenty; the interval of 98 % ends at the least difference."""
    assert kayenta(of(np.array([210.0, 220.0, 230.0])), of(np.array([100.0, 101.0, 102.0]))).verdict == FAIL


def test_kayenta_cannot_compare_two_constants_and_passes_what_is_identical() -> None:
    assert kayenta(of(np.full(5, 2.0)), of(np.full(5, 1.0))).verdict == CANNOT_SAY
    assert kayenta(of(np.full(5, 1.0)), of(np.full(5, 1.0))).verdict == PASS


def test_a_minute_in_which_nothing_ended_is_no_point() -> None:
    """A server that stands still gives a monitor nothing to see; what ends after the window is not seen either."""
    stalled = Answers(
        latency_ms=np.array([10.0, 20.0, 100_000.0, 100_000.0]),
        trial=np.ones(4, dtype=np.int64),
        ended_s=np.array([1.0, 2.0, 181.0, 182.0]),
        window_s={1: 180.0},
    )
    assert stalled.series(60.0) == pytest.approx([19.9])
    steady = of(np.linspace(50.0, 60.0, 180), window_s=180.0)
    assert kayenta(stalled, steady, width_s=60.0).verdict == PASS
    assert threshold(stalled, steady).verdict == FAIL


def test_the_shift_is_the_median_difference_of_all_pairs() -> None:
    rng = np.random.default_rng(7)
    values, others = rng.lognormal(5.0, 0.4, 101), rng.lognormal(5.1, 0.4, 83)
    differences = np.subtract.outer(values, others)
    low, shift, high = shift_interval(values, others, confidence=0.98)
    assert shift == pytest.approx(np.median(differences), abs=0.2)
    assert low < shift < high
    assert [-one for one in shift_interval(others, values, confidence=0.98)] == pytest.approx(
        [high, shift, low], abs=0.2
    )


@pytest.mark.parametrize("step", [0.0, 20.0])
def test_the_interval_of_the_shift_holds_what_the_test_does_not_reject(step: float) -> None:
    rng = np.random.default_rng(7)
    values, others = rng.lognormal(5.0, 0.4, 60), rng.lognormal(5.1, 0.4, 50)
    if step:  # so that many are tied
        values, others = (np.round(one / step) * step for one in (values, others))

    def p(shift: float) -> float:
        return float(stats.mannwhitneyu(values - shift, others, method="asymptotic").pvalue)

    low, _, high = shift_interval(values, others, confidence=0.98)
    assert p(low - 0.01) < 0.02 < p(low + 0.01)
    assert p(high + 0.01) < 0.02 < p(high - 0.01)


def test_the_bootstrap_of_order_statistics_is_that_of_whole_resamples() -> None:
    values = np.random.default_rng(8).lognormal(5.0, 0.5, 250)
    draws = np.random.default_rng(9).choice(values, (9_999, values.size))
    expected = np.quantile(np.quantile(draws, 0.99, axis=1), (0.025, 0.975))
    assert p99_interval(values, rng=np.random.default_rng(10)) == pytest.approx(expected, rel=0.01)
    assert p99_interval(values[:1], rng=np.random.default_rng(10)) == (values[0], values[0])
