"""Tables for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import zip_longest

from servers import stdout

_GAP = 2
_LEAST_NOTE = 24  # what is longer in the last column is a note; without so much room it stands below its row


def aligned(rows: Sequence[Sequence[str]], *, left: int = 1, columns: int | None = None) -> list[str]:
    """Lines in which the columns stand two spaces apart: the first `left` and the last at their left, others right.

    Where a row is wider than `columns` (the terminal's width; a pipe has none), heads go over several lines, then what
    the last column holds, then the first `left` columns. Words are not cut.
    """
    if columns is None:
        columns = stdout.columns(piped=0)
    count = len(rows[0])
    widths = [max(len(row[column]) for row in rows) for column in range(count)]
    notes: list[str] = [""] * len(rows)
    if columns:
        for column in range(count):
            if _excess(widths, columns) > 0:
                body = max((len(row[column]) for row in rows[1:]), default=0)
                widths[column] = max(body, _longest_word(rows[0][column]))
        last = count - 1
        if (excess := _excess(widths, columns)) > 0 and widths[last] > _LEAST_NOTE:
            if widths[last] - excess < _LEAST_NOTE:
                notes = [row[last] for row in rows]
                rows = [[*row[:last], ""] for row in rows]
                widths[last] = 0
            else:
                widths[last] -= excess
        for column in reversed(range(left)):
            if (excess := _excess(widths, columns)) > 0:
                widths[column] = max(widths[column] - excess, *(_longest_word(row[column]) for row in rows))
    lines = []
    for row, note in zip(rows, notes, strict=True):
        lines += _lines(row, widths, left)
        lines += textwrap.wrap(note, columns, initial_indent="    ", subsequent_indent="    ") if note else []
    return lines


def _excess(widths: Sequence[int], columns: int) -> int:
    shown = len(widths) - (not widths[-1])
    return sum(widths) + _GAP * (shown - 1) - columns


def _longest_word(cell: str) -> int:
    return max(map(len, _wrapped(cell, 1)), default=0)


def _wrapped(cell: str, width: int) -> list[str]:
    return textwrap.wrap(cell, max(1, width), break_long_words=False) or [""]


def _lines(row: Sequence[str], widths: Sequence[int], left: int) -> list[str]:
    """The row, a line for each line of its fullest cell."""
    cells = [[cell] if len(cell) <= width else _wrapped(cell, width) for cell, width in zip(row, widths, strict=True)]
    stands_left = [column < left or column == len(widths) - 1 for column in range(len(widths))]
    return [
        (" " * _GAP)
        .join(
            part.ljust(width) if is_left else part.rjust(width)
            for part, width, is_left in zip(parts, widths, stands_left, strict=True)
        )
        .rstrip()
        for parts in zip_longest(*cells, fillvalue="")
    ]
