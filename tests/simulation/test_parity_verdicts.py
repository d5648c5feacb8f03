from __future__ import annotations

import math

import numpy as np
import pytest

from analysis.parity.accuracy import LEAST_TEXTS, estimated
from benchmarks.simulation.greedy import Server
from tests.analysis.judging.test_greedy_parity import judged


def test_equal_noisy_servers_hardly_ever_fail() -> None:
    noisy = Server(batch=0.15)
    verdicts = [judged(noisy, noisy, seed=seed).verdict for seed in range(20)]
    assert verdicts.count("FAIL") <= 2  # of 20 at a level of 1 in 40, more than 2 come once in 80 such tests


@pytest.mark.parametrize(("spread", "most"), [(0.5, 0.055), (1.0, 0.075)])
def test_a_loss_at_the_limit_passes_seldom(spread, most):
    """The share of made-up runs whose interval leaves out the truth below: .025 is meant, skew costs some of it."""
    rng = np.random.default_rng(2)
    truth = math.exp(spread**2 / 2)
    passed = 0
    for _ in range(1000):
        sums = np.exp(spread * rng.standard_normal(LEAST_TEXTS))
        passed += estimated(sums, np.ones(LEAST_TEXTS), truth, rng, of_divergence=True).high <= truth
    assert passed / 1000 <= most
