"""The machine as a random effect on the log ratio."""

import math

import numpy as np
import pytest
from scipy import stats

from analysis.statistics.machines import between_machines, disagreement, lasting_reach, mean_over_trials


def test_machines_that_agree_add_nothing_and_one_machine_never_does():
    assert between_machines(np.array([0.1, 0.1]), np.array([0.5, 0.5]), within=1e-4, degrees=4) == 0.0
    assert between_machines(np.array([0.1]), np.array([1.0]), within=0.0, degrees=0) == 0.0
    known = mean_over_trials(np.array([0.01, 0.03, 0.02]), np.zeros(3, dtype=int))
    assert (known.between, known.machines) == (0.0, 1)
    assert known.reach == pytest.approx((2.0, 0.01 / math.sqrt(3)))


def test_trials_that_are_each_on_a_machine_of_their_own_are_the_t_test_over_trials():
    ratios = np.array([0.02, -0.03, 0.05, 0.01])
    degrees, spread = mean_over_trials(ratios, np.arange(4)).reach
    assert degrees == pytest.approx(3.0)
    assert spread == pytest.approx(ratios.std(ddof=1) / 2.0)


def test_machines_apart_leave_the_freedom_of_their_number():
    ratios = np.array([0.100, 0.101, -0.100, -0.101, 0.0, 0.001])
    degrees, spread = mean_over_trials(ratios, np.repeat([0, 1, 2], 2)).reach
    assert degrees == pytest.approx(2.0, abs=0.01)
    assert spread == pytest.approx(0.1 / math.sqrt(3) / math.sqrt(stats.f.ppf(0.5, 2, 3)), rel=0.01)


def test_trials_that_are_all_alike_have_no_error():
    assert mean_over_trials(np.full(4, 0.1), np.array([0, 0, 1, 1])).reach == (1.0, 0.0)


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
