"""Where a run is kept, and whether it can be."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from analysis.records.schemas import REQUESTS
from analysis.records.tables import RecordError, read_table
from loadtests.trials.errors import RunError
from servers.fields import ConfigError


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


def check_makeable(folder: Path, option: str = "--out") -> None:
    """Raise ConfigError unless the folder, or the one that it would be made in, can be written to. Make nothing."""
    place = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not place.is_dir():
        raise ConfigError(f'{option} "{folder}" cannot be made ("{place}" is no folder): give a folder that can')
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f'{option} "{place}" is not writable: give a folder that is')


def check_writable(folder: Path) -> None:
    """Make the folder if it is not there. Raises ConfigError unless it can be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f'--out "{folder}" cannot be made ({error.strerror}): give a folder that can') from None
    check_makeable(folder)
