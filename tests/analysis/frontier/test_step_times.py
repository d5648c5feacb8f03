"""Engine steps by batch and length, and where compiled ones stop being shorter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.frontier.step_times import FEWEST, StepCell, octave, span, step_cells, turning_points
from analysis.records.run_records import read_run
from analysis.records.schemas import STEPS
from analysis.records.tables import RecordWriter
from analysis.report.frontier import step_times, step_turns
from analysis.run.run import Run
from analysis.summary.summary import analyze
from tests.analysis.judging.test_load_steps import START, write_search

SECOND, MS = 1_000_000_000, 1_000_000
# (kind, batch, tokens, ms of eager, ms of new)
STEP_MS = [
    ("prefill", 1, 30, 4.0, 6.0),
    ("prefill", 2, 200, 9.0, 5.0),
    ("decode", 1, 1, 3.0, 1.0),
    ("decode", 6, 6, 3.5, 2.0),
]


def write_steps(folder: Path, count: int = FEWEST) -> Path:
    write_search(folder, {"eager": 17.0, "new": 33.0}, [[8, 16, 32], [8, 16, 32]])
    with RecordWriter(folder / "trial-01" / "steps.arrow", STEPS) as writer:
        for number in range(count):
            for kind, batch, tokens, *each in STEP_MS:
                for arm, ms in zip(("eager", "new"), each, strict=True):
                    start = START + 1001 * SECOND + number * SECOND
                    writer.append(
                        {
                            **{"trial": 1, "arm": arm, "replica": f"{arm}-0", "step_id": number, "kind": kind},
                            **{"start_ns": start, "end_ns": start + int(ms * MS), "batch": batch, "tokens": tokens},
                            **{"padded_batch": 8, "padded_tokens": 8 * tokens, "compiled": arm == "new"},
                        }
                    )
    return folder


def test_a_cell_holds_the_median_of_each_arm(tmp_path: Path) -> None:
    cells = step_cells(Run.of(read_run(write_steps(tmp_path / "run"))))
    assert [(cell.kind, cell.batch, cell.length) for cell in cells] == [
        ("prefill", (1, 1), (17, 32)),
        ("prefill", (2, 2), (65, 128)),
        ("decode", (1, 1), (1, 1)),
        ("decode", (5, 8), (1, 1)),
    ]
    for cell, (_, _, _, eager, new) in zip(cells, STEP_MS, strict=True):
        assert cell.ms == {"eager": pytest.approx(eager), "new": pytest.approx(new)}
        assert cell.ratio("new", "eager") == pytest.approx(new / eager)


def test_too_few_steps_show_nothing(tmp_path: Path) -> None:
    assert step_cells(Run.of(read_run(write_steps(tmp_path / "run", FEWEST - 1)))) == []


def test_the_report_says_where_the_gain_turns(tmp_path: Path) -> None:
    summary = analyze(write_steps(tmp_path / "run"))
    assert step_turns(summary) == [
        "The prefill steps of new are shorter than eager's at 2 × 65–128, and longer at 1 × 17–32.",
        "The decode steps of new are shorter than eager's in every cell.",
    ]
    first, *_ = step_times(summary).rows
    assert first["Step"] == "prefill"
    assert first["new"].startswith("×1.5")


def cell(batch: int, eager: float, new: float | None) -> StepCell:
    ms = {"eager": eager} | ({} if new is None else {"new": new})
    return StepCell(kind="decode", batch=(batch, batch), length=(1, 1), ms=ms, steps=dict.fromkeys(ms, 9))


def test_medians_that_are_close_count_as_neither() -> None:
    assert turning_points([cell(1, 2.0, 1.0), cell(2, 2.0, 2.05)], "new", "eager") == [
        "The decode steps of new are nowhere longer than eager's."
    ]
    assert turning_points([cell(1, 2.0, 2.5), cell(2, 2.0, 2.05)], "new", "eager") == [
        "The decode steps of new are nowhere shorter than eager's."
    ]
    assert turning_points([cell(1, 2.0, None)], "new", "eager") == []


@given(st.integers(1, 1 << 20))
def test_every_size_lies_in_its_octave(size: int) -> None:
    (top,) = octave(np.array([size])).tolist()
    assert top // 2 + 1 <= size <= top
    assert span((top // 2 + 1, top)).endswith(str(top))
