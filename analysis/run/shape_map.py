"""How many requests of each arm began in which shape, on axes that all arms share and that a page has room for.

A shape is that of the step in which a request's prompt was first run: rows × tokens a row, as padded where that is
recorded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from analysis.arrays import Ints
from analysis.records.plain_values import mapping
from analysis.run.run import Run
from analysis.run.spikes import RECOMPILE_KINDS

MOST_BATCHES, MOST_LENGTHS = 16, 16
Span = tuple[int, int]
"""Sizes from the first to the last."""

_STEP = re.compile(r"(?:capture )?(?:prefill|encode) batch (\d{1,9}) × length (\d{1,9})\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeCell:
    """The shapes of an arm in one cell; `batch` and `length` are places on the axes.

    `new`: those of its `shapes` that requests met and the warm-up had not; None where nothing compiles or what was
    warmed is not known. `compiles`: those while serving for a shape in here.
    """

    batch: int
    length: int
    requests: int
    shapes: int
    new: int | None
    compiles: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmShapes:
    """The cells of one arm that hold anything, by batch and length; `unknown` requests have no shape."""

    arm: str
    requests: int
    unknown: int
    cells: tuple[ShapeCell, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeMap:
    """At most MOST_BATCHES × MOST_LENGTHS cells an arm, whatever the run."""

    batches: tuple[Span, ...]
    lengths: tuple[Span, ...]
    arms: tuple[ArmShapes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shapes:
    """Distinct shapes of an arm, rising: `batch`, `length` and how many `requests` began in each."""

    batch: Ints
    length: Ints
    requests: Ints
    unknown: int


def shape_map(run: Run) -> ShapeMap | None:
    """None where no request's shape is recorded."""
    seen = {arm: _shapes(run, arm) for arm in run.arms}
    compiled = {arm: list(_compiled(run, arm)) for arm in run.arms}
    if not any(shapes.requests.size for shapes in seen.values()):
        return None
    sizes = [(shapes.batch, shapes.length) for shapes in seen.values()]
    sizes += [(_column(steps, 0), _column(steps, 1)) for steps in compiled.values()]
    batches = spans(np.concatenate([batch for batch, _ in sizes]), MOST_BATCHES)
    lengths = spans(np.concatenate([length for _, length in sizes]), MOST_LENGTHS)
    return ShapeMap(
        batches=batches,
        lengths=lengths,
        arms=tuple(
            ArmShapes(
                arm=arm,
                requests=int(shapes.requests.sum()),
                unknown=shapes.unknown,
                cells=_cells(shapes, _warmed(run, arm), compiled[arm], batches, lengths),
            )
            for arm, shapes in seen.items()
            if shapes.requests.size
        ),
    )


def spans(sizes: Ints, most: int) -> tuple[Span, ...]:
    """At most `most` spans that hold all of `sizes` (1 or more each), rising, none of them empty.

    Each size by itself where there are so few; else octaves, from above one power of two to the next; else of four,
    of sixteen.
    """
    distinct = np.unique(sizes)
    if len(distinct) <= most:
        return tuple((size, size) for size in distinct.tolist())
    octave = np.ceil(np.log2(distinct)).astype(np.int64)
    step = 1
    while len(ends := np.unique(-(-octave // step))) > most:
        step *= 2
    return tuple((2 ** (step * (end - 1)) + 1 if end else 1, 2 ** (step * end)) for end in ends.tolist())


def _shapes(run: Run, arm: str) -> _Shapes:
    """Of the requests of the arm that are judged."""
    requests = run.requests
    rows = np.flatnonzero(run.of_arm(arm) & run.usable)
    batch, length = (
        np.where(padded[rows] > 0, padded[rows], real[rows]).astype(np.int64)
        for padded, real in (
            (requests.padded_batch, requests.batch_size),
            (requests.padded_length, requests.prompt_tokens),
        )
    )
    known = (batch > 0) & (length > 0)
    shapes, counts = np.unique((batch << 32 | length)[known], return_counts=True)
    unknown = len(known) - int(known.sum())
    return _Shapes(batch=shapes >> 32, length=shapes & 0xFFFFFFFF, requests=counts, unknown=unknown)


def _compiled(run: Run, arm: str) -> Iterator[tuple[int, int]]:
    """The shape of each compile while serving that names a step over prompts."""
    for event in run.serving_events(arm):
        named = _STEP.match(str(event.row.get("shape") or ""))
        if named and event.kind in RECOMPILE_KINDS and min(int(named[1]), int(named[2])) > 0:
            yield int(named[1]), int(named[2])


def _warmed(run: Run, arm: str) -> set[tuple[int, int]] | None:
    """The shapes that every start warmed; None where the arm compiles nothing, or some start does not say."""
    account = run.account(arm)
    starts = [
        {(int(named[1]), int(named[2])) for item in mapping(start.get("items_ns")) if (named := _STEP.match(str(item)))}
        for start in account.startups
    ]
    return set.intersection(*starts) if account.compiles and starts and all(starts) else None


def _cells(
    shapes: _Shapes,
    warmed: set[tuple[int, int]] | None,
    compiled: Sequence[tuple[int, int]],
    batches: Sequence[Span],
    lengths: Sequence[Span],
) -> tuple[ShapeCell, ...]:
    across = len(lengths)
    places = _places(shapes.batch, batches) * across + _places(shapes.length, lengths)
    size = len(batches) * across
    requests = np.bincount(places, weights=shapes.requests, minlength=size)
    distinct = np.bincount(places, minlength=size)
    new = None
    if warmed is not None:
        met = {batch << 32 | length for batch, length in warmed}
        unseen = ~np.isin(shapes.batch << 32 | shapes.length, np.array(sorted(met), dtype=np.int64))
        new = np.bincount(places[unseen], minlength=size)
    stalled = _places(_column(compiled, 0), batches) * across + _places(_column(compiled, 1), lengths)
    compiles = np.bincount(stalled, minlength=size)
    return tuple(
        ShapeCell(
            batch=cell // across,
            length=cell % across,
            requests=int(requests[cell]),
            shapes=int(distinct[cell]),
            new=None if new is None else int(new[cell]),
            compiles=int(compiles[cell]),
        )
        for cell in np.flatnonzero((requests > 0) | (compiles > 0)).tolist()
    )


def _places(sizes: Ints, axis: Sequence[Span]) -> Ints:
    return np.searchsorted(np.array([last for _, last in axis], dtype=np.int64), sizes)


def _column(steps: Sequence[tuple[int, int]], place: int) -> Ints:
    return np.array([step[place] for step in steps], dtype=np.int64)
