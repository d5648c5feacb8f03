"""A log that is followed while it is written, moved aside, and read again by somebody who was killed."""

from __future__ import annotations

from pathlib import Path

from loadtests.users.log_follower import LogFollower


def write(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def texts(follower: LogFollower) -> list[str]:
    return [line.text for line in follower.lines()]


def test_lines_come_whole_and_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    follower = LogFollower(path)
    assert texts(follower) == []
    write(path, "one\ntw")
    assert texts(follower) == ["one"]
    write(path, "o\nthree\n")
    assert [(line.log, line.offset, line.text) for line in follower.lines()] == [(0, 4, "two"), (0, 8, "three")]


def test_a_large_log_is_begun_anew_and_no_line_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "log"
    asked: list[int] = []
    follower = LogFollower(path, reopen=lambda: asked.append(1), largest=8)
    write(path, "one\n")
    assert texts(follower) == ["one"]
    assert not follower.rotate()
    write(path, "two\nthree\n")
    assert texts(follower) == ["two", "three"]
    assert follower.rotate()
    aside = tmp_path / "log.old"
    write(aside, "four\n")  # the splitter has not opened the new one yet
    assert texts(follower) == ["four"]
    write(aside, "five\n")
    write(path, "six\n")
    assert [(line.log, line.offset, line.text) for line in follower.lines()] == [(0, 19, "five"), (1, 0, "six")]
    assert not aside.exists()
    assert len(asked) >= 1


def test_a_log_that_was_moved_aside_by_one_that_was_killed_is_read_first(tmp_path: Path) -> None:
    write(tmp_path / "log.old", "one\n")
    write(tmp_path / "log", "two\n")
    follower = LogFollower(tmp_path / "log", log=3, reopen=lambda: None)
    assert [(line.log, line.text) for line in follower.lines()] == [(3, "one"), (4, "two")]
