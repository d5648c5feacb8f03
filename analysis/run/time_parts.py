"""Where the time of an arm's requests went, by what its server reports: those around a quantile of E2E."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from analysis.arrays import Floats
from analysis.run.run import Run

PARTS = ("queue", "prefill", "decode", "stall", "rest")
BESIDE = {0.5: 0.025, 0.99: 0.005}  # by quantile: the share of all requests to either side of it that is meant
_FEWEST_BESIDE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeParts:
    """Means in ms over `requests` completed requests around the quantile; the parts add up to `e2e_ms`.

    `rest_ms` is what the server gives no name: steps of others between one's own, the splitter, the network, the load
    generator's lag.
    """

    quantile: float
    requests: int
    e2e_ms: float
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    stall_ms: float
    rest_ms: float


def time_parts(run: Run, arm: str) -> tuple[TimeParts, ...]:
    """One for each quantile of BESIDE; none where no server says how long its requests queued and were computed."""
    requests = run.requests
    reported = (requests.queued_us >= 0) & (requests.prefill_us >= 0)
    own = np.flatnonzero(run.of_arm(arm) & run.usable & requests.ok & reported)
    if not own.size:
        return ()
    took = requests.e2e_ms[own]
    ordered = np.sort(took)
    found = []
    for quantile, beside in BESIDE.items():
        low, high = ends(ordered, quantile, beside)
        rows = own[(took >= low) & (took <= high)]
        queue, prefill, decode = (
            np.maximum(column[rows], 0) / 1e3
            for column in (requests.queued_us, requests.prefill_us, requests.decode_us)
        )
        e2e = requests.e2e_ms[rows]
        parts = split(e2e, queue, prefill, decode, np.maximum(requests.stall_ns[rows], 0) / 1e6)
        means = dict(zip((f"{part}_ms" for part in PARTS), parts.mean(axis=1).tolist(), strict=True))
        found.append(TimeParts(quantile=quantile, requests=len(rows), e2e_ms=float(e2e.mean()), **means))
    return tuple(found)


def ends(ordered: Floats, quantile: float, beside: float) -> tuple[float, float]:
    """The least and the greatest of the values around the quantile: `ordered` rises and is not empty.

    As many as the share `beside` of all to either side, and two at least where there are so many.
    """
    last = len(ordered) - 1
    middle, reach = quantile * last, max(beside * len(ordered), _FEWEST_BESIDE)
    low, high = max(0, math.ceil(middle - reach)), min(last, math.floor(middle + reach))
    return float(ordered[low]), float(ordered[high])


def split(e2e: Floats, queue: Floats, prefill: Floats, decode: Floats, stall: Floats) -> Floats:
    """PARTS of each request in ms, shape (5, requests), which add up to `e2e`.

    A server counts a stall within what it held up, and does not say what that was: it is taken out of the longest
    part, and what is left of it out of the next one. Where the server's parts are longer than `e2e`, by the
    difference of two clocks, each is shortened in proportion.
    """
    named = np.stack((queue, prefill, decode))
    total = named.sum(axis=0)
    named *= np.where(total > e2e, e2e / np.where(total > 0, total, 1.0), 1.0)
    parts = np.vstack((named, np.maximum(e2e - named.sum(axis=0), 0.0)))
    left = np.minimum(stall, e2e)
    held = left.copy()
    columns = np.arange(len(e2e))
    for longest in np.argsort(-parts, axis=0, kind="stable"):
        out = np.minimum(left, parts[longest, columns])
        parts[longest, columns] -= out
        left -= out
    return np.vstack((parts[:3], held, parts[3:]))
