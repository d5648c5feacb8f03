"""Interim analyses of a run directory, whenever there is something new: `python -m analysis.interim RUN_DIR`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from analysis.interim.journal import JOURNAL, PREVIEW, append, read_interim, row_of
from analysis.interim.outlook import analyse
from analysis.records.documents import content_of
from analysis.records.plain_values import number, table
from analysis.records.run_records import read_run, trial_folders
from analysis.records.tables import RecordError
from analysis.run.client_stalls import with_lengths
from analysis.run.run import Run
from analysis.run.settled import settled, settled_s


class Watch:
    """Analyses the run in `directory` whenever a block more of it can be judged.

    A `preview` takes any run as if interim analyses decided it, in a journal of its own: its intervals hold at every
    analysis, and nothing is decided by them.
    """

    def __init__(self, directory: Path, *, preview: bool = False) -> None:
        self._directory = directory
        self._preview = preview
        self._journal = PREVIEW if preview else JOURNAL
        self._number = len(read_interim(directory, journal=self._journal))
        self._seen_s = 0.0

    def analyse(self, at_ns: int) -> dict[str, Any] | None:
        """The line that was added to the journal; None where nothing new can be judged yet."""
        if self._settled_s() <= self._seen_s:
            return None
        try:
            records = settled(read_run(self._directory))
        except RecordError:
            return None  # no request was recorded yet
        if records is None:
            return None
        if self._preview:
            gates = {**table(records.experiment, "gates"), "sequential": True}
            records = replace(records, experiment={**records.experiment, "gates": gates})
        run = with_lengths(Run.of(records))
        self._seen_s = run.seconds
        self._number += 1
        row = row_of(analyse(run), run, number=self._number, at_ns=at_ns)
        append(self._directory, row, journal=self._journal)
        return row

    def _settled_s(self) -> float:
        """How much could be judged now, from the small files alone."""
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
