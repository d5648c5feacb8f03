"""The map of shapes: bounded, nothing lost, and what the warm-up had not met is marked."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from analysis.records.run_records import read_run
from analysis.run.run import Run
from analysis.run.shape_map import ArmShapes, ShapeMap, shape_map, spans
from tests.fakes.runs import Compile, FakeArm, FakeRun, Startup, write_run

EAGER = FakeArm(name="eager", enabled=False)
WARMED = Startup(warmed={"prefill batch 1 × length 64, context 64": 2.0, "decode batch 1 × length 1, context 64": 1.0})
COMPILED = FakeArm(
    name="compiled",
    startup=WARMED,
    compiles=(Compile(at_s=20.0, seconds=1.0, shape="prefill batch 2 × length 128, context 128"),),
)
RUN = FakeRun(arms=(EAGER, COMPILED), duration_s=60.0, rate=5.0)
EVERY = 300  # requests an arm


def run_of(folder: Path, fake: FakeRun = RUN) -> Run:
    return Run.of(read_run(write_run(folder / "run", fake)))


def with_shapes(run: Run, batch: np.ndarray, length: np.ndarray) -> Run:
    return replace(run, requests=replace(run.requests, padded_batch=batch, padded_length=length))


def mapped(run: Run) -> ShapeMap:
    found = shape_map(run)
    assert found is not None
    return found


def of(found: ShapeMap, arm: str) -> ArmShapes:
    return next(row for row in found.arms if row.arm == arm)


@given(st.lists(st.integers(1, 2**31 - 1), min_size=1, max_size=200), st.integers(4, 20))
def test_spans_are_few_apart_and_hold_every_size(sizes: list[int], most: int) -> None:
    found = spans(np.array(sizes, dtype=np.int64), most)
    assert 1 <= len(found) <= most
    assert all(first <= last for first, last in found)
    assert all(one[1] < other[0] for one, other in itertools.pairwise(found))
    assert all(any(first <= size <= last for first, last in found) for size in sizes)
    assert all(any(first <= size <= last for size in sizes) for first, last in found)


def test_shapes_are_as_padded_and_else_as_they_were(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    [cell] = of(mapped(run), "eager").cells
    assert (cell.requests, cell.shapes, cell.new, cell.compiles) == (EVERY, 1, None, 0)
    padded = with_shapes(run, np.full(len(run.requests), 4, np.int8), np.full(len(run.requests), 96, np.int16))
    found = mapped(padded)
    assert (found.batches, found.lengths) == (((2, 2), (4, 4)), ((96, 96), (128, 128)))


def test_what_the_warm_up_had_not_met_and_what_compiled_is_marked(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    length = np.where(np.arange(len(run.requests)) % 3 == 0, 65, 64)
    found = mapped(with_shapes(run, np.ones(len(length), np.int8), length))
    cells = {
        (found.batches[cell.batch], found.lengths[cell.length]): (cell.requests, cell.new, cell.compiles)
        for cell in of(found, "compiled").cells
    }
    assert cells == {
        ((1, 1), (64, 64)): (200, 0, 0),
        ((1, 1), (65, 65)): (100, 1, 0),
        ((2, 2), (128, 128)): (0, 0, 1),
    }
    assert {cell.new for cell in of(found, "eager").cells} == {None}


def test_no_request_is_lost_whatever_its_shape(tmp_path: Path) -> None:
    run, rng = run_of(tmp_path), np.random.default_rng(5)
    batch, length = (rng.integers(-1, 1 << bits, len(run.requests)) for bits in (6, 30))
    found = mapped(with_shapes(run, batch, length))
    assert len(found.batches) <= 16
    assert len(found.lengths) <= 16
    for row in found.arms:
        assert row.requests + row.unknown == EVERY
        assert sum(cell.requests for cell in row.cells) == row.requests
        assert len({(cell.batch, cell.length) for cell in row.cells}) == len(row.cells)


def test_a_run_without_shapes_has_no_map(tmp_path: Path) -> None:
    assert shape_map(run_of(tmp_path, replace(RUN, server_columns=False))) is None
