"""Token gaps as they are judged: pooled over requests, each at the moment at which it ended."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from analysis.arrays import Bools, Ints
from analysis.records.requests import Requests

_CHUNK = 1 << 17  # requests at a time, so that memory follows what is kept and not what is read


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """One entry a gap."""

    ms: npt.NDArray[np.float32]
    row: Ints  # the request
    end_ns: Ints
    failed: Bools  # the one gap that a failed request counts with

    def __len__(self) -> int:
        return len(self.ms)


def gaps_of(requests: Requests, rows: Ints, *, most: int | None = None) -> Gaps:
    """The gaps of the requests `rows`. Requests with broken times have none.

    A failed request also counts with one gap as long as its deadline (as its longest gap does), at its end: the token
    that never came. With `most`, every k-th gap is taken where there are more, so that a quantile of the rest differs
    by far less than time blocks do.
    """
    rows = rows[~requests.broken[rows]]
    counts = np.diff(requests.gap_offsets)[rows]
    extra = requests.failed[rows] & ~np.isnan(requests.max_itl_ms[rows])
    total = int(counts.sum() + extra.sum())
    step = max(1, math.ceil(total / most)) if most else 1
    parts = []
    passed = 0
    for first in range(0, max(1, len(rows)), _CHUNK):
        own = rows[first : first + _CHUNK]
        columns = _chunk(requests, own, counts[first : first + _CHUNK], own[extra[first : first + _CHUNK]])
        kept = slice(-passed % step, None, step)
        passed += len(columns[0])
        parts.append([column[kept] for column in columns])
    ms, row, end_ns, failed = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Gaps(ms=ms, row=row, end_ns=end_ns, failed=failed)


def _chunk(requests: Requests, rows: Ints, counts: Ints, failed: Ints) -> tuple[npt.NDArray[Any], ...]:
    """The columns of Gaps for `rows`, of which `failed` also count with their deadline."""
    row = np.repeat(rows, counts)
    before = np.cumsum(counts) - counts
    index = np.arange(len(row)) + np.repeat(requests.gap_offsets[rows] - before, counts)
    ms = requests.gaps_ms[index]
    since = np.cumsum(ms, dtype=np.float64)
    earlier = np.concatenate(([0.0], since))[before]  # what had passed when each request began
    began = np.where(requests.first_ns[rows] > 0, requests.first_ns[rows], requests.start_ns[rows])
    end_ns = np.repeat(began, counts) + ((since - np.repeat(earlier, counts)) * 1e6).astype(np.int64)
    flags = np.zeros(len(row) + len(failed), dtype=np.bool_)
    flags[len(row) :] = True
    return (
        np.concatenate((ms, requests.max_itl_ms[failed].astype(np.float32))),
        np.concatenate((row, failed)),
        np.concatenate((end_ns, requests.end_ns[failed])),
        flags,
    )
