"""Records of users' requests, from a log as Envoy writes it: whole, once, and gone on with after a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analysis.records.documents import read_document
from analysis.records.schemas import REQUESTS
from analysis.records.tables import read_table
from loadtests.users.log_follower import LogFollower
from loadtests.users.observed import Observed
from loadtests.users.observer import Observer
from loadtests.users.under_way import UnderWay

S, MS = 1_000_000_000, 1_000_000
SINCE = 1_800_000_000 * S
PATH = "/tailgate.v1.Inference/Generate"


def begun(at_s: float, connection: int = 1, **changes: Any) -> dict[str, Any]:
    start = SINCE + int(at_s * S)
    row = {
        "event": "DownstreamStart",
        "connection": connection,
        "start_s": f"{start // S}.{start % S:09d}",
        "path": PATH,
        "duration_ms": 0,
        "copy": "0",
        "arm": None,
    }
    return row | changes


def ended(at_s: float, connection: int = 1, **changes: Any) -> dict[str, Any]:
    row = begun(at_s, connection) | {
        "event": "DownstreamEnd",
        "arm": "eager",
        "host": "127.0.0.1:1",
        "first_ns": 20 * MS,
        "end_ns": 100 * MS,
        "status": 0,
        "flags": "-",
        "figures": {"output_tokens": "5", "prompt_tokens": "9", "queue_ns": "7", "recv_ns": "11"},
    }
    return row | changes


class House:
    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "requests.log"
        self.observed = Observed(
            log=str(self.log),
            admin="",
            arms={"eager": {"127.0.0.1:1": "eager-0"}, "compiled": {"127.0.0.1:2": "compiled-0"}},
            timeout_s=60.0,
            since_ns=SINCE,
        )

    def write(self, *rows: dict[str, Any]) -> None:
        with self.log.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    def observer(self) -> Observer:
        return Observer(self.folder, self.observed)

    def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = read_table(self.folder / "requests-0.arrow", REQUESTS)[0].to_pylist()
        return rows

    def account(self) -> dict[str, Any]:
        document = read_document(self.folder / "generator-0.json")
        assert document is not None
        assert document.content is not None
        return document.content


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


def test_a_request_becomes_a_record_with_what_its_server_measured(house: House) -> None:
    house.write(begun(1), ended(1))
    house.observer().step(SINCE + 5 * S)
    (row,) = house.rows()
    start = SINCE + S
    assert (row["scheduled_ns"], row["sent_ns"], row["first_token_ns"], row["end_ns"]) == (
        start,
        start,
        start + 20 * MS,
        start + 100 * MS,
    )
    assert (row["arm"], row["replica"], row["status"], row["phase"]) == ("eager", "eager-0", "OK", "measure")
    assert (row["prompt_tokens"], row["output_tokens"], row["queue_ns"], row["server_recv_ns"]) == (9, 5, 7, 11)
    assert row["max_tokens"] is None
    assert house.account()["settled_ns"] == SINCE + 3 * S


def test_after_the_end_what_came_before_is_waited_for_and_nothing_else_is_written_down(house: House) -> None:
    house.write(begun(1, arm="compiled"), begun(2, arm="compiled"), ended(1))
    observer = house.observer()
    observer.step(SINCE + 5 * S)
    assert not observer.settled(SINCE + 50 * S), "nobody asked for the end"
    observer.end(SINCE + 5 * S)
    house.write(begun(6), ended(6))
    observer.step(SINCE + 50 * S)
    assert not observer.settled(SINCE + 50 * S)
    house.write(ended(2, arm="compiled", host="127.0.0.1:2", end_ns=40 * S))
    observer.step(SINCE + 51 * S)
    assert observer.settled(SINCE + 51 * S)
    observer.close(SINCE + 51 * S)
    assert [row["end_ns"] - SINCE for row in house.rows()] == [S + 100 * MS, 42 * S]
    assert house.account()["unfinished"] == {"eager": 0, "compiled": 0}


def test_pinned_foreign_and_earlier_requests_are_counted_and_not_compared(house: House) -> None:
    house.write(
        ended(-1),
        ended(1, pinned="eager"),
        ended(2, arm=None),
        ended(3, path="/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"),
        ended(4, copy="1"),
        ended(5),
    )
    house.observer().step(SINCE + 9 * S)
    account = house.account()
    assert [account[key] for key in ("finished", "pinned", "others", "passed")] == [1, 1, 2, 3]
    assert len(house.rows()) == 1


def test_one_that_was_killed_goes_on_and_writes_nothing_twice(house: House) -> None:
    house.write(begun(1), ended(1), begun(2))
    house.observer().step(SINCE + 4 * S)  # and is killed
    house.write(ended(2, status=14, flags="UF"), begun(3), ended(3, arm="compiled", host="127.0.0.1:2"))
    observer = house.observer()
    observer.step(SINCE + 8 * S)
    observer.close(SINCE + 9 * S)
    assert [(row["arm"], row["status"]) for row in house.rows()] == [
        ("eager", "OK"),
        ("eager", "UNAVAILABLE"),
        ("compiled", "OK"),
    ]
    account = house.account()
    assert (account["finished"], account["failed"], account["complete"]) == (3, 1, True)


def test_an_account_that_nothing_vouches_for_is_not_gone_on_from(house: House) -> None:
    house.write(begun(1), ended(1))
    house.observer().step(SINCE + 5 * S)
    account = house.account() | {"splitter": 5, "log": 7}
    (house.folder / "generator-0.json").write_text(json.dumps(account))
    house.observer().step(SINCE + 5 * S)
    assert len(house.rows()) == 1
    assert house.account()["finished"] == 1


def write(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def texts(follower: LogFollower) -> list[str]:
    return [line.text for line in follower.lines()]


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


SECOND_NS = 1_000_000_000


def test_what_is_settled_waits_for_the_oldest_request_that_is_under_way() -> None:
    under_way = UnderWay(longest_ns=60 * SECOND_NS)
    assert under_way.settled_ns(100 * SECOND_NS) == 98 * SECOND_NS, "lines may be late"
    under_way.begun(50 * SECOND_NS, 1, "eager")
    under_way.begun(70 * SECOND_NS, 1, "eager")
    assert under_way.settled_ns(100 * SECOND_NS) == 50 * SECOND_NS
    under_way.ended(50 * SECOND_NS, 1, "eager")
    assert under_way.settled_ns(100 * SECOND_NS) == 70 * SECOND_NS
    under_way.ended(70 * SECOND_NS, 2, "eager")
    assert len(under_way) == 1, "of another connection"
    under_way.ended(70 * SECOND_NS, 1, "eager")
    assert under_way.settled_ns(100 * SECOND_NS) == 98 * SECOND_NS


def test_a_request_that_takes_too_long_is_not_waited_for() -> None:
    under_way = UnderWay(longest_ns=60 * SECOND_NS, known=[[30 * SECOND_NS, 1, ""]])
    assert under_way.settled_ns(80 * SECOND_NS) == 30 * SECOND_NS
    assert under_way.settled_ns(95 * SECOND_NS) == 93 * SECOND_NS


def test_two_of_the_same_instant_and_connection_both_count() -> None:
    under_way = UnderWay(longest_ns=60 * SECOND_NS)
    for _ in range(2):
        under_way.begun(50 * SECOND_NS, 1, "eager")
    under_way.ended(50 * SECOND_NS, 1, "eager")
    assert under_way.starts() == [[50 * SECOND_NS, 1, "eager"]]
    assert under_way.lost() == 1
    assert len(under_way) == 0


def numbered_lines(follower: LogFollower) -> list[tuple[int, str]]:
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
    assert numbered_lines(follower) == expected
    assert follower.log == 1


def test_one_mark_is_kept_and_it_is_empty(tmp_path: Path) -> None:
    log = tmp_path / "log"
    follower = LogFollower(log, reopen=lambda: log.write_text(""), largest=1)
    for number in range(3):
        with log.open("a") as file:
            file.write(f"{number}\n")
        assert (number, str(number)) in numbered_lines(follower)
        assert follower.rotate()
        assert numbered_lines(follower) == []
    assert follower.log == 3
    (mark,) = tmp_path.glob("log.read-*")
    assert (mark.name, mark.stat().st_size) == ("log.read-2", 0)
