"""Drift and the luck of starts, as blocks of log latencies tell of them."""

import math

import numpy as np
import pytest

from analysis.statistics.dependence import Dependence, block_differences, dependence_of
from analysis.statistics.resampling import groups_of

ONE_TRIAL = np.ones(40, dtype=int)


def wandering(seed, *, blocks=40, lasting=6.0, spread=0.04):
    """A level that lasts for `lasting` blocks."""
    rng = np.random.default_rng(seed)
    keep, level, levels = math.exp(-1.0 / lasting), rng.standard_normal(), []
    for _ in range(blocks):
        level = keep * level + math.sqrt(1 - keep**2) * rng.standard_normal()
        levels.append(spread * level)
    return np.array(levels)


def of(differences, trial=ONE_TRIAL, restart_spread=0.0):
    return dependence_of(differences, groups_of(trial), trial, restart_spread=restart_spread)


def test_differences_are_those_of_mean_log_latency_by_block():
    block = np.array([0, 0, 1, 1, 1])
    found = block_differences(np.array([1.0, 4, 2, 2, 2]), block, np.array([1.0, 1, 1, 2, 4]), block, 2)
    assert found == pytest.approx([math.log(2), 0.0])
    assert np.isfinite(block_differences(np.zeros(2), np.array([0, 1]), np.ones(2), np.array([0, 1]), 2)).all()


def test_a_speed_that_wanders_for_minutes_adds_variance_and_noise_of_blocks_adds_little():
    wander = np.mean([of(wandering(seed)).drift for seed in range(200)])
    noise = np.mean([of(0.04 * np.random.default_rng(seed).standard_normal(40)).drift for seed in range(200)])
    # The variance of the mean is about .04² × 2 × 6 / 40 = 4.8e-4, of which ten groups show the greater part.
    assert wander > 6e-5 > 4 * noise


def test_correlation_is_seen_in_means_that_the_tail_would_not_show():
    assert np.mean([of(wandering(seed)).correlation for seed in range(50)]) > 0.25
    assert np.mean([of(np.random.default_rng(seed).standard_normal(40)).correlation for seed in range(50)]) < 0.05


def test_one_start_has_the_allowance_and_nothing_else():
    found = of(np.zeros(40), restart_spread=0.01)
    assert found.restart == pytest.approx(0.01 * math.sqrt(2.0))
    assert found.restart_variance == pytest.approx(2e-4)


def test_starts_that_differ_raise_the_allowance_and_starts_alike_lower_it():
    trial = np.repeat([1, 2, 3], 14)
    rng = np.random.default_rng(1)
    alike = 0.01 * rng.standard_normal(42)
    apart = alike + np.array([-0.06, 0.0, 0.06])[trial - 1]
    allowed = 0.01 * math.sqrt(2.0)
    assert of(apart, trial, 0.01).restart > 0.03 > allowed > of(alike, trial, 0.01).restart
    assert of(apart, trial, 0.01).drift < 1e-5, "the luck of a start is no drift"


def test_more_starts_leave_less_start_to_start_variance():
    one, three = Dependence(restart=0.03), Dependence(restart=0.03, trials=3)
    assert three.restart_variance == pytest.approx(one.restart_variance / 3)
    assert 1.0 < three.widening(0.02, groups=10, alpha=0.05) < one.widening(0.02, groups=10, alpha=0.05)


def test_without_dependence_nothing_is_widened():
    assert Dependence().widening(0.02, groups=10, alpha=0.05) == pytest.approx(1.0)
    assert Dependence().widening(0.0, groups=10, alpha=0.05) == pytest.approx(1.0)


def test_variances_add_up_and_their_poorer_knowledge_counts():
    found = Dependence(drift=0.02**2).widening(0.02, groups=10, alpha=0.05)
    assert found >= math.sqrt(2.0)
    assert found > Dependence(restart=0.02, trials=1).widening(0.02, groups=10, alpha=0.05) * 0.99


def test_few_blocks_know_the_allowance_alone():
    trial = np.ones(5, dtype=int)
    found = of(np.arange(5.0), trial, 0.01)
    assert found.drift == 0.0
    assert found.correlation is None
    assert found.restart > 0.0


def test_a_ratio_that_differs_by_machine_counts_by_machines_and_not_by_starts():
    trial = np.repeat([1, 2, 3, 4], 10)
    rng = np.random.default_rng(2)
    apart = 0.01 * rng.standard_normal(40) + np.array([-0.05, -0.05, 0.05, 0.05])[trial - 1]
    machine = np.repeat([0, 0, 1, 1], 10)
    blind = of(apart, trial, 0.01)
    seen = dependence_of(apart, groups_of(trial), trial, restart_spread=0.01, machine=machine)
    assert (blind.machine, blind.machines, seen.machines) == (0.0, 1, 2)
    assert seen.restart < blind.restart
    assert seen.machine > 0.05**2
    assert seen.widening(0.02, groups=10, alpha=0.05) > 2 * blind.widening(0.02, groups=10, alpha=0.05)


def test_machines_that_agree_widen_nothing():
    trial = np.repeat([1, 2, 3, 4], 10)
    differences = np.tile([-0.01, 0.01], 20)
    one = of(differences, trial, 0.01)
    two = dependence_of(differences, groups_of(trial), trial, restart_spread=0.01, machine=np.repeat([0, 0, 1, 1], 10))
    assert two.machine == 0.0
    assert two.widening(0.02, groups=10, alpha=0.05) == pytest.approx(
        one.widening(0.02, groups=10, alpha=0.05), rel=0.05
    )
