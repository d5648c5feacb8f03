"""One line of the table that says how well the statistics keep their promises on made-up servers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from typing import TypeVar

T = TypeVar("T")
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was measured over `runs` seeded runs, beside what it must reach (neither: shown for comparison)."""

    check: str
    measured: float
    runs: int
    most: float | None = None
    least: float | None = None

    @property
    def ok(self) -> bool | None:
        """Whether the row reaches what it must; None where it must reach nothing."""
        if self.most is None and self.least is None:
            return None
        return not (self.most is not None and self.measured > self.most) and not (
            self.least is not None and self.measured < self.least
        )

    @property
    def goal(self) -> str:
        """What it must reach, for a reader."""
        return "" if self.ok is None else f"≤ {self.most:g}" if self.most is not None else f"≥ {self.least:g}"


def line(row: Row) -> str:
    """The row as a line of the printed table."""
    mark = {None: "", True: "ok", False: "MISSED"}[row.ok]
    return f"{row.check:<84} {row.measured:>7.4f} {row.goal:>8} {mark:<6} {row.runs} runs"


def over_seeds(measure: Callable[[int], T], seeds: Sequence[int], *, processes: int = 1) -> list[T]:
    """What `measure` gives for each seed, in order; in `processes` side by side it must be named at the top level."""
    if processes <= 1:
        return [measure(seed) for seed in seeds]
    with get_context("fork").Pool(processes) as pool:
        return pool.map(measure, seeds, chunksize=4)


def told(rows: Iterable[Row], tell: Tell) -> list[Row]:
    """The rows, each told as a line."""
    found = list(rows)
    for row in found:
        tell(line(row))
    return found
