"""What the reports say of the shapes in which requests began: a heat map an arm, which is a table of counts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from analysis.report import reading
from analysis.report.values import Row, at, count, is_number, rows, text
from analysis.wording import counted

SHADES = 7  # of a cell, from 1; one that no request began in has none


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """`marks` says what is to be seen in the cell beside its count: "new", "compiled", both or nothing."""

    requests: str
    shade: int
    marks: tuple[str, ...]
    said: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """The cells of one arm, a line for each span of rows; None where nothing began and nothing compiled."""

    arm: str
    about: str
    lengths: tuple[str, ...]
    lines: tuple[tuple[str, tuple[Cell | None, ...]], ...]


def heat_maps(summary: Row) -> list[HeatMap]:
    """One for each arm with recorded shapes, the control first, all on the same axes and scale; at most as many cells
    as the summary has."""
    batches, lengths = (_names(at(summary, "shapes", axis)) for axis in ("batches", "lengths"))
    known = {text(row.get("arm")): row for row in rows(summary, "shapes", "arms")}
    most = max((cell["requests"] for row in known.values() for cell in _cells(row)), default=0)
    maps = []
    for arm in reading.arm_names(summary):
        cells = {(cell["batch"], cell["length"]): cell for cell in _cells(known.get(arm, {}))}
        if not cells:
            continue
        lines = tuple(
            (name, tuple(_cell(cells.get((i, j)), name, length, most) for j, length in enumerate(lengths)))
            for i, name in enumerate(batches)
        )
        maps.append(HeatMap(arm=arm, about=_about(known[arm]), lengths=tuple(lengths), lines=lines))
    return maps


def _names(axis: object) -> list[str]:
    """Spans as "64" or "65–128"."""
    spans = axis if isinstance(axis, list) else []
    return [count(span[0]) if span[0] == span[-1] else f"{count(span[0])}–{count(span[-1])}" for span in spans if span]


def _cells(row: Row) -> list[Row]:
    keys = ("batch", "length", "requests", "compiles")
    return [cell for cell in rows(row, "cells") if all(is_number(cell.get(key)) for key in keys)]


def _cell(cell: Row | None, batch: str, length: str, most: float) -> Cell | None:
    if cell is None:
        return None
    new, compiles = cell.get("new") or 0, cell["compiles"]
    parts = [
        f"batch {batch}, length {length}: {counted(cell['requests'], 'request', count)} in "
        f"{counted(cell.get('shapes'), 'shape', count)}"
    ]
    parts += [f"{count(new)} first seen while serving"] if new else []
    parts += [f"{counted(compiles, 'compile', count)} while serving"] if compiles else []
    return Cell(
        requests=_short(cell["requests"]) if cell["requests"] else "",
        shade=_shade(cell["requests"], most),
        marks=(*(("new",) if new else ()), *(("compiled",) if compiles else ())),
        said=", ".join(parts),
    )


def _shade(requests: float, most: float) -> int:
    """Rises with the logarithm of the count, from 1 to SHADES for the most of any cell; 0 for none."""
    if requests < 1:
        return 0
    return 1 + round((SHADES - 1) * math.log(requests) / math.log(most)) if most > 1 else SHADES


def _short(requests: float) -> str:
    """A count that fits a narrow cell: 950, 12k, 3.4M."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if requests >= size:
            return f"{requests / size:.2g}{unit}" if requests < 99.5 * size else f"{requests / size:.0f}{unit}"
    return f"{requests:.0f}"


def _about(row: Row) -> str:
    """How many shapes there were, and what of them is marked, in a sentence."""
    cells = _cells(row)
    said = [
        f"{counted(sum(cell.get('shapes') or 0 for cell in cells), 'shape', count)} of "
        f"{counted(row.get('requests'), 'request', count)}"
    ]
    if any(is_number(cell.get("new")) for cell in cells):
        said.append(f"{count(sum(cell.get('new') or 0 for cell in cells))} of them first seen while serving")
    if compiles := sum(cell["compiles"] for cell in cells):
        said.append(f"{counted(compiles, 'compile', count)} while serving")
    if row.get("unknown"):
        said.append(f"{counted(row['unknown'], 'request', count)} without a recorded shape")
    return ", ".join(said)
