"""Where a run is kept."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from analysis.records.schemas import REQUESTS
from analysis.records.tables import RecordError, read_table
from loadtests.trials.errors import RunError


def new_run_dir(out: Path, name: str) -> Path:
    """A new directory `<time>-<name>` under `out`."""
    stamp = datetime.now(tz=UTC).strftime("%Y%m%dT%H%M%SZ")
    for attempt in range(1, 1000):
        suffix = "" if attempt == 1 else f"-{attempt}"
        path = out / f"{stamp}-{name}{suffix}"
        with suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
    raise RunError(f'"{out}" has too many runs of {stamp}: give another --out')


def has_requests(run_dir: Path) -> bool:
    """Whether any request was recorded."""
    for path in run_dir.glob("trial-*/requests*.arrow"):
        with suppress(RecordError, OSError):
            if read_table(path, REQUESTS)[0].num_rows:
                return True
    return False
