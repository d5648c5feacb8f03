"""How much log ratios of a typical block vary from run to run on made-up servers: what a plan without a pilot knows.

`python -m benchmarks.simulation.spreads [SEEDS]` prints the table behind the model in `analysis.judging.planner`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from analysis.arrays import Floats
from analysis.judging.planner import MODEL_QUANTILES, MODEL_RATE, MODEL_S, MODEL_SPREADS, model_noise
from analysis.statistics.groups import groups_of
from analysis.statistics.quantiles import block_histogram
from analysis.statistics.windows import Windows, typical_ratio
from benchmarks.simulation.scenario import Scenario, run
from benchmarks.simulation.server import Served
from benchmarks.simulation.weather import BLOCK_S

# Slots grow with the rate, so that every server has the same load.
_SLOTS_PER_RATE = 4
DESIGNS: Mapping[str, Mapping[str, Any]] = {
    "mirrored, steady": {"design": "mirrored", "cox": 0.0},
    "mirrored": {"design": "mirrored", "cox": 0.3},
    "split": {"design": "split", "cox": 0.3},
    "separate": {"design": "separate", "cox": 0.3},
}


def spreads(design: str, *, rate: float, seeds: int, seed: int = 7) -> Floats:
    """Spreads over `seeds` runs of MODEL_S, shape (E2E and TTFT, MODEL_QUANTILES).

    Where blocks hold too little of a tail the ratio is that of the whole run, as a gate takes it. A spread is half the
    distance between 16 % and 84 % of the runs, a standard deviation were they normal: the one run in a hundred that is
    overloaded for minutes does not count.
    """
    scenario = Scenario(duration_s=MODEL_S, rate=rate, slots=max(4, int(_SLOTS_PER_RATE * rate)), **DESIGNS[design])
    ratios = np.empty((seeds, 2, len(MODEL_QUANTILES)))
    for number in range(seeds):
        served = run(scenario, np.random.default_rng([seed, number]))
        for place, metric in enumerate(("e2e_ms", "ttft_ms")):
            ratios[number, place] = _log_ratios(served.treatment, served.control, metric)
    low, high = np.quantile(ratios, (0.16, 0.84), axis=0)
    return np.asarray((high - low) / 2.0)


def _log_ratios(treatment: Served, control: Served, metric: str) -> Floats:
    """The log ratio at each of MODEL_QUANTILES, shape (MODEL_QUANTILES,)."""
    one, other = getattr(treatment, metric), getattr(control, metric)
    block, its = ((arm.arrival_s // BLOCK_S).astype(np.int64) for arm in (treatment, control))
    histogram = block_histogram(one, block, other, its, anchor=0.0)
    group = groups_of(np.zeros(histogram.blocks, dtype=np.int64))
    whole = np.log(np.quantile(one, MODEL_QUANTILES) / np.quantile(other, MODEL_QUANTILES))
    windows = [Windows.of(histogram, group, q) for q in MODEL_QUANTILES]
    return np.array([seen if own is None else typical_ratio(own) for seen, own in zip(whole, windows, strict=True)])


def between(both: Floats) -> Floats:
    """The geometric mean of the spreads of E2E and TTFT."""
    return np.asarray(np.sqrt(both[0] * both[1]))


def _main(seeds: int) -> None:
    names = "".join(f"{100 * q:>9g}" for q in MODEL_QUANTILES)
    print(f"{'design':<18}{'rate':>5} {'':<7}{names}")
    for design in MODEL_SPREADS:
        for rate in (1.0, 2.0, MODEL_RATE, 8.0, 16.0):
            both = spreads(design, rate=rate, seeds=seeds)
            model = [model_noise(design, rate=rate, quantile=q, block_s=MODEL_S).per_unit for q in MODEL_QUANTILES]
            for name, row in (("e2e", both[0]), ("ttft", both[1]), ("between", between(both)), ("model", model)):
                print(f"{design:<18}{rate:>5g} {name:<8}" + "".join(f"{value:>9.3f}" for value in row), flush=True)


if __name__ == "__main__":
    _main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
