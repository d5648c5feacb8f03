"""Lines of the journal are decisions, or are counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.records.weight_journal import JOURNAL, WeightChange, append, read_weights, weights_problem


def journal(folder: Path, *more: bytes) -> Path:
    append(folder, WeightChange(at_ns=5, weights={"eager": 90, "compiled": 10}, why="a step"))
    with (folder / JOURNAL).open("ab") as file:
        file.write(b"".join(more))
    return folder


def test_what_was_written_is_read_and_a_torn_end_is_no_damage(tmp_path: Path) -> None:
    (change,) = read_weights(journal(tmp_path, b'{"at_ns": 7, "weights": {"eag'))
    assert (change.at_ns, change.weights, weights_problem(tmp_path)) == (5, {"eager": 90, "compiled": 10}, "")
    assert read_weights(tmp_path / "none") == ()


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\n",
        b"[" * 5000 + b"\n",
        b'{"at_ns": 7}\n',
        b'{"at_ns": 1e999, "weights": {"eager": 1}}\n',
        b'{"at_ns": 9223372036854775808, "weights": {"eager": 1}}\n',
        b'{"at_ns": 7, "weights": {"eager": Infinity}}\n',
        b'{"at_ns": 7, "weights": {"eager": 1}, "shadows": {"dark": null}}\n',
    ],
)
def test_a_damaged_line_is_no_decision_and_is_reported(tmp_path: Path, line: bytes) -> None:
    assert len(read_weights(journal(tmp_path, line))) == 1
    assert weights_problem(tmp_path) == "has a line that is no decision"
    assert weights_problem(journal(tmp_path, line)) == "has 2 lines that are no decision"
