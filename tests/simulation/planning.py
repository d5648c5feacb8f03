"""Whether a run of the planned length decides as often as the plan promised.

`python -m tests.simulation.planning [SEEDS]` prints one line for each kind of servers, and one JSON line last.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from analysis.compare import Comparison, compare
from analysis.planner import comparison_needed_s
from tests.simulation.scenario import BLOCK_S, Scenario, run, sample

PILOT_S = 600.0
MIN_BLOCKS = 20
# (name, servers, quantile, true ratio, margin): each is far from decided by the pilot alone
CASES: tuple[tuple[str, Mapping[str, Any], float, float, float], ...] = (
    ("mirrored, steady, p99, equal", {}, 0.99, 1.0, 0.05),
    ("mirrored, p99, equal", {"cox": 0.3}, 0.99, 1.0, 0.05),
    ("split, p99, equal", {"cox": 0.3, "design": "split"}, 0.99, 1.0, 0.10),
    ("separate, p95, equal", {"cox": 0.3, "design": "separate"}, 0.95, 1.0, 0.10),
    ("mirrored, p99, 1.15 against 1.10", {"cox": 0.3}, 0.99, 1.15, 0.10),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How often planned runs decided, and how long they were. `decided` of `planned`, of `seeds` pilots."""

    seeds: int
    planned: int
    decided: int
    median_s: float


def planned_power(
    scenario: Scenario,
    *,
    q: float,
    ratio: float,
    margin: float,
    power: float,
    seeds: int,
    seed: int = 11,
    draws: int = 999,
) -> Outcome:
    """Pilots of `PILOT_S`, a plan from each for the true ratio, and a fresh run of the planned length."""
    decided, lengths = 0, []
    for number in range(seeds):
        rng = np.random.default_rng([seed, number])
        seen = _compared(replace(scenario, duration_s=PILOT_S), q, ratio, margin, draws, rng)
        needed = comparison_needed_s(seen, block_s=BLOCK_S, min_blocks=MIN_BLOCKS, power=power, ratio=ratio)
        if needed is None:
            continue
        lengths.append(needed)
        found = _compared(replace(scenario, duration_s=needed), q, ratio, margin, draws, rng)
        p_value = found.p_noninferior if ratio < 1.0 + margin else found.p_inferior
        decided += p_value is not None and p_value <= found.alpha
    return Outcome(
        seeds=seeds,
        planned=len(lengths),
        decided=decided,
        median_s=float(np.median(lengths)) if lengths else float("nan"),
    )


def _compared(
    scenario: Scenario, q: float, ratio: float, margin: float, draws: int, rng: np.random.Generator
) -> Comparison:
    served = run(scenario, rng)
    return compare(
        sample(served.treatment, ratio=ratio),
        sample(served.control),
        q=q,
        margin=margin,
        alpha=0.05,
        draws=draws,
        rng=rng,
        paired=scenario.design == "mirrored",
    )


def _main(seeds: int) -> None:
    rows = {}
    for name, servers, q, ratio, margin in CASES:
        for power in (0.8, 0.9):
            found = planned_power(Scenario(**servers), q=q, ratio=ratio, margin=margin, power=power, seeds=seeds)
            rows[f"{name}, power {power:g}"] = found.decided / max(1, found.planned)
            print(
                f"{name:<34} power {power:g}: decided {found.decided} of {found.planned} "
                f"({rows[f'{name}, power {power:g}']:.2f}), median length {found.median_s:,.0f} s",
                flush=True,
            )
    print(json.dumps(rows))


if __name__ == "__main__":
    _main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
