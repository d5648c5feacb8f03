"""Which rows of the records belong to the run, and why the others do not: nothing falls out in silence.

A compile event that names an unknown arm, trial, replica, kind or phase, or whose times cannot be those of the run, is
counted nowhere: its values cannot be trusted. It is reported instead, so that what it may have held stays open.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from analysis.records.event_kinds import EVENT_KINDS
from analysis.records.requests import Requests
from analysis.wording import counted

EVENT_PHASES = frozenset({"warmup", "serving"})
REQUEST_PHASES = frozenset({"rampup", "measure"})

_SLACK_NS = 3600 * 10**9  # an arm may serve this long before the first request and after the last
_LONGEST_START_NS = 24 * 3600 * 10**9
_SHOWN = 40  # characters of a value that is repeated to the user


@dataclass(frozen=True, slots=True, kw_only=True)
class Unplaced:
    """Rows that belong nowhere for one reason. `arm` is None where they do not say whose they are."""

    arm: str | None
    reason: str  # what follows "5 compile events"
    rows: int


def place_events(
    table: pa.Table | None,
    requests: Requests,
    *,
    arms: Collection[str],
    trials: Collection[int],
    replicas: Mapping[str, Collection[str]],
) -> tuple[pa.Table | None, tuple[Unplaced, ...]]:
    """The compile events that belong to the run, and the others. `replicas` are those of each arm where they are known.

    A serving event lies within an hour of its trial's requests, one of the warm-up within a day before them.
    """
    if table is None or not table.num_rows:
        return table, ()
    spans = requests.spans()
    columns = table.select(["arm", "trial", "replica", "kind", "phase", "start_ns", "end_ns"]).to_pylist()
    why = [_misplaced(row, arms, trials, replicas, spans) for row in columns]
    owners = [row["arm"] if row["arm"] in arms else None for row in columns]
    lost = Counter((arm, reason) for arm, reason in zip(owners, why, strict=True) if reason is not None)
    if not lost:
        return table, ()
    unplaced = tuple(Unplaced(arm=arm, reason=reason, rows=rows) for (arm, reason), rows in lost.items())
    return table.filter(pa.array([reason is None for reason in why])), unplaced


def _misplaced(
    row: Mapping[str, Any],
    arms: Collection[str],
    trials: Collection[int],
    replicas: Mapping[str, Collection[str]],
    spans: Mapping[int, tuple[int, int]],
) -> str | None:
    arm, replica, trial = row["arm"], row["replica"] or None, row["trial"]
    if arm not in arms:
        return f"of an unknown arm ({_shown(arm)})"
    if trial not in trials:
        return f"of an unknown trial ({trial})"
    if replica is not None and arm in replicas and replica not in replicas[arm]:
        return f"of an unknown replica ({_shown(replica)})"
    if row["kind"] not in EVENT_KINDS:
        return f"of an unknown kind ({_shown(row['kind'])})"
    if row["phase"] and row["phase"] not in EVENT_PHASES:
        return f"of an unknown phase ({_shown(row['phase'])})"
    start, end = row["start_ns"], row["end_ns"]
    if start is None or end is None or end < start:
        return "with times that are missing or run backwards"
    if trial in spans:
        first, last = spans[trial]
        early = _SLACK_NS if row["phase"] == "serving" else _LONGEST_START_NS
        if start < first - early or end > last + _SLACK_NS:
            return "with times outside of the run"
    return None


def misplaced_requests(table: pa.Table, *, arms: Collection[str], trials: Collection[int]) -> tuple[Unplaced, ...]:
    """The requests that name an arm, a trial or a phase that the run does not have, or no arm; empty where it is not
    known which it has."""
    nameless = table.column("arm").null_count
    # Nobody knows whose it is that ended before the splitter had answered: its client gave up, or lost the connection.
    unplaced = (
        [Unplaced(arm=None, reason="that ended before it was known whose they are", rows=nameless)] if nameless else []
    )
    for what, known in (("arm", arms), ("trial", trials), ("phase", REQUEST_PHASES)):
        for item in pc.value_counts(table.column(what).combine_chunks()).to_pylist() if known else ():
            if item["values"] is not None and item["values"] not in known:
                reason = f"of an unknown {what} ({_shown(item['values'])})"
                unplaced.append(Unplaced(arm=None, reason=reason, rows=item["counts"]))
    return tuple(unplaced)


def words_of(unplaced: Sequence[Unplaced], what: str) -> list[str]:
    """One phrase for each reason: "5 compile events of an unknown kind (recompila)"."""
    return [f"{counted(item.rows, what)} {item.reason}" for item in unplaced]


def _shown(value: object) -> str:
    text = "none" if value is None else repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
