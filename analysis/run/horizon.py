"""The records of a run that goes on, as far as they are complete: what is looked at while there is more to come.

A request that is under way has no record yet, and the slowest are under way the longest: to judge those that have ended
would judge the quick ones. Every load process says up to which instant all that was due has ended (`settled_ns`); only
whole blocks before it are looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from analysis.records.plain_values import number
from analysis.records.run_records import RunRecords
from analysis.run.trials import SECOND


def settled(records: RunRecords) -> RunRecords | None:
    """The records up to the last whole block in which all that was due has ended; None where there is none.

    A trial that ended by itself stays as it is. One that goes on is cut, and reads as if it had ended there.
    """
    trials, cuts = [], {}
    for info in records.trials:
        if info.get("complete"):
            trials.append(info)
            continue
        seconds = settled_s(records.generators, info)
        if seconds > 0:
            trials.append({**info, "complete": True, "duration_s": seconds, "planned": {}})
            cuts[int(info["trial"])] = int(info["start_ns"]) + int(seconds * SECOND)
    if not trials:
        return None
    kept = {int(info["trial"]) for info in trials}
    return replace(
        records,
        trials=tuple(trials),
        requests=_before(records.requests, kept, cuts, "scheduled_ns", "sent_ns"),
        events=None if records.events is None else _before(records.events, kept, cuts, "start_ns"),
        steps=None if records.steps is None else _before(records.steps, kept, cuts, "start_ns"),
    )


def settled_s(accounts: Iterable[Mapping[str, Any]], info: Mapping[str, Any]) -> float:
    """How many seconds of the trial can be judged by the accounts of its load processes: a whole number of blocks, 0
    where there is none yet."""
    own = [account for account in accounts if account.get("trial") == info.get("trial")]
    settled_ns = [number(account.get("settled_ns")) for account in own]
    start_ns, block_s = number(info.get("start_ns")), number(info.get("block_s"))
    expected = number(info.get("load_processes")) or 1
    if not own or len(own) < expected or start_ns is None or not block_s:
        return 0.0
    until = min(value or 0.0 for value in settled_ns)
    width_s = block_s * _arms_in_turn(info)
    most = number(info.get("duration_s")) or 0.0
    return max(0.0, min(most, (until - start_ns) / SECOND // width_s * width_s))


def _arms_in_turn(info: Mapping[str, Any]) -> int:
    """By how many blocks of the schedule one is that compares all arms."""
    arms = info.get("arms")
    return len(arms) if info.get("design") == "switchback" and isinstance(arms, list) else 1


def _before(rows: pa.Table, trials: set[int], cuts: Mapping[int, int], *times: str) -> pa.Table:
    """The rows of these trials that began before their trial's cut."""
    at = pc.coalesce(*(rows.column(name) for name in times)) if len(times) > 1 else rows.column(times[0])
    trial = pc.fill_null(rows.column("trial"), 1)
    keep = pc.is_in(trial, value_set=pa.array(sorted(trials), trial.type))
    for number_, cut_ns in cuts.items():
        late = pc.and_(pc.equal(trial, number_), pc.greater_equal(pc.fill_null(at, 0), cut_ns))
        keep = pc.and_(keep, pc.invert(late))
    return rows.filter(keep)
