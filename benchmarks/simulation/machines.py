"""How often trials on a few machines decide wrongly where the ratio differs by machine.

Each machine has its own speed, and an effect of its own on the log ratio of the two arms. A trial is 240 s of four
requests a second to each arm, whose blocks share a drift and whose starts differ. The p99 of a typical block
is judged at a margin of 10 %, as joined runs are, and as if all trials had run on one machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from benchmarks.simulation.table import Table
from tailgate.analysis.arrays import Floats, Ints
from tailgate.analysis.checks.data import contradicted
from tailgate.analysis.judging.comparisons import leveled
from tailgate.analysis.judging.gates import FAIL, INCONCLUSIVE, PASS
from tailgate.analysis.run.trials import Machines
from tailgate.analysis.statistics.compare import Comparison, Sample, compare, decide

REQUESTS, BLOCKS, BLOCK_S = 960, 8, 30.0
SPEEDS = (1.0, 2.0, 1.4)
START, DRIFT, OWN_DRIFT, NOISE = 0.01, 0.15, 0.02, 0.05
# Machines, trials on each, the standard deviation of the log ratio between machines, the true ratio.
SETTINGS = (
    *((3, 2, between, 1.1) for between in (0.0, 0.03, 0.06)),
    *((2, 2, 0.03, 1.1), (3, 1, 0.06, 1.1)),
    *((3, 2, 0.0, 1.0), (3, 2, 0.03, 1.0), (2, 2, 0.0, 1.0)),
)


def samples(machines: int, trials: int, *, between: float, ratio: float, seed: int) -> tuple[Sample, Sample]:
    """Return the latencies of the arm and of the control over all trials, machine by machine."""
    rng = np.random.default_rng([seed, machines, trials, 7])
    rows: list[tuple[Floats, Floats, Ints]] = []
    effects = between * rng.standard_normal(machines)
    for machine in range(machines):
        for _ in range(trials):
            block = (np.sort(rng.uniform(0.0, BLOCKS * BLOCK_S, REQUESTS)) // BLOCK_S).astype(np.int64)
            shared, own = (spread * rng.standard_normal(BLOCKS)[block] for spread in (DRIFT, OWN_DRIFT))
            work = 0.5 * rng.standard_normal(REQUESTS) + 0.3 * rng.standard_normal(REQUESTS)
            base = 100.0 * SPEEDS[machine % len(SPEEDS)] * np.exp(work + shared)
            control = base * np.exp(NOISE * rng.standard_normal(REQUESTS) + START * rng.standard_normal())
            slower = ratio * math.exp(effects[machine])
            arm = base * np.exp(NOISE * rng.standard_normal(REQUESTS) + own + START * rng.standard_normal()) * slower
            rows.append((arm, control, block))
    joined = np.concatenate([block + place * BLOCKS for place, (_, _, block) in enumerate(rows)])
    trial = np.repeat(np.arange(1, len(rows) + 1), REQUESTS)
    arm, control = (np.concatenate([row[side] for row in rows]) for side in (0, 1))
    return tuple(Sample(values=values, block=joined, trial=trial) for values in (arm, control))  # type: ignore[return-value]


def _compared(pair: tuple[Sample, Sample], machines: Machines) -> list[Comparison]:
    items = compare(*pair, qs=[0.99], margin=0.1, alpha=0.05, machines=machines.of_trial)
    return [replace(item, arm="arm", control="control", metric="e2e") for item in items]


def verdicts(machines: int, trials: int, seed: int, *, between: float, ratio: float) -> tuple[str, str]:
    """Return the verdict with known machines, including the check, and the verdict without."""
    of_trial = {number + 1: number // trials for number in range(machines * trials)}
    known = Machines(names=tuple(f"machine {place}" for place in range(machines)), of_trial=of_trial)
    pair = leveled(known, *samples(machines, trials, between=between, ratio=ratio, seed=seed))
    (item,) = decide(_compared(pair, known))
    (blind,) = decide(_compared(pair, Machines()))
    by_machine = [
        replace(own, machine=name)
        for place, name in enumerate(known.names)
        for own in _compared(_of_machine(pair, known, place), known)
    ]
    return INCONCLUSIVE if any(contradicted([item], by_machine)) else item.verdict, blind.verdict


def _of_machine(pair: Sequence[Sample], machines: Machines, place: int) -> tuple[Sample, Sample]:
    arm, control = (sample.only(machines.codes(sample.trial) == place) for sample in pair)
    return arm, control


def machines_table(table: Table) -> None:
    """Add PASS and FAIL of each setting; at the margin both are wrong."""
    for machines, trials, between, ratio in SETTINGS:
        pairs = table.over_seeds(partial(verdicts, machines, trials, between=between, ratio=ratio))
        for place, how in enumerate(("", ", blind to machines")):
            for word in (PASS, FAIL):
                share = sum(pair[place] == word for pair in pairs) / len(pairs)
                most = 0.08 if not place and (ratio > 1.0 or word == FAIL) else None
                what = (
                    f"{machines} machines × {trials} trials that differ by {between:.0%}, {ratio:g} times{how}: {word}"
                )
                table.add(what, share, most=most)
