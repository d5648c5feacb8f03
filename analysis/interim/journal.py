"""Interim analyses of a run directory, whenever there is something new: one line each in interim.jsonl."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailgate.analysis.arrays import Bools, Ints
from tailgate.analysis.interim import JOURNAL
from tailgate.analysis.interim.outlook import Interim, analyse
from tailgate.analysis.judging.gates import Gate
from tailgate.analysis.records.documents import content_of, read_rows
from tailgate.analysis.records.plain_values import number
from tailgate.analysis.records.run_records import RunRecords, read_run, trial_folders
from tailgate.analysis.records.tables import RecordError
from tailgate.analysis.run.client_stalls import with_lengths
from tailgate.analysis.run.run import Run
from tailgate.analysis.run.trials import SECOND
from tailgate.analysis.settings.metrics import gate_label

_OF_CHECKS = ("check", "arm", "ok", "reason", "remedy")


def row_of(interim: Interim, run: Run, *, count: int, at_ns: int) -> dict[str, Any]:
    """Convert the analysis to plain values.

    Times are ns since the epoch and seconds of judged traffic, `harm` and `safety` e-values as decimal logarithms, of
    which a FAIL takes `needed` and a PASS `needed_safety`.
    """
    return {
        "number": count,
        "at_ns": at_ns,
        "trial": max((trial.number for trial in run.trials), default=1),
        "seconds": run.seconds,
        "arms": {arm.pop("arm"): arm for arm in map(asdict, interim.arms)},
        **({} if interim.step is None else {"step": asdict(interim.step)}),
        "gates": [_gate(gate) for gate in interim.gates],
        "checks": [{key: getattr(check, key) for key in _OF_CHECKS} for check in interim.checks],
    }


_OF_PATH = ("harm", "safety", "decided_s", "outlook_s", "needed", "needed_safety")


def _gate(gate: Gate) -> dict[str, Any]:
    """Convert a gate, with value, limit and interval in one unit: for an objective, shares of requests."""
    path, (low, high) = gate.path, gate.interval
    row = {name: getattr(gate, name) for name in ("arm", "gate", "kind", "verdict", "reason", "unit", "value", "limit")}
    row |= {"label": gate_label(gate.gate), "low": low, "high": high}
    row |= {name: getattr(path, name, None) for name in _OF_PATH}
    if path is not None and gate.kind in ("slo", "error"):
        row |= {"unit": "pct", "value": path.value, "limit": path.limit}
    return row


def read_interim(directory: Path) -> list[dict[str, Any]]:
    """Return every whole line of the journal; empty where there is none."""
    return read_rows(directory / JOURNAL)[0]


class Watch:
    """Analyse the run in `directory` whenever a block more of it can be judged."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._number = len(read_interim(directory))
        self._seen_s = 0.0

    def analyse(self, at_ns: int) -> dict[str, Any] | None:
        """Add a line to the journal and return it; None where nothing new can be judged yet."""
        if self._settled_s() <= self._seen_s:
            return None
        records = None
        with suppress(RecordError):  # no request was recorded yet
            records = settled(read_run(self._directory))
        if records is None:
            return None
        run = with_lengths(Run.of(records))
        self._seen_s = run.seconds
        self._number += 1
        row = row_of(analyse(run), run, count=self._number, at_ns=at_ns)
        with (self._directory / JOURNAL).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")
        return row

    def _settled_s(self) -> float:
        """Return how many seconds could be judged now, from the small files alone."""
        total = 0.0
        for folder in trial_folders(self._directory):
            info = content_of(folder / "trial.json")
            if info.get("complete"):
                total += number(info.get("duration_s")) or 0.0
            elif info:
                accounts = [content_of(path) for path in sorted(folder.glob("generator-[0-9]*.json"))]
                accounts = [{**account, "trial": info.get("trial")} for account in accounts if account]
                total += settled_s(accounts, info)
        return total


# A request under way has no record yet, and the slowest requests are under way the longest: judging those that have
# ended would judge only the fast ones. Every load process states up to which instant all that was due has ended
# (`settled_ns`). Only whole blocks before it are judged.
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
            trials.append({**info, "complete": True, "under_way": True, "duration_s": seconds, "planned": {}})
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
    end = np.full(len(trial), np.iinfo(np.int64).min)
    for own, end_ns in until.items():
        end[trial == own] = end_ns
    return np.asarray(start_ns < end)
