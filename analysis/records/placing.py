"""Which rows of the records belong to the run, and why the others do not: no row is dropped silently.

A compile event that names an unknown arm, trial, replica, kind or phase, or whose times cannot be those of the run, is
not counted, since its values cannot be trusted. It is reported, so that what it may have held stays open.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from tailgate.analysis.records.request_columns import RequestColumns
from tailgate.analysis.records.requests import Requests
from tailgate.analysis.records.schemas import EVENT_KINDS
from tailgate.analysis.wording import counted

EVENT_PHASES = frozenset({"warmup", "serving"})
REQUEST_PHASES = frozenset({"rampup", "measure"})

_SLACK_NS = 3600 * 10**9  # an arm may serve this long before the first request and after the last
_LONGEST_START_NS = 24 * 3600 * 10**9
_SHOWN = 40  # characters of a value that is repeated to the user


@dataclass(frozen=True, slots=True, kw_only=True)
class Unplaced:
    """Compile events that belong nowhere for one reason, such as "5 compile events of an unknown kind ('x')"."""

    arm: str | None  # None if they do not state it
    text: str


def place_events(
    table: pa.Table | None,
    requests: Requests,
    *,
    arms: Collection[str],
    trials: Collection[int],
    replicas: Mapping[str, Collection[str]],
) -> tuple[pa.Table | None, tuple[Unplaced, ...]]:
    """Return the compile events that belong to the run, and the others. `replicas` are those of each arm, if known.

    A serving event lies within an hour of its trial's requests, one of the warm-up within a day before them.
    """
    if table is None or not table.num_rows:
        return table, ()
    spans = requests.spans()

    known = {"arm": arms, "trial": trials, "kind": EVENT_KINDS, "phase": (*EVENT_PHASES, None, "")}

    def misplaced(row: Mapping[str, Any]) -> str | None:
        of_arm = {"replica": (*replicas[row["arm"]], None, "")} if row["arm"] in replicas else {}
        for name, among in {**known, **of_arm}.items():
            if row[name] not in among:
                return f"of an unknown {name} ({_shown(row[name])})"
        start, end = row["start_ns"], row["end_ns"]
        if start is None or end is None or end < start:
            return "with times that are missing or run backwards"
        first, _, last = spans.get(row["trial"], (start, start, end))
        early = _SLACK_NS if row["phase"] == "serving" else _LONGEST_START_NS
        return "with times outside of the run" if start < first - early or end > last + _SLACK_NS else None

    rows = table.select(["arm", "trial", "replica", "kind", "phase", "start_ns", "end_ns"]).to_pylist()
    reasons = [misplaced(row) for row in rows]
    lost = Counter(
        (row["arm"] if row["arm"] in arms else None, reason)
        for row, reason in zip(rows, reasons, strict=True)
        if reason is not None
    )
    unplaced = (
        Unplaced(arm=arm, text=f"{counted(count, 'compile event')} {reason}") for (arm, reason), count in lost.items()
    )
    return table.filter(pa.array([reason is None for reason in reasons])), tuple(unplaced)


def misplaced_requests(requests: RequestColumns, *, arms: Collection[str], trials: Collection[int]) -> tuple[str, ...]:
    """Return a phrase for the requests that name no arm, and one for each arm, trial or phase that the run does not
    have. An empty collection places every row."""
    unplaced = []
    if nameless := int((requests.arm < 0).sum()):
        # The client gave up or lost its connection before the splitter had answered.
        unplaced.append(f"{counted(nameless, 'request')} that ended before the arm was known")
    for what, known, column, names in (
        ("arm", arms, requests.arm, requests.arms),
        ("trial", trials, requests.trial, None),
        ("phase", REQUEST_PHASES, requests.phase, requests.phases),
    ):
        for code in np.unique(column).tolist():
            value = code if names is None else names[code] if code >= 0 else None
            if known and value is not None and value not in known:
                count = int((column == code).sum())
                unplaced.append(f"{counted(count, 'request')} of an unknown {what} ({_shown(value)})")
    return tuple(unplaced)


def _shown(value: object) -> str:
    text = "none" if value is None else repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
