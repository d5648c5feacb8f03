"""Whether a run of the planned length decides as often as the plan promised.

It plans the default gates that runs left open, as the headline of such a run does.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from benchmarks.simulation.kinds import KINDS, Kind
from benchmarks.simulation.promises import gated
from benchmarks.simulation.table import Table
from benchmarks.simulation.weather import BLOCK_S
from tailgate.analysis.settings.gate_limits import GateLimits
from tailgate.analysis.statistics.planning import comparison_needed, power_of_each

MIN_BLOCKS = 20
LONGEST_SIMULATED_S = 4 * 3600.0


def replanned(kind: Kind, seed: int) -> tuple[bool, bool, float]:
    """Run equal arms; if a default gate stays open, run again for as long and in as many starts as it asks for.

    Returns (planned, decided, planned seconds); a plan beyond four hours counts as none.
    """
    items = gated(kind, seed)
    waiting = [item for item in items if item.verdict == "INCONCLUSIVE"]
    if not waiting:
        return False, False, 0.0
    power = power_of_each(GateLimits())
    plans = [comparison_needed(item, block_s=BLOCK_S, min_blocks=MIN_BLOCKS, power=power) for item in waiting]
    lengths = [length for length, _ in plans]
    if any(length is None or length > LONGEST_SIMULATED_S for length in lengths):
        return False, False, 0.0
    seconds = max(length for length in lengths if length is not None)
    starts = max(starts for _, starts in plans)
    longer = replace(kind, trials=starts, duration_s=seconds / starts)
    decided = all(item.verdict != "INCONCLUSIVE" for item in gated(longer, seed + 100_000))
    return True, decided, seconds


def planning_table(table: Table) -> None:
    """Add how many of the planned runs decided, and their median length."""
    for name, kind in KINDS.items():
        runs = table.over_seeds(partial(replanned, kind))
        lengths = [seconds for was_planned, _, seconds in runs if was_planned]
        if lengths:
            share = sum(decided for _, decided, _ in runs) / len(lengths)
            table.add(f"planned runs that decide: {name}, default gates left open", share, runs=len(lengths))
            table.add("  seconds of half of them", float(np.median(lengths)), runs=len(lengths))
