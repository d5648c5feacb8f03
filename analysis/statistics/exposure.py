"""What a trace's lengths will do to compiled shapes, from the trace alone: unseen sizes, padding, the best buckets.

A compiled server pays for a length in one of two ways: it compiles when the length is new, or it pads the length to one
that it knows. Both follow from the order of the lengths; no server has to run.

References: [1] I. J. Good, "The population frequencies of species and the estimation of population parameters",
Biometrika 40, 1953 (the probability of an unseen species). [2] The cost of a bucket satisfies the quadrangle
inequality, so the best cut moves one way only, which divide and conquer uses: F. F. Yao, "Efficient dynamic programming
using quadrangle inequalities", STOC 1980.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from analysis.arrays import Bools, Ints

Counts = npt.NDArray[np.integer[Any]]


class ExposureError(ValueError):
    """The question has no answer. One line that names value, limit and remedy."""


def first_seen(*columns: Counts) -> Bools:
    """True where a row of the columns, each of shape (n,), has not come before. Shape (n,)."""
    _, first = np.unique(np.column_stack(columns), axis=0, return_index=True)
    new = np.zeros(len(columns[0]), dtype=np.bool_)
    new[first] = True
    return new


def unseen_probability(*columns: Counts) -> float:
    """The chance that the next row is one that never came: rows seen exactly once over all rows (Good [1]).

    It holds for rows in any order from one source; where traffic drifts it is too low. 1.0 for no rows.
    """
    _, counts = np.unique(np.column_stack(columns), axis=0, return_counts=True)
    return float((counts == 1).sum() / len(columns[0])) if len(columns[0]) else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """What rounding up to a ladder costs. `factor`: tokens run over tokens asked for, both of those that fit."""

    ladder: tuple[int, ...]
    factor: float
    too_long: int  # requests longer than the last step, which are not in the factor


def padding(lengths: Counts, ladder: Sequence[int], *, weights: Counts | None = None) -> Padding:
    """The cost of rounding `lengths` (n,) up to the steps of `ladder`. `weights` (n,): rows that run at each length."""
    steps = np.asarray(sorted(set(ladder)), dtype=np.int64)
    if not len(steps) or steps[0] < 1:
        raise ExposureError(f"the ladder is {list(ladder)}: give steps of 1 token or more")
    values = np.asarray(lengths, dtype=np.int64)
    rows = np.ones_like(values) if weights is None else np.asarray(weights, dtype=np.int64)
    kept = values <= steps[-1]
    values, rows = values[kept], rows[kept]
    if not len(values):
        raise ExposureError(f"no request fits the ladder, whose last step is {steps[-1]}: add a longer step")
    padded = steps[np.searchsorted(steps, values)]
    factor = float((rows * padded).sum() / (rows * values).sum())
    return Padding(ladder=tuple(steps.tolist()), factor=factor, too_long=int((~kept).sum()))


def best_ladder(
    lengths: Counts, steps: int, *, multiple: int = 1, last: int | None = None, weights: Counts | None = None
) -> Padding:
    """The ladder of at most `steps` steps that pads `lengths` (n,) least, by dynamic programming.

    Steps are multiples of `multiple`. `last` is the longest step, the longest length by default; longer requests are
    left out. `weights` as in `padding`. Time O(steps · d · log d) for d distinct lengths.
    """
    if steps < 1 or multiple < 1:
        raise ExposureError(f"steps is {steps} and multiple is {multiple}: give 1 or more of each")
    values = np.asarray(lengths, dtype=np.int64)
    rows = np.ones_like(values) if weights is None else np.asarray(weights, dtype=np.int64)
    if last is not None:
        values, rows = values[values <= last], rows[values <= last]
    if not len(values):
        raise ExposureError(f"no request has at most {last} tokens: give a longer last step")
    edges, place = np.unique(-(-values // multiple) * multiple, return_inverse=True)
    counts = np.bincount(place, weights=rows).astype(np.int64)
    if last is not None and edges[-1] != last:
        # whatever the trace held, the server takes requests up to here
        edges, counts = (
            np.append(edges[edges < last], last),
            np.append(counts[edges < last], counts[edges >= last].sum()),
        )
    before = np.concatenate([[0], np.cumsum(counts)])  # rows below each edge
    cuts = _cuts(edges, before, min(steps, len(edges)))
    return padding(values, edges[cuts].tolist(), weights=rows)


def _cuts(edges: Ints, before: Ints, steps: int) -> list[int]:
    """Indices of the chosen edges, rising, the last one among them."""
    size = len(edges)
    # cost[j]: tokens run for the first j edges. With one step all of them are padded to the last.
    cost = np.concatenate([[0], edges * before[1:]])
    chosen: list[Ints] = []
    for _ in range(steps - 1):
        best = cost.copy()
        came_from = np.full(size + 1, -1)  # the cut below; -1 where one step fewer is as good
        pending = [(1, size, 0, size - 1)]
        while pending:
            low, high, first, final = pending.pop()
            if low > high:
                continue
            middle = (low + high) // 2
            below = np.arange(first, min(middle - 1, final) + 1)
            totals = cost[below] + edges[middle - 1] * (before[middle] - before[below])
            where = int(np.argmin(totals))
            if totals[where] < best[middle]:
                best[middle], came_from[middle] = totals[where], below[where]
            cut = int(below[where])
            pending += [(low, middle - 1, first, cut), (middle + 1, high, cut, final)]
        cost = best
        chosen.append(came_from)
    cuts, end = [size - 1], size
    for came_from in reversed(chosen):
        if (below_end := int(came_from[end])) > 0:
            cuts.append(below_end - 1)
            end = below_end
    return sorted(cuts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batches:
    """Requests that a batcher would run together: how many, and the longest, for each batch in order. Shape (m,)."""

    size: Ints
    longest: Ints
    start_ns: Ints


def batches(offset_ns: Counts, lengths: Counts, *, window_ns: int, most: int) -> Batches:
    """The batches of a server that takes up to `most` requests and waits `window_ns` from the first of them on.

    offset_ns, lengths: (n,), in order of time. It stands in for a server's own batching: under load, batches grow until
    the server keeps up, so give the time of a prefill as the window.
    """
    if most < 1 or window_ns < 0:
        raise ExposureError(f"most is {most} and window_ns is {window_ns}: give at least 1 and 0")
    times, values = np.asarray(offset_ns, dtype=np.int64), np.asarray(lengths, dtype=np.int64)
    starts = []
    at = 0
    closes = np.searchsorted(times, times + window_ns, side="right")
    while at < len(times):
        starts.append(at)
        at = min(max(int(closes[at]), at + 1), at + most)
    first = np.asarray(starts, dtype=np.int64)
    if not len(first):
        return Batches(size=first, longest=first, start_ns=first)
    return Batches(
        size=np.diff(np.append(first, len(times))), longest=np.maximum.reduceat(values, first), start_ns=times[first]
    )
