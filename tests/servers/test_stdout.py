"""Words for a person, one JSON object for a program."""

from __future__ import annotations

import io
import json
import sys

import pytest

from servers import stdout


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "as_json", "lines"),
    [
        (Terminal, False, ["words"]),
        (Terminal, True, ['{"found": 1}']),
        (io.StringIO, False, ["words", '{"found": 1}']),
        (io.StringIO, True, ['{"found": 1}']),
    ],
)
def test_a_terminal_is_shown_words_and_a_program_one_object_last(
    stream: type[io.StringIO], as_json: bool, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", shown := stream())
    stdout.write("words", {"found": 1}, as_json=as_json)
    assert shown.getvalue().splitlines() == lines


def test_an_object_without_words_is_one_line_for_a_program_and_none_at_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdout", piped := io.StringIO())
    stdout.write("", {"port": 1})
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    stdout.write("", {"port": 1})
    assert (json.loads(piped.getvalue()), terminal.getvalue()) == ({"port": 1}, "")


def test_what_json_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        stdout.write("", {"ratio": float("nan")}, as_json=True)


@pytest.mark.parametrize(("terminal", "columns"), [(80, 80), (20, 60), (500, 140)])
def test_tables_are_as_wide_as_the_terminal_within_limits(
    terminal: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(terminal))
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert stdout.columns() == columns
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert stdout.columns() == stdout.PIPE_COLUMNS


def test_colours_take_no_room_on_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys, "stdout", shown := Terminal())
    row = " ".join(f"\x1b[1;31m{number:4}\x1b[0m" for number in range(11))
    stdout.write(row, {})
    assert shown.getvalue() == f"{row}\n"
