"""Pairs of requests: each request of an arm and its copy on the control, and how much later one of them was sent."""

from __future__ import annotations

import math

import numpy as np

from tailgate.analysis.arrays import Bools, Ints, index_parts
from tailgate.analysis.run.run import Run
from tailgate.analysis.statistics.quantiles import quantile

# What a difference in how the load was sent may take: a share of the margin, and what no load process keeps to.
_OF_MARGIN = 0.2
_LEAST_MS = 1.0
# Of an arm. Their p99.9 is known far better than blocks agree on it.
MOST_REQUESTS = 2_000_000


def in_pairs(pair: Ints, rows: Ints, base: Ints) -> tuple[Ints, Ints]:
    """Return (rows that have a copy in `base`, their copies); the last copy if there are two."""
    of_base = pair[base]
    if (of_base < 0).any():
        base, of_base = base[of_base >= 0], of_base[of_base >= 0]
    if not base.size:
        return rows[:0], base
    before, after = int(of_base.min()) - 1, int(of_base.max()) + 1  # for all pairs beyond, which have no copy
    last_copy = np.full(after - before + 1, -1, dtype=np.int32)
    last_copy[of_base - np.int32(before)] = base
    copies = last_copy.take(pair[rows] - np.int32(before), mode="clip")
    found = copies >= 0
    return (rows, copies) if found.all() else (rows[found], copies[found])


def drawn_pairs(run: Run, own: Bools, base: Bools) -> tuple[Ints, Ints]:
    """Return the rows of `own` that have a copy in `base` in their trial, and their copies.

    If there are more than MOST_REQUESTS, it draws about as many at random. Masks have the shape (requests,).
    """
    rng, size, found = run.rng(6), int(own.sum()), [(np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int32))]
    for trial in run.trials:
        of_trial = (run.requests.rows(mask, trial.number) for mask in (own, base))
        rows, copies = in_pairs(run.requests.pair, *of_trial)
        kept = _drawn(len(rows), size, rng)
        found.append((rows[kept], copies[kept]))
    rows, copies = (np.concatenate(column) for column in zip(*found, strict=True))
    return rows, copies


def drawn(run: Run, own: Bools) -> Ints:
    """Return the rows of the mask; if there are more than MOST_REQUESTS, about as many, drawn at random."""
    rng, size = run.rng(6), int(own.sum())
    return np.concatenate([rows[_drawn(len(rows), size, rng)] for rows in index_parts(own)])


def _drawn(rows: int, of: int, rng: np.random.Generator) -> Bools | slice:
    return slice(None) if of <= MOST_REQUESTS else np.asarray(rng.random(rows, dtype=np.float32) * of < MOST_REQUESTS)


def matters_ms(run: Run, at: float) -> float:
    """Return the lag between arms that matters: a fifth of the margin on the control's TTFT (E2E if it has none) at the
    quantile `at`, and at least 1 ms."""
    metric = "e2e" if run.embeds else "ttft"
    seen = quantile(run.requests.metric_ms(metric, drawn(run, run.answered(run.control))), at)
    return _LEAST_MS if math.isnan(seen) else max(_LEAST_MS, _OF_MARGIN * run.limits.margin_of(metric) * seen)


def lag_differences(run: Run, arm: str) -> list[tuple[str, float, float]]:
    """Return (what, ms that the arm's requests lag more than the control's, ms that matter).

    It compares the mean and the gated quantile. Empty if lags are not recorded, or if requests wait for the servers
    before they are sent.
    """
    if run.reported_open_loop is False or run.concurrency:
        return []
    at, seen = run.limits.quantile, []
    for name in (arm, run.control):
        lag = run.requests.lag_ms(drawn(run, run.of_arm(name) & run.usable))
        lag = lag[~np.isnan(lag)]
        if not lag.size:
            return []
        seen.append((float(lag.mean(dtype=np.float64)), quantile(lag, at)))
    means, tails = zip(*seen, strict=True)
    return [
        ("on average", means[0] - means[1], matters_ms(run, 0.5)),
        (f"at p{100.0 * at:.10g}", tails[0] - tails[1], matters_ms(run, at)),
    ]
