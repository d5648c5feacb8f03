"""Tables ready to print: all cells are text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.report.values import DASH

Shown = tuple[str, str, Callable[[object], str], Callable[[Any], object]]
"""A figure: its group, its name, how its value reads, and what takes the value from a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One row of a side-by-side table: the same figure of every arm."""

    name: str
    values: tuple[str, ...]
    group: str

    @property
    def known(self) -> bool:
        """Whether any arm has a value."""
        return any(value != DASH for value in self.values)


def figures_of(arms: Sequence[object], shown: Iterable[Shown]) -> list[Figure]:
    """A row for each figure, with a value for each of `arms`."""
    return [
        Figure(group=group, name=name, values=tuple(show(value(arm)) for arm in arms))
        for group, name, show, value in shown
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of cells, by the head of their column.

    `kinds`: what a column holds: "arm" (an arm's name), "words", "reason" (sentences) or "code"; all others hold
    figures.
    """

    rows: Sequence[Mapping[str, str]]
    kinds: Mapping[str, str]

    @property
    def heads(self) -> tuple[str, ...]:
        return tuple(self.rows[0]) if self.rows else ()

    def kind(self, head: str) -> str:
        return self.kinds.get(head, "figure")
