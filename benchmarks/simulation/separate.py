"""Arms that ran separately, as result files of other load tools hold them: what their comparison promises.

Nothing is shared: each run has its own traffic, its own hour and its own start.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from benchmarks.simulation.kinds import KINDS, Kind, pair, samples
from benchmarks.simulation.promises import ALPHA, MARGIN, METRICS, covers
from benchmarks.simulation.table import Table
from tailgate.analysis.arrays import Floats
from tailgate.analysis.settings.gate_limits import DAY_SPREAD, RESTART_SPREAD
from tailgate.analysis.statistics.compare import Comparison, decide
from tailgate.analysis.statistics.unpaired import compare_separate
from tailgate.analysis.wording import counted

QUANTILES = (0.5, 0.99)
# Starts and hours differ by as much as the gates take for granted.
_NAMES = ("calm", "jams", "drift", "static", "heavy")
SEPARATE = {name: replace(KINDS[name], start_spread=RESTART_SPREAD) for name in _NAMES}


def compared(kind: Kind, seed: int, *, ratio: float = 1.0, alpha: float = ALPHA) -> list[Comparison]:
    """Decide the p50 and the p99 of TTFT, then of E2E."""
    rng = np.random.default_rng([seed, 6])
    items: list[Comparison] = []
    for metric in METRICS:
        treatment, _ = samples(pair(kind, rng), f"{metric}_ms", ratio=ratio)
        _, control = samples(pair(kind, rng), f"{metric}_ms")
        items += compare_separate(
            treatment,
            control,
            qs=QUANTILES,
            margin=MARGIN,
            alpha=alpha,
            restart_spread=RESTART_SPREAD,
            day_spread=DAY_SPREAD,
        )
    return decide(items)


def coverage(kind: Kind, seed: int) -> Floats:
    """Return whether the 95 % intervals of equal arms hold 1, in the order of `compared`."""
    return np.array([covers(item, 1.0) for item in compared(kind, seed, alpha=ALPHA / 2)], dtype=np.float64)


def verdicts(kind: Kind, seed: int, *, ratio: float) -> Floats:
    """Return (PASS, FAIL) of each, in the order of `compared`."""
    items = compared(kind, seed, ratio=ratio)
    return np.array([[item.verdict == word for word in ("PASS", "FAIL")] for item in items], dtype=np.float64)


def separate_table(table: Table) -> None:
    """Add all rows."""
    labels = [f"p{100 * q:g} {metric}" for metric in METRICS for q in QUANTILES]
    for name, kind in SEPARATE.items():
        for trials in (1, 3):
            many = replace(kind, trials=trials)
            front = f"{name}, {counted(trials, 'separate run')} of each arm"
            for label, share in zip(labels, table.means(partial(coverage, many)), strict=True):
                table.add(f"{front}: 95 % interval of {label} holds the truth", share, least=0.92)
            for label, share in zip(labels, table.means(partial(verdicts, many, ratio=1.0 + MARGIN)), strict=True):
                table.add(f"{front}: false PASS of {label} at the margin", share[0], most=0.08)
                table.add(f"{front}: false FAIL of {label} at the margin", share[1], most=0.08)
            for ratio in (1.0, 1.5):
                for label, share in zip(labels, table.means(partial(verdicts, many, ratio=ratio)), strict=True):
                    table.add(f"{front}: PASS of {label} at a ratio of {ratio:g}", share[0])
                    table.add(f"{front}: FAIL of {label} at a ratio of {ratio:g}", share[1])
