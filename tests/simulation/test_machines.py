"""The simulation that the promises of joined runs rest on."""

import numpy as np

from benchmarks.simulation.machines import BLOCKS, REQUESTS, samples, verdicts


def test_equal_arms_on_machines_of_three_speeds_pass_and_slower_ones_fail():
    assert {verdicts(3, 2, between=0.0, ratio=1.0, seed=seed)[0] for seed in range(3)} == {"PASS"}
    assert {verdicts(3, 2, between=0.0, ratio=1.4, seed=seed)[0] for seed in range(3)} == {"FAIL"}


def test_each_trial_has_its_blocks_and_each_request_its_copy():
    arm, control = samples(2, 3, between=0.0, ratio=1.1, seed=1)
    assert len(arm) == len(control) == 6 * REQUESTS
    assert len(np.unique(arm.block)) == 6 * BLOCKS
    assert (np.diff(arm.block) >= 0).all()
    assert abs(np.log(arm.values / control.values).mean() - np.log(1.1)) < 0.03
