"""A log that was read keeps its number, whenever the process that read it was killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtests.users.log_follower import LogFollower


def texts(follower: LogFollower) -> list[tuple[int, str]]:
    return [(line.log, line.text) for line in follower.lines()]


@pytest.mark.parametrize("killed", ["before the mark", "with the mark", "after it was emptied"])
def test_a_process_that_goes_on_knows_which_log_it_reads(tmp_path: Path, killed: str) -> None:
    """The records hold nothing of log 1 yet, so that they name log 0."""
    log, aside, mark = (tmp_path / name for name in ("log", "log.old", "log.read-0"))
    log.write_text("new\n")
    if killed == "before the mark":
        aside.write_text("old\n")
    else:
        mark.write_text("old\n" if killed == "with the mark" else "")
    follower = LogFollower(log, log=0, reopen=lambda: None)
    expected = [(0, "old"), (1, "new")] if killed == "before the mark" else [(1, "new")]
    assert texts(follower) == expected
    assert follower.log == 1


def test_one_mark_is_kept_and_it_is_empty(tmp_path: Path) -> None:
    log = tmp_path / "log"
    follower = LogFollower(log, reopen=lambda: log.write_text(""), largest=1)
    for number in range(3):
        with log.open("a") as file:
            file.write(f"{number}\n")
        assert (number, str(number)) in texts(follower)
        assert follower.rotate()
        assert texts(follower) == []
    assert follower.log == 3
    (mark,) = tmp_path.glob("log.read-*")
    assert (mark.name, mark.stat().st_size) == ("log.read-2", 0)
