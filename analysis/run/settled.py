"""The records of an unfinished run, as far as they are complete.

A request under way has no record yet, and the slowest requests are under way the longest: judging those that have ended
would judge the quick ones. Every load process states up to which instant all that was due has ended (`settled_ns`).
Only whole blocks before it are judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from analysis.arrays import Bools, Ints
from analysis.records.plain_values import number
from analysis.records.run_records import RunRecords
from analysis.run.trials import SECOND

_NEVER = np.iinfo(np.int64).max


def settled(records: RunRecords) -> RunRecords | None:
    """Return the records up to the last whole block in which all that was due has ended; None if there is none.

    A trial that ended by itself stays as it is. An unfinished one is cut, and reads as if it had ended there.
    """
    trials: list[dict[str, Any]] = []
    until: dict[int, int] = {}  # of each trial that is kept
    for info in records.trials:
        seconds = settled_s(records.generators, info)
        if info.get("complete"):
            trials.append(info)
            until[int(info["trial"])] = _NEVER
        elif seconds > 0:
            trials.append({**info, "complete": True, "duration_s": seconds, "planned": {}})
            until[int(info["trial"])] = int(info["start_ns"]) + int(seconds * SECOND)
    if not trials:
        return None
    requests = records.requests
    return replace(
        records,
        trials=tuple(trials),
        requests=requests.kept(_before(requests.trial, requests.start_ns, until)),
        events=_table_before(records.events, until),
        steps=_table_before(records.steps, until),
    )


def settled_s(accounts: Iterable[Mapping[str, Any]], info: Mapping[str, Any]) -> float:
    """Return how many seconds of the trial can be judged by the accounts of its load processes: whole blocks in which
    every arm had a turn."""
    own = [account for account in accounts if account.get("trial") == info.get("trial")]
    start_ns, block_s = number(info.get("start_ns")), number(info.get("block_s"))
    if not own or len(own) < (number(info.get("load_processes")) or 1) or start_ns is None or not block_s:
        return 0.0
    until_ns = min(number(account.get("settled_ns")) or 0.0 for account in own)
    arms = info.get("arms")
    width_s = block_s * (len(arms) if info.get("design") == "switchback" and isinstance(arms, list) else 1)
    most_s = number(info.get("duration_s")) or 0.0
    return max(0.0, min(most_s, (until_ns - start_ns) / SECOND // width_s * width_s))


def _table_before(rows: pa.Table | None, until: Mapping[int, int]) -> pa.Table | None:
    if rows is None:
        return None
    trial, start = (pc.fill_null(rows.column(name), 0).to_numpy() for name in ("trial", "start_ns"))
    return rows.filter(pa.array(_before(trial, start, until)))


def _before(trial: Ints, start_ns: Ints, until: Mapping[int, int]) -> Bools:
    """Return what began before the end of its trial."""
    end = np.full(len(trial), np.iinfo(np.int64).min)
    for own, end_ns in until.items():
        end[trial == own] = end_ns
    return np.asarray(start_ns < end)
