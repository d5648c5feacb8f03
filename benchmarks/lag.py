"""How honest a load generator was: its stamps against the null server's, and against arithmetic. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np

from analysis.arrays import Ints
from benchmarks.observed import Emitted, Observed


class TooLittleError(Exception):
    """There is nothing to judge; the message says what is missing."""


def stream_figures(seen: Observed, sent: Emitted, *, start_ns: int, end_ns: int) -> dict[str, Any]:
    """Delivered share, lag (ms) and inter-token error (ms) over the window.

    delivered: tokens stamped in the window ÷ tokens sent in the window, at most 1 (a client that catches up does not
    deliver more). Lag: stamp − send of the tokens sent in the window; one that has not come has the lag that it had
    reached when the window ended. Inter-token error: |gap seen − gap sent| of neighbours sent in the window.
    """
    rows = {name: row for row, name in enumerate(sent.names)}
    stream = np.array([rows.get(name, -1) for name in seen.names], np.int64)
    if ((stream < 0) & (seen.counts > 0)).any():
        raise TooLittleError("a client saw tokens of streams that the server does not know: names do not match")
    first = np.where(stream < 0, 0, sent.first_ticks[stream])
    starts = np.concatenate([[0], np.cumsum(seen.counts)[:-1]]).astype(np.int64)
    order = np.arange(len(seen.stamps)) - np.repeat(starts, seen.counts)
    ticks = np.repeat(first, seen.counts) + order * sent.phases
    emits = sent.at(ticks)
    known = emits > 0  # a stamp newer than the log has no send time yet
    came = int(((seen.stamps >= start_ns) & (seen.stamps < end_ns)).sum())
    lags = [(seen.stamps - emits)[known & (emits >= start_ns) & (emits < end_ns)]]
    received = np.zeros(len(sent.names), np.int64)
    received[stream[stream >= 0]] = seen.counts[stream >= 0]
    left = 0
    for begin, count, got in zip(sent.first_ticks, sent.tokens, received, strict=True):
        at = sent.at(begin + np.arange(count) * sent.phases)
        inside = (at >= start_ns) & (at < end_ns)
        left += int(inside.sum())
        missing = at[got:][inside[got:]]
        if len(missing):
            lags.append(end_ns - missing)
    lag = np.concatenate(lags) / 1e6
    if not left or not came:
        raise TooLittleError("no token was sent in the window and came")
    pair = np.flatnonzero((order[1:] > 0) & known[1:] & known[:-1] & (emits[1:] >= start_ns) & (emits[1:] < end_ns))
    error = np.abs(np.diff(seen.stamps) - np.diff(emits))[pair] / 1e6
    return {
        "sent": left,
        "delivered": min(1.0, came / left),
        "p50_lag_ms": float(np.quantile(lag, 0.5)),
        "p99_lag_ms": float(np.quantile(lag, 0.99)),
        "max_lag_ms": float(lag.max()),
        "p99_itl_error_ms": float(np.quantile(error, 0.99)) if len(error) else None,
    }


def own_error(seen: Observed, *, start_ns: int, end_ns: int) -> dict[str, Any]:
    """The generator's share of the latency (ms) of answers that were due in the window.

    late: sent − scheduled. delivery: the client's stamp of the end − the server's. own: both together. path: everything
    but the server's residence, which also holds the way to the server and the server's own waiting: an upper bound.
    """
    due = (seen.scheduled >= start_ns) & (seen.scheduled < end_ns)
    good = due & (seen.ok > 0) & (seen.answer > 0)
    if not good.any():
        raise TooLittleError("no request of the window was answered")
    late = (seen.sent - seen.scheduled)[good] / 1e6
    delivery = (seen.end - seen.answer)[good] / 1e6
    path = ((seen.end - seen.scheduled) - (seen.answer - seen.recv))[good] / 1e6
    figures: dict[str, Any] = {"due": int(due.sum()), "answered": float(good.sum() / due.sum())}
    for name, values in (("late", late), ("delivery", delivery), ("own", late + delivery), ("path", path)):
        figures[f"p50_{name}_ms"] = float(np.quantile(values, 0.5))
        figures[f"p99_{name}_ms"] = float(np.quantile(values, 0.99))
    figures["max_own_ms"] = float((late + delivery).max())
    return figures


def completions_per_s(seen: Observed, *, start_ns: int, end_ns: int) -> float:
    """Good answers that ended in the window, a second."""
    inside = (seen.ok > 0) & (seen.end >= start_ns) & (seen.end < end_ns)
    return float(inside.sum() / ((end_ns - start_ns) / 1e9))


def stalled_latencies(
    scheduled_ns: Sequence[int] | Ints, *, service_ns: int, stall_ns: tuple[int, int], cap: int = 0
) -> Ints:
    """The latency from schedule of each request at a server that takes `service_ns` and is silent in the stall.

    With `cap`, at most that many are in flight and the rest wait their turn; nothing else takes time. This is the
    truth that an honest generator reports.
    """
    start, end = stall_ns
    free: list[int] = []  # when the slots in use are free again
    out = np.zeros(len(scheduled_ns), np.int64)
    for number, due in enumerate(scheduled_ns):
        begin = int(due)
        if cap and len(free) >= cap:
            begin = max(begin, heapq.heappop(free))
        done = begin + service_ns
        if start <= done < end:
            done = end
        if cap:
            heapq.heappush(free, done)
        out[number] = done - int(due)
    return out
