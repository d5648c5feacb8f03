"""What a trace's lengths will do to compiled shapes, from the trace alone: unseen sizes, padding, the best buckets.

A compiled server compiles when a length is new, or pads it to one that it knows. Both follow from the order of the
lengths; no server has to run.

References
----------
[1] Good, I. J. (1953). The population frequencies of species and the estimation of population parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from analysis.arrays import Ints

Counts = npt.NDArray[np.integer[Any]]


class ExposureError(ValueError):
    """The question has no answer. One line that names value, limit and remedy."""


def unseen_probability(lengths: Counts) -> float:
    """Return the chance that the next length never came: those seen exactly once over all (Good [1]).

    It holds for lengths in any order from one source; where traffic drifts it is too low. 1.0 for none.
    """
    counts = np.unique(lengths, return_counts=True)[1]
    return float((counts == 1).sum() / len(lengths)) if len(lengths) else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """What rounding up to a ladder costs. `factor`: tokens run over tokens asked for, both of those that fit."""

    ladder: tuple[int, ...]
    factor: float
    too_long: int  # requests longer than the last bucket, which are not in the factor


def padding(lengths: Counts, ladder: Sequence[int]) -> Padding:
    """Return the cost of rounding `lengths` (n,) up to the buckets of `ladder`."""
    buckets = np.asarray(sorted(set(ladder)), dtype=np.int64)
    if not len(buckets) or buckets[0] < 1:
        raise ExposureError(f"the ladder is {list(ladder)}: give steps of 1 token or more")
    values = np.asarray(lengths, dtype=np.int64)
    kept = values[values <= buckets[-1]]
    if not len(kept):
        raise ExposureError(f"no request fits the ladder, whose last step is {buckets[-1]}: add a longer step")
    factor = float(buckets[np.searchsorted(buckets, kept)].sum() / kept.sum())
    return Padding(ladder=tuple(buckets.tolist()), factor=factor, too_long=len(values) - len(kept))


def best_ladder(lengths: Counts, steps: int, *, multiple: int = 1, last: int | None = None) -> Padding:
    """Return the ladder of at most `steps` buckets that pads `lengths` (n,) least, by dynamic programming.

    Buckets are multiples of `multiple`. `last` is the longest bucket, the longest length by default; longer requests
    are left out. Time O(steps · d²) for d distinct lengths.
    """
    if steps < 1 or multiple < 1:
        raise ExposureError(f"steps is {steps} and multiple is {multiple}: give 1 or more of each")
    values = np.asarray(lengths, dtype=np.int64)
    if last is not None:
        values = values[values <= last]
    if not len(values):
        raise ExposureError(f"no request has at most {last} tokens: give a longer last step")
    edges, counts = np.unique(-(-values // multiple) * multiple, return_counts=True)
    if last is not None and edges[-1] != last:
        # The server takes requests up to here, whatever the trace held.
        below = edges < last
        edges, counts = np.append(edges[below], last), np.append(counts[below], counts[~below].sum())
    before = np.concatenate([[0], np.cumsum(counts)])  # requests below each edge
    return padding(values, edges[_cuts(edges, before, min(steps, len(edges)))].tolist())


def _cuts(edges: Ints, before: Ints, steps: int) -> list[int]:
    """Indices of the chosen edges, rising, the last one among them."""
    size = len(edges)
    # cost[j]: tokens run for the first j edges. With one step all of them are padded to the last.
    cost = np.concatenate([[0], edges * before[1:]])
    chosen: list[Ints] = []
    for _ in range(steps - 1):
        best, cut = cost.copy(), np.zeros(size + 1, dtype=np.int64)
        for end in range(1, size + 1):
            totals = cost[:end] + edges[end - 1] * (before[end] - before[:end])
            cut[end] = np.argmin(totals)  # 0 where one step fewer is as good
            best[end] = totals[cut[end]]
        cost = best
        chosen.append(cut)
    cuts, end = [size - 1], size
    for cut in reversed(chosen):
        if (end := int(cut[end])) == 0:
            break
        cuts.append(end - 1)
    return sorted(cuts)
