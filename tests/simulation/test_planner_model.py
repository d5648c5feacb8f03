from __future__ import annotations

import pytest

from analysis.judging.planner import (
    MODEL_QUANTILES,
    MODEL_RATE,
    MODEL_SPREADS,
    model_noise,
)
from benchmarks.simulation.spreads import between, spreads


@pytest.mark.parametrize("design", MODEL_SPREADS)
def test_the_model_of_a_run_without_a_pilot_is_near_made_up_servers(design):
    """To a factor of two; `python -m benchmarks.simulation.spreads 200` prints the same from more seeds."""
    seen = between(spreads(design, rate=MODEL_RATE, seeds=12))
    for q, spread in zip(MODEL_QUANTILES, seen, strict=True):
        model = model_noise(design, rate=MODEL_RATE, quantile=q, block_s=1200.0).per_unit
        assert 0.5 < spread / model < 2.0
