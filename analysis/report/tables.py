"""Tables ready to print: all cells are text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


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
