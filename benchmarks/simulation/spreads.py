"""How much the log ratio of p99 in a typical block varies from run to run: what a plan without a pilot knows.

`python -m benchmarks.simulation.spreads [SEEDS]` prints the table behind the model in `analysis.statistics.planning`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from analysis.arrays import Floats
from analysis.statistics.compare import compare
from analysis.statistics.planning import MODEL_RATE, MODEL_S, model_noise
from benchmarks.simulation.scenario import Scenario, run, sample
from benchmarks.simulation.server import Served

# Slots grow with the rate, so that every server has the same load.
_SLOTS_PER_RATE = 4
_Q = 0.99
DESIGNS: Mapping[str, Mapping[str, Any]] = {
    "mirrored": {"design": "mirrored", "cox": 0.3},
    "split": {"design": "split", "cox": 0.3},
    "separate": {"design": "separate", "cox": 0.3},
}


def spreads(design: str, *, rate: float, seeds: int, seed: int = 7) -> Floats:
    """Spreads over `seeds` runs of MODEL_S: of E2E and of TTFT, shape (2,).

    Where blocks hold too little of a tail the ratio is that of the whole run, as a gate takes it. A spread is half the
    distance between 16 % and 84 % of the runs, a standard deviation were they normal: the one run in a hundred that is
    overloaded for minutes does not count.
    """
    scenario = Scenario(duration_s=MODEL_S, rate=rate, slots=max(4, int(_SLOTS_PER_RATE * rate)), **DESIGNS[design])
    ratios = np.empty((seeds, 2))
    for number in range(seeds):
        served = run(scenario, np.random.default_rng([seed, number]))
        for place, metric in enumerate(("e2e_ms", "ttft_ms")):
            ratios[number, place] = _log_ratio(served.treatment, served.control, metric)
    low, high = np.quantile(ratios, (0.16, 0.84), axis=0)
    return np.asarray((high - low) / 2.0)


def _log_ratio(treatment: Served, control: Served, metric: str) -> float:
    both = (sample(arm, metric=metric) for arm in (treatment, control))
    (item,) = compare(*both, qs=(_Q,), margin=0.0, alpha=0.05)
    return math.log(item.ratio or math.nan)


def between(both: Floats) -> float:
    """The geometric mean of the spreads of E2E and TTFT."""
    return math.sqrt(both[0] * both[1])


def _main(seeds: int) -> None:
    names = "".join(f"{name:>9}" for name in ("e2e", "ttft", "between", "model"))
    print(f"{'design':<12}{'rate':>5}{names}")
    for design in DESIGNS:
        for rate in (1.0, 2.0, MODEL_RATE, 8.0, 16.0):
            both = spreads(design, rate=rate, seeds=seeds)
            model = model_noise(design, rate=rate, block_s=MODEL_S).per_unit
            row = "".join(f"{value:>9.3f}" for value in (*both, between(both), model))
            print(f"{design:<12}{rate:>5g}{row}", flush=True)


if __name__ == "__main__":
    _main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
