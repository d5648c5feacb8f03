"""What the default gates promise on each kind of servers: coverage, false verdicts at the margin, and power."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from benchmarks.simulation.kinds import KINDS, Kind, pair, sample, samples, trial
from benchmarks.simulation.table import Table
from tailgate.analysis.arrays import Floats
from tailgate.analysis.checks.data import MOST_CORRELATION, most_correlation
from tailgate.analysis.statistics.compare import Comparison, compare, decide, equal_counts

MARGIN, ALPHA = 0.10, 0.05
METRICS = ("ttft", "e2e")

# By how much longer steps take where the tail of a typical block is at the margin, by kind and metric: found by
# bisection, at which the median ratio of 40 runs is 1 + MARGIN.
AT_MARGIN = {
    ("jams", "ttft"): 1.039,
    ("jams", "e2e"): 1.053,
    ("static", "ttft"): 1.079,
    ("static", "e2e"): 1.083,
    ("heavy", "ttft"): 1.017,
    ("heavy", "e2e"): 1.037,
}


def gated(kind: Kind, seed: int, *, slower: float = 1.0, ratio: float = 1.0, alpha: float = ALPHA) -> list[Comparison]:
    """Decide the two default gates on a fresh run of the kind: p99 of TTFT and of E2E."""
    rng = np.random.default_rng([seed, 5])
    trials = pair(kind, rng, slower=slower)
    items = []
    for metric in METRICS:
        both = samples(trials, f"{metric}_ms", ratio=ratio)
        if kind.kept < 1.0:
            few = both[0].only(np.random.default_rng([seed, 7]).uniform(size=len(both[0])) < kind.kept)
            both = equal_counts(few, both[1], rng=rng)
        items += [replace(item, metric=metric) for item in compare(*both, qs=(0.99,), margin=MARGIN, alpha=alpha)]
    return decide(items)


def coverage(kind: Kind, seed: int) -> Floats:
    """Return whether the 95 % intervals hold the true ratio, for each metric."""
    items = gated(kind, seed, alpha=ALPHA / 2)
    return np.array([covers(item, 1.0) for item in items], dtype=np.float64)


def outcome(kind: Kind, seed: int, *, ratio: float = 1.0, slower: float = 1.0) -> Floats:
    """Return (PASS, FAIL) of each metric, then PASS of both and FAIL of any, after the checks of the statistics."""
    items = gated(kind, seed, slower=slower, ratio=ratio)
    stands = believed(items)
    passed = [stands and item.verdict == "PASS" for item in items]
    failed = [stands and item.verdict == "FAIL" for item in items]
    return np.array([*passed, *failed, all(passed), any(failed)], dtype=np.float64)


def covers(item: Comparison, ratio: float) -> bool:
    """Return whether the interval holds the ratio."""
    return (item.low is None or item.low <= ratio) and (item.high is None or item.high >= ratio)


def believed(items: Sequence[Comparison]) -> bool:
    """Return whether the checks of the statistics let the comparisons stand."""
    return (most_correlation(items) or 0.0) <= MOST_CORRELATION


def any_of_three(kind: Kind, seed: int) -> Floats:
    """Return whether any of three arms fails a gate at its exact limit, with Holm's adjustment and without."""
    *arms, control = (sample([served]) for served in trial(kind, np.random.default_rng(seed), (1.0,) * 4))
    items = [item for arm in arms for item in compare(arm, control, qs=(0.99,), margin=0.0, alpha=ALPHA)]
    adjusted = any(item.verdict == "FAIL" for item in decide(items))
    return np.array([adjusted, any((item.p_inferior or 1.0) <= ALPHA for item in items)], dtype=np.float64)


# Equal arms that pass both default gates in 20 minutes at 4 requests/s.
POWER = {"calm": 0.85, "jams": 0.50, "drift": 0.80, "static": 0.70}


def promises_table(table: Table) -> None:
    """Add all rows of all kinds."""
    for name, kind in KINDS.items():
        for metric, share in zip(METRICS, table.means(partial(coverage, kind)), strict=True):
            table.add(f"{name}: 95 % interval of p99 {metric} of a typical block holds the truth", share, least=0.92)
        at_margin = table.means(partial(outcome, kind, ratio=1.0 + MARGIN))
        for metric, passed, failed in zip(METRICS, at_margin[:2], at_margin[2:4], strict=True):
            table.add(f"{name}: false PASS of p99 {metric} at the margin", passed, most=0.08)
            table.add(f"{name}: false FAIL of p99 {metric} at the margin", failed, most=0.08)
        for place, metric in enumerate(METRICS):
            if (name, metric) in AT_MARGIN:
                shares = table.means(partial(outcome, kind, slower=AT_MARGIN[name, metric]))
                check = f"{name}: false PASS of p99 {metric} where slower steps put it at the margin"
                table.add(check, shares[place], most=0.08)
        for ratio in (0.8, 1.0, 1.2, 1.5):
            shares = table.means(partial(outcome, kind, ratio=ratio))
            least = POWER.get(name) if ratio == 1.0 else None
            most = 0.08 if ratio <= 1.0 else None
            table.add(f"{name}: PASS of both gates at a ratio of {ratio:g}", shares[4], least=least)
            table.add(f"{name}: FAIL of any gate at a ratio of {ratio:g}", shares[5], most=most)

    holm, plain = table.means(partial(any_of_three, KINDS["calm"]))
    table.add("any of three equal arms falsely FAILs, with Holm", holm, most=0.07)
    table.add("  the same without Holm", plain)
