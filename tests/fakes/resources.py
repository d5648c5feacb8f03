"""What machines would have shown during a made-up run: memory, power and energy, a sample a second."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from analysis.records.schemas import BED
from analysis.records.tables import RecordWriter
from tests.fakes.beds import SECOND

GIB = 1 << 30

# The value of a column, or values of it by second of the trial (from its start), for a trial's number.
Value = float | Callable[[int, np.ndarray[Any, Any]], np.ndarray[Any, Any]]


def sample(
    directory: Path,
    kind: str,
    name: str,
    columns: Mapping[str, Value],
    *,
    arm: str | None = None,
    last_s: float | None = None,
    trials: tuple[int, ...] = (),
) -> Path:
    """Give each trial of the run in `directory`, or those in `trials`, samples of the thing; return `directory`."""
    for folder in sorted(directory.glob("trial-*")):
        info = json.loads((folder / "trial.json").read_text())
        number = int(info["trial"])
        if trials and number not in trials:
            continue
        at_s = np.arange(-10.0, (info["duration_s"] + 5.0 if last_s is None else last_s), 1.0)
        values = {key: item(number, at_s) if callable(item) else 0.0 * at_s + item for key, item in columns.items()}
        with RecordWriter(folder / "bed.arrow", BED) as writer:
            for place, second in enumerate(at_s):
                at_ns = info["start_ns"] + int(second * SECOND)
                row = {"trial": number, "host": "run", "kind": kind, "name": name, "arm": arm, "at_ns": at_ns}
                known = {key: item[place] for key, item in values.items() if not np.isnan(item[place])}
                whole = {key: key.endswith(("_w", "_j", "_s")) for key in known}
                writer.append(row | {key: item if whole[key] else int(item) for key, item in known.items()})
        for path in folder.glob("*.sums"):
            path.unlink()
    return directory


def tell(directory: Path, **facts: Any) -> Path:
    """Add `facts` to trial.json of each trial; return `directory`."""
    for path in directory.glob("trial-*/trial.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | facts))
    return directory
