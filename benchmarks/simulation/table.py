"""The table that says how well the statistics keep their promises on made-up servers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from typing import TypeVar

import numpy as np

from tailgate.analysis.arrays import Floats

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was measured over `runs` seeded runs, and its goal (neither: shown for comparison)."""

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

    def __str__(self) -> str:
        """Return the row as a line of the printed table."""
        mark = {None: "", True: "ok", False: "MISSED"}[self.ok]
        return f"{self.check:<84} {self.measured:>7.4f} {self.goal:>8} {mark:<6} {self.runs} runs"


class Table:
    """Rows over `seeds` runs each, in up to `processes` side by side; `show` is given each as it is known."""

    def __init__(self, seeds: int, *, processes: int = 1, show: Callable[[str], None] = print) -> None:
        self.rows: list[Row] = []
        self.seeds, self.processes, self._show = seeds, processes, show

    def add(
        self, check: str, measured: float, *, runs: int = 0, most: float | None = None, least: float | None = None
    ) -> None:
        """Add a row; of `seeds` runs if `runs` is 0."""
        row = Row(check=check, measured=measured, runs=runs or self.seeds, most=most, least=least)
        self.rows.append(row)
        self._show(str(row))

    def over_seeds(self, measure: Callable[[int], T]) -> list[T]:
        """Call `measure` for each seed, in order; for several processes it must be named at the top level."""
        seeds = range(self.seeds)
        if self.processes <= 1:
            return [measure(seed) for seed in seeds]
        with get_context("fork").Pool(self.processes) as pool:
            return pool.map(measure, seeds, chunksize=4)

    def means(self, measure: Callable[[int], Floats]) -> Floats:
        """Return the mean over the seeds of each figure that `measure` gives."""
        return np.asarray(np.mean(np.array(self.over_seeds(measure), dtype=np.float64), axis=0))
