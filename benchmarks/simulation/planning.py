"""Whether a run of the planned length decides as often as the plan promised.

`python -m benchmarks.simulation.planning [SEEDS] [PROCESSES]` prints one line for each kind of servers, and one JSON
line last: single comparisons at a planned ratio, then the default gates of runs that left something open, as the
headline of such a run plans them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from analysis.settings.gate_limits import GateLimits
from analysis.statistics.compare import Comparison, compare
from analysis.statistics.planning import comparison_needed, power_of_each
from benchmarks.simulation.kinds import KINDS, Kind
from benchmarks.simulation.promises import gated
from benchmarks.simulation.scenario import Scenario, run, sample
from benchmarks.simulation.table import over_seeds
from benchmarks.simulation.weather import BLOCK_S

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
) -> Outcome:
    """Pilots of `PILOT_S`, a plan from each for the true ratio, and a fresh run of the planned length."""
    decided, lengths = 0, []
    for number in range(seeds):
        rng = np.random.default_rng([seed, number])
        seen = _compared(replace(scenario, duration_s=PILOT_S), q, ratio, margin, rng)
        needed, _ = comparison_needed(seen, block_s=BLOCK_S, min_blocks=MIN_BLOCKS, power=power, ratio=ratio)
        if needed is None:
            continue
        lengths.append(needed)
        longer = _compared(replace(scenario, duration_s=needed), q, ratio, margin, rng)
        p_value = longer.p_noninferior if ratio < 1.0 + margin else longer.p_inferior
        decided += p_value is not None and p_value <= longer.alpha
    return Outcome(
        seeds=seeds,
        planned=len(lengths),
        decided=decided,
        median_s=float(np.median(lengths)) if lengths else float("nan"),
    )


LONGEST_SIMULATED_S = 4 * 3600.0


def replanned(kind: Kind, seed: int) -> tuple[bool, bool, bool, float]:
    """Of equal arms: a run that leaves a default gate open, and one as long and in as many starts as it asks for.

    (left open, planned, decided, planned seconds); a plan beyond four hours counts as none.
    """
    items = gated(kind, seed)
    waiting = [item for item in items if item.verdict == "INCONCLUSIVE"]
    if not waiting:
        return False, False, False, 0.0
    power = power_of_each(GateLimits())
    plans = [comparison_needed(item, block_s=BLOCK_S, min_blocks=MIN_BLOCKS, power=power) for item in waiting]
    lengths = [length for length, _ in plans]
    if any(length is None or length > LONGEST_SIMULATED_S for length in lengths):
        return True, False, False, 0.0
    seconds = max(length for length in lengths if length is not None)
    starts = max(starts for _, starts in plans)
    longer = replace(kind, trials=starts, duration_s=seconds / starts)
    decided = all(item.verdict != "INCONCLUSIVE" for item in gated(longer, seed + 100_000))
    return True, True, decided, seconds


def _compared(scenario: Scenario, q: float, ratio: float, margin: float, rng: np.random.Generator) -> Comparison:
    served = run(scenario, rng)
    (item,) = compare(
        sample(served.treatment, ratio=ratio),
        sample(served.control),
        qs=(q,),
        margin=margin,
        alpha=0.05,
    )
    return item


def _main(seeds: int, processes: int) -> None:
    rows = {}
    for name, kind in KINDS.items():
        runs = over_seeds(partial(replanned, kind), range(seeds), processes=processes)
        planned = [row for row in runs if row[1]]
        decided = sum(row[2] for row in planned)
        rows[f"{name}, default gates"] = decided / max(1, len(planned))
        lengths = [row[3] for row in planned] or [float("nan")]
        print(
            f"{name:<10} {sum(row[0] for row in runs)} of {seeds} runs left a gate open, {len(planned)} were planned, "
            f"{decided} of those decided; median length {np.median(lengths):,.0f} s",
            flush=True,
        )
    for name, servers, q, ratio, margin in CASES:
        for power in (0.8, 0.9):
            outcome = planned_power(Scenario(**servers), q=q, ratio=ratio, margin=margin, power=power, seeds=seeds)
            rows[f"{name}, power {power:g}"] = outcome.decided / max(1, outcome.planned)
            print(
                f"{name:<34} power {power:g}: decided {outcome.decided} of {outcome.planned} "
                f"({rows[f'{name}, power {power:g}']:.2f}), median length {outcome.median_s:,.0f} s",
                flush=True,
            )
    print(json.dumps(rows))


if __name__ == "__main__":
    _main(int(sys.argv[1]) if len(sys.argv) > 1 else 100, int(sys.argv[2]) if len(sys.argv) > 2 else 1)
