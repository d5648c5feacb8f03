"""What a load process saw, what the null server says it sent, and how late the load process was. Pure but for files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from analysis.arrays import Ints
from analysis.records.request_columns import integers
from analysis.records.schemas import REQUESTS
from analysis.records.tables import read_table
from benchmarks.simulation.records import request_table, token_lists, write_requests

if TYPE_CHECKING:
    from loadtests.clients.call import Call


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One row a request in every column; `stamps` holds the tokens' times of all, `counts` how many are whose.

    answer: the server's time of the answer. `end` and `answer` are 0 where a request has not ended.
    """

    names: npt.NDArray[np.str_]
    scheduled: Ints
    sent: Ints
    end: Ints
    answer: Ints
    ok: Ints
    stamps: Ints
    counts: Ints

    @classmethod
    def of_records(cls, path: Path) -> Self:
        """Read what a contestant recorded: requests-N.arrow."""
        table = read_table(path, REQUESTS)[0]

        def column(name: str) -> Ints:
            return np.asarray(integers(table[name], 0), dtype=np.int64)

        times = table["token_ns"].combine_chunks()
        counts = np.asarray(integers(times.value_lengths(), 0), np.int64)
        sent = column("sent_ns")
        status = np.array(table["status"].to_pylist(), dtype=np.str_)
        return cls(
            names=np.array(table["request_id"].to_pylist(), dtype=np.str_),
            scheduled=column("scheduled_ns"),
            sent=sent,
            end=np.where(status == "CANCELLED", 0, column("end_ns")),
            answer=column("server_end_ns"),
            ok=(status == "OK").astype(np.int64),
            stamps=np.asarray(times.flatten(), np.int64) + np.repeat(sent, counts),
            counts=counts,
        )


def write_calls(calls: Sequence[Call], path: Path) -> None:
    """Write the calls as tailgate records them. A call's tag is its name and when it was scheduled."""
    sent = np.array([call.sent_ns for call in calls], np.int64)
    counts = np.array([len(call.token_ns) for call in calls], np.int64)
    stamps = np.concatenate([np.zeros(0, np.int64), *(np.array(call.token_ns, np.int64) for call in calls)])
    table = request_table(
        sent,
        request_id=[call.tag[0] for call in calls],
        scheduled_ns=[call.tag[1] for call in calls],
        status=[call.status or "CANCELLED" for call in calls],
        end_ns=[call.end_ns for call in calls],
        server_end_ns=[int(call.trailing_metadata.get("tailgate-end-ns", 0)) if call.status else 0 for call in calls],
        token_ns=token_lists(stamps - np.repeat(sent, counts), counts),
    )
    partly = path.with_name("partial-" + path.name)
    write_requests(partly, table)
    partly.replace(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Emitted:
    """The null server's log: which tick was sent when, and each stream's first tick and number of tokens."""

    ticks: Ints
    emits: Ints
    names: npt.NDArray[np.str_]
    first_ticks: Ints
    tokens: Ints
    phases: int

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what the server's `report` wrote."""
        with np.load(path) as kept:
            columns = {name: kept[name] for name in cls.__slots__ if name != "phases"}
            return cls(**columns, phases=int(kept["phases"]))

    def at(self, ticks: Ints) -> Ints:
        """When these ticks were sent; 0 for one that was not."""
        if not len(self.ticks):
            return np.zeros(len(ticks), np.int64)
        place = np.searchsorted(self.ticks, ticks).clip(max=len(self.ticks) - 1)
        return np.where(self.ticks[place] == ticks, self.emits[place], 0)


class TooLittleError(Exception):
    """There is nothing to judge; the message says what is missing."""


def stream_figures(seen: Observed, sent: Emitted, *, start_ns: int, end_ns: int) -> dict[str, float]:
    """Delivered share and lag (ms) over the window.

    delivered: tokens stamped in the window ÷ tokens sent in the window, at most 1 (a client that catches up does not
    deliver more). Lag: stamp − send of the tokens sent in the window; one that has not come has the lag that it had
    reached when the window ended.
    """
    rows = {name: row for row, name in enumerate(sent.names)}
    stream = np.array([rows.get(name, -1) for name in seen.names], np.int64)
    if ((stream < 0) & (seen.counts > 0)).any():
        raise TooLittleError("a client saw tokens of streams that the server does not know: names do not match")
    first = np.where(stream < 0, 0, sent.first_ticks[stream])
    starts = np.concatenate([[0], np.cumsum(seen.counts)[:-1]]).astype(np.int64)
    order = np.arange(len(seen.stamps)) - np.repeat(starts, seen.counts)
    emits = sent.at(np.repeat(first, seen.counts) + order * sent.phases)  # 0: the stamp is newer than the log
    came = int(((seen.stamps >= start_ns) & (seen.stamps < end_ns)).sum())
    lags = [(seen.stamps - emits)[(emits > 0) & (emits >= start_ns) & (emits < end_ns)]]
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
    return {
        "sent": left,
        "delivered": min(1.0, came / left),
        "p50_lag_ms": float(np.quantile(lag, 0.5)),
        "p99_lag_ms": float(np.quantile(lag, 0.99)),
        "max_lag_ms": float(lag.max()),
    }


def own_error(seen: Observed, *, start_ns: int, end_ns: int) -> dict[str, float]:
    """The load process's share of the latency (ms) of answers that were due in the window.

    late: sent − scheduled. delivery: the client's stamp of the end − the server's. own: both together.
    """
    due = (seen.scheduled >= start_ns) & (seen.scheduled < end_ns)
    good = due & (seen.ok > 0) & (seen.answer > 0)
    if not good.any():
        raise TooLittleError("no request of the window was answered")
    late = (seen.sent - seen.scheduled)[good] / 1e6
    delivery = (seen.end - seen.answer)[good] / 1e6
    figures = {"due": float(due.sum()), "answered": float(good.sum() / due.sum())}
    for name, values in (("late", late), ("delivery", delivery), ("own", late + delivery)):
        figures[f"p50_{name}_ms"] = float(np.quantile(values, 0.5))
        figures[f"p99_{name}_ms"] = float(np.quantile(values, 0.99))
    figures["max_own_ms"] = float((late + delivery).max())
    return figures
