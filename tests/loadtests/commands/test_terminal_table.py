"""Tables that fit a terminal."""

from __future__ import annotations

import pytest

from loadtests.commands.terminal_table import aligned

ROWS = [
    ["arm", "gate", "run length", "if as seen", ""],
    ["compiled-bucketed", "p99 TTFT", "11 minutes", "43 minutes", "299 requests if none misses it"],
    ["eager", "errors", "9 minutes", "", ""],
]


def test_a_table_with_room_has_one_line_a_row() -> None:
    assert aligned(ROWS, left=2, columns=0) == [
        "arm                gate      run length  if as seen",
        "compiled-bucketed  p99 TTFT  11 minutes  43 minutes  299 requests if none misses it",
        "eager              errors     9 minutes",
    ]


@pytest.mark.parametrize("columns", [48, 60, 80, 100])
def test_a_table_fits_and_keeps_every_word(columns: int) -> None:
    lines = aligned(ROWS, left=2, columns=columns)
    assert max(map(len, lines)) <= columns
    shown = "".join(lines)
    for word in ("43", "p99", "TTFT", "errors", "299", "misses", "compiled-", "bucketed"):
        assert word in shown


def test_a_note_without_room_beside_its_row_stands_below_it() -> None:
    assert aligned(ROWS, left=2, columns=60)[1:3] == [
        "compiled-bucketed  p99 TTFT  11 minutes  43 minutes",
        "    299 requests if none misses it",
    ]


def test_heads_break_before_cells_do() -> None:
    rows = [["metric", "called slower", "interval holds"], ["p99 TTFT", "0 %", "100 %"]]
    assert aligned(rows, columns=26) == [
        "metric    called  interval",
        "          slower  holds",
        "p99 TTFT     0 %  100 %",
    ]
