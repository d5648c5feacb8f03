"""Where a run is kept."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

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
