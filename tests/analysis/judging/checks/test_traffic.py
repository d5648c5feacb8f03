import numpy as np
import pytest

from analysis.judging.checks.traffic import (
    check_control_errors,
    check_generator_lag,
    check_interference,
    check_open_loop,
    check_sample_ratio,
    slowdown_during,
)


def test_a_split_far_from_its_weights_is_a_mismatch():
    weights = {"a": 9.0, "b": 1.0}
    assert check_sample_ratio({"a": 9010, "b": 990}, weights).ok
    assert not check_sample_ratio({"a": 8700, "b": 1300}, weights).ok
    assert check_sample_ratio({"a": 5}, weights) is None


def test_generator_lag_must_be_known_and_small():
    assert check_generator_lag(3.0, 50.0).ok
    assert not check_generator_lag(80.0, 50.0).ok
    assert not check_generator_lag(None, 50.0).ok


def test_closed_loop_and_unscheduled_data_carry_no_tail():
    assert check_open_loop(True, True).ok
    assert check_open_loop(None, True).ok
    assert not check_open_loop(False, True).ok
    assert not check_open_loop(True, False).ok


def test_an_arm_of_weight_0_gets_no_session():
    stray = check_sample_ratio({"a": 900, "b": 100, "c": 3}, {"a": 9.0, "b": 1.0, "c": 0.0})
    assert (stray.ok, stray.reason) == (False, "c has weight 0 and got 3 sessions.")


def test_a_control_that_fails_blames_nobody():
    assert check_control_errors("eager", 5, 1000, 0.5).ok
    assert not check_control_errors("eager", 6, 1000, 0.5).ok
    assert check_control_errors("eager", 0, 0, 0.5).ok


def slowed(factor, *, seed=0, requests=1200, seconds=600.0):
    rng = np.random.default_rng(seed)
    inside = np.zeros(600)
    for start in range(20, 600, 60):
        inside[start : start + 4] = 1.0
    starts = np.sort(rng.uniform(0, seconds, requests))
    drift = 0.2 * np.sin(starts / 40.0)
    excess = drift + 0.3 * rng.standard_normal(requests) + np.log(factor) * inside[starts.astype(int)]
    return slowdown_during(excess, starts, inside, bin_s=1.0, rng=rng)


def test_a_control_that_slows_while_others_compile_is_seen():
    factor, p_value = slowed(1.6)
    assert factor == pytest.approx(1.6, rel=0.1)
    assert not check_interference(factor, p_value).ok


def test_arms_that_take_turns_already_are_not_sent_to_the_design_that_they_have():
    assert "switchback" in check_interference(1.6, 0.01).remedy
    assert "a run of their own" in check_interference(1.6, 0.01, taking_turns=True).remedy


def test_a_control_that_drifts_by_itself_is_not_blamed():
    blamed = sum(not check_interference(*slowed(1.0, seed=seed)).ok for seed in range(60))
    assert blamed <= 5


def test_too_few_requests_say_nothing_of_interference():
    assert slowed(1.6, requests=12) == (None, None)
    assert check_interference(None, None).ok
