"""What the processes of a run hold, sample by sample: memory, open files, threads; and whether it grows."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

FIGURES = ("rss", "pss", "own")
WARM_SHARE = 0.1  # of the traffic, after which nothing is to grow
MOST_GROWTH = 0.02
_SHORTEST_S = 3.0  # stretch from which a median is taken: a busy machine samples every other second


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One process at one instant (seconds since the epoch); memory in bytes.

    `own` is what lies in no file (RssAnon): unlike the pages of libraries it is the same whoever else uses them.
    """

    at_s: float
    rss: int
    pss: int
    own: int
    files: int
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Medians over the first and the last tenth after the warm-up, and the line of Theil and Sen over all of it, as a
    share of the first. `growth` is the larger of the two."""

    first: float
    last: float
    line: float

    @property
    def growth(self) -> float:
        return max(self.last / self.first - 1.0, self.line)


def tree(root: int) -> list[psutil.Process]:
    """The process and all that descend from it, as far as they are still there."""
    try:
        process = psutil.Process(root)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def sample(process: psutil.Process, at_s: float) -> Sample | None:
    """None where it is gone."""
    try:
        with process.oneshot():
            rollup = kilobytes(Path(f"/proc/{process.pid}/smaps_rollup"))
            return Sample(
                at_s=at_s,
                rss=rollup["Rss"] * 1024,
                pss=rollup["Pss"] * 1024,
                own=rollup["Anonymous"] * 1024,
                files=process.num_fds(),
                threads=process.num_threads(),
            )
    except (psutil.Error, OSError, KeyError):
        return None


def kilobytes(path: Path) -> dict[str, int]:
    """The figures of a page of /proc that are in kB, by name."""
    lines = (line.split() for line in path.read_text().splitlines() if line.endswith(" kB"))
    return {words[0].rstrip(":"): int(words[1]) for words in lines}


def name_of(command: Sequence[str]) -> str:
    """Who it is, by its command line: the module that Python runs, or the program."""
    words = list(command)
    if "--replica" in words[:-1]:
        return f"arm {words[words.index('--replica') + 1]}"
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    if len(words) > 2 and "-c" in words[:3]:
        return "tailgate run"
    return words[0].rpartition("/")[2] if words else "gone"


def growth(samples: Sequence[Sample], figure: str, *, start_s: float, end_s: float) -> Growth | None:
    """Of what was seen from `start_s` to `end_s`, less the warm-up; None for a process that was not there so long."""
    warm_s = start_s + WARM_SHARE * (end_s - start_s)
    seen = [item for item in samples if warm_s <= item.at_s <= end_s]
    tenth = max(_SHORTEST_S, (end_s - warm_s) / 10)
    first = [getattr(item, figure) for item in seen if item.at_s <= warm_s + tenth]
    last = [getattr(item, figure) for item in seen if item.at_s >= end_s - tenth]
    if not first or not last:
        return None
    begin = statistics.median(first) or 1
    every = max(1, len(seen) // 300)  # pairs of all would be millions
    at_s, values = (np.array([getattr(item, key) for item in seen[::every]], float) for key in ("at_s", figure))
    one, other = np.triu_indices(len(at_s), 1)
    apart = at_s[other] > at_s[one]
    slopes = (values[other] - values[one])[apart] / (at_s[other] - at_s[one])[apart]
    line = float(np.median(slopes)) * (end_s - warm_s) if len(slopes) else 0.0
    return Growth(first=begin, last=statistics.median(last), line=line / begin)


def table(kept: Mapping[str, Sequence[Sample]], *, start_s: float, end_s: float) -> list[dict[str, Any]]:
    """A row for each process that was there all through the traffic, by name."""
    rows = []
    for name, samples in kept.items():
        grown = {key: growth(samples, key, start_s=start_s, end_s=end_s) for key in (*FIGURES, "files", "threads")}
        if any(item is None for item in grown.values()):
            continue
        row: dict[str, Any] = {"process": name}
        for key, item in grown.items():
            assert item is not None
            row[key] = {"first": item.first, "last": item.last, "growth": round(item.growth, 5)}
        rows.append(row)
    return rows
