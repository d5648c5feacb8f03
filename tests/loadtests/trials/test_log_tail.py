"""Lines of a log that grows, is moved aside and is emptied."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtests.trials.log_tail import LogTail


def write(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_a_log_is_followed_from_its_end_in_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    write(path, "one\ntwo\r\n")
    tail = LogTail(path)
    assert list(tail.lines()) == []
    write(path, "three\nfo")
    assert list(tail.lines()) == ["three"]
    write(path, "ur\n\xe9\n")
    assert list(tail.lines()) == ["four", "é"]
    assert list(tail.before()) == ["one", "two"]
    tail.close()


def test_nothing_is_lost_when_a_log_is_moved_aside(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    write(path, "one\n")
    tail = LogTail(path)
    write(path, "two\n")
    path.rename(tmp_path / "a.log.1")
    write(tmp_path / "a.log.1", "three\n")
    assert list(tail.lines()) == ["two", "three"]  # the server has not begun a new one yet
    write(tmp_path / "a.log.1", "four\n")
    write(path, "five\n")
    assert list(tail.lines()) == ["four", "five"]
    write(path, "six\n")
    assert list(tail.lines()) == ["six"]


def test_a_log_that_was_emptied_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    write(path, "one\ntwo\n")
    tail = LogTail(path)
    path.write_text("new\n")
    assert list(tail.lines()) == ["new"]


def test_a_log_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        LogTail(tmp_path / "none.log")
