"""Token gaps as they are judged: pooled over requests, each at the moment at which it ended."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tailgate.analysis.arrays import Bools, Ints
from tailgate.analysis.records.requests import Requests

_CHUNK = 1 << 17  # requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """One entry a gap."""

    ms: npt.NDArray[np.float32]
    row: Ints  # the request
    end_ns: Ints
    failed: Bools  # the one gap that a failed request counts with

    def of(self, kept: slice | Bools) -> Gaps:
        """Select some of the gaps."""
        return Gaps(ms=self.ms[kept], row=self.row[kept], end_ns=self.end_ns[kept], failed=self.failed[kept])


def gaps_of(requests: Requests, rows: Ints, *, most: int | None = None) -> Gaps:
    """Return the gaps of the requests `rows`. Requests with broken times have none.

    A failed request also counts with one gap as long as its deadline, at its end: the token that never came. If there
    are more gaps than `most`, it returns every k-th.
    """
    rows = rows[~requests.broken[rows]]
    counts = requests.gap_offsets[rows + 1] - requests.gap_offsets[rows]
    total = int(counts.sum() + _never_came(requests, rows).sum())
    if most is None or total <= most:
        return _gaps(requests, rows)
    step = math.ceil(total / most)
    # Memory holds the gaps that are taken, and all of some requests at a time.
    parts, passed = [], 0
    for first in range(0, len(rows), _CHUNK):
        part = _gaps(requests, rows[first : first + _CHUNK])
        parts.append(part.of(slice(-passed % step, None, step)))
        passed += len(part.ms)
    columns = {
        name: np.concatenate([getattr(part, name) for part in parts]) for name in ("ms", "row", "end_ns", "failed")
    }
    return Gaps(**columns)


def _never_came(requests: Requests, rows: Ints) -> Bools:
    return np.asarray(requests.failed[rows] & ~np.isnan(requests.max_itl_ms[rows]))


def _gaps(requests: Requests, rows: Ints) -> Gaps:
    counts = requests.gap_offsets[rows + 1] - requests.gap_offsets[rows]
    failed = rows[_never_came(requests, rows)]
    row = np.repeat(rows, counts)
    before = np.cumsum(counts) - counts
    index = np.arange(len(row)) + np.repeat(requests.gap_offsets[rows] - before, counts)
    ms = requests.gaps_ms[index]
    since = np.cumsum(ms, dtype=np.float64)
    earlier = np.concatenate(([0.0], since))[before]  # what had passed when each request began
    began = np.where(requests.first_ns[rows] > 0, requests.first_ns[rows], requests.start_ns[rows])
    end_ns = np.repeat(began, counts) + ((since - np.repeat(earlier, counts)) * 1e6).astype(np.int64)
    return Gaps(
        ms=np.concatenate((ms, requests.max_itl_ms[failed].astype(np.float32))),
        row=np.concatenate((row, failed)),
        end_ns=np.concatenate((end_ns, requests.end_ns[failed])),
        failed=np.arange(len(row) + len(failed)) >= len(row),
    )
