"""Records of production requests, from a log as Envoy writes it: whole, and once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tailgate.analysis.records.documents import content_of
from tailgate.analysis.records.schemas import REQUESTS
from tailgate.analysis.records.tables import read_table
from tailgate.loadtests.users import observer as observers
from tailgate.loadtests.users.observer import Observer, UnderWay
from tailgate.servers.splitter.admin import Admin

S, MS = 1_000_000_000, 1_000_000
SINCE = 1_800_000_000 * S
PATH = "/tailgate.v1.Inference/Generate"


def begun(at_s: float, connection: int = 1, **changes: Any) -> dict[str, Any]:
    start = SINCE + int(at_s * S)
    row = {"event": "DownstreamStart", "connection": connection, "start_s": f"{start // S}.{start % S:09d}"}
    return row | {"path": PATH, "duration_ms": 0, "arm": None} | changes


def ended(at_s: float, connection: int = 1, **changes: Any) -> dict[str, Any]:
    row = {"event": "DownstreamEnd", "arm": "eager", "host": "127.0.0.1:1", "status": 0, "flags": "-"}
    row |= {"first_ns": 20 * MS, "end_ns": 100 * MS}
    row["figures"] = {"output_tokens": "5", "prompt_tokens": "9", "batch_id": "7", "recv_ns": "11"}
    return begun(at_s, connection) | row | changes


class Split:
    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "requests.log"

    def observer(self, *rows: dict[str, Any], admin: Admin | None = None, log_at: int = 0) -> Observer:
        """An observer, once the splitter has logged the rows."""
        if rows:
            self.write(*rows)
        arms = {"eager": {"127.0.0.1:1": "eager-0"}, "compiled": {"127.0.0.1:2": "compiled-0"}}
        return Observer(
            self.folder, log=self.log, log_at=log_at, admin=admin, arms=arms, timeout_s=60.0, since_ns=SINCE
        )

    def write(self, *rows: dict[str, Any]) -> None:
        write(self.log, "".join(json.dumps(row) + "\n" for row in rows))

    def rows(self, *names: str) -> list[tuple[Any, ...]]:
        table = read_table(self.folder / "requests-0.arrow", REQUESTS)[0]
        return [tuple(row[name] for name in names) for row in table.to_pylist()]

    def account(self, *names: str) -> list[Any]:
        account = content_of(self.folder / "generator-0.json")
        return [account[name] for name in names]


def write(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


@pytest.fixture
def split(tmp_path: Path) -> Split:
    return Split(tmp_path)


def test_a_request_becomes_a_record_with_what_its_server_measured(split: Split) -> None:
    failed = ended(2, host="127.0.0.1:9", status=14, flags="UF", figures={})
    observer = split.observer()
    observer.step(SINCE + S)  # the splitter has not begun its log
    split.write(begun(1), ended(1), begun(2), failed)
    observer.step(SINCE + 5 * S)
    start = SINCE + S
    times = split.rows("scheduled_ns", "sent_ns", "first_token_ns", "end_ns")
    assert times[0] == (start, start, start + 20 * MS, start + 100 * MS)
    assert times[1] == (start + S, start + S, None, start + S + 100 * MS)
    named = split.rows("arm", "replica", "status", "phase")
    assert named == [("eager", "eager-0", "OK", "measure"), ("eager", "127.0.0.1:9", "UNAVAILABLE", "measure")]
    figures = split.rows("prompt_tokens", "output_tokens", "server_recv_ns", "max_tokens")
    assert figures == [(9, 5, 11, None), (0, None, None, None)]
    assert split.account("settled_ns") == [SINCE + 3 * S]


def test_a_step_ends_however_much_is_logged_and_the_next_goes_on(split: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observers, "MOST_LINES", 3)
    numbers = range(1, 6)
    observer = split.observer(*(row for number in numbers for row in (begun(number, number), ended(number, number))))
    finished = []
    for at_s in (20, 21, 22):
        observer.step(SINCE + at_s * S)
        finished += split.account("finished")
    assert (finished, observer.is_behind) == ([1, 3, 4], True)
    assert split.account("settled_ns") == [SINCE - 2 * S], "what is not read has not ended"
    observer.end(SINCE + 22 * S)
    observer.step(SINCE + 23 * S)
    assert (split.account("finished", "settled_ns"), observer.is_behind) == ([5, SINCE + 21 * S], False)
    assert not observer.settled(SINCE + 60 * S), "the last lines may be logged still"
    split.write(begun(6, 6), ended(6, 6), begun(7, 7), ended(7, 7))
    observer.step(SINCE + 24 * S)
    observer.close(SINCE + 25 * S)
    assert split.rows("scheduled_ns") == [(SINCE + number * S,) for number in range(1, 8)]


def test_after_the_end_what_came_before_is_waited_for_and_nothing_else_is_written_down(split: Split) -> None:
    observer = split.observer(begun(1, arm="compiled"), begun(2, arm="compiled"), ended(1))
    observer.step(SINCE + 5 * S)
    assert not observer.settled(SINCE + 50 * S), "the end was not requested"
    observer.end(SINCE + 5 * S)
    split.write(begun(5), ended(5))
    observer.step(SINCE + 50 * S)
    assert not observer.settled(SINCE + 50 * S)
    assert split.account("unfinished") == [{"eager": 0, "compiled": 0}], "it has not lasted for too long"
    split.write(ended(2, arm="compiled", host="127.0.0.1:2", end_ns=40 * S))
    observer.step(SINCE + 51 * S)
    assert observer.settled(SINCE + 51 * S)
    observer.close(SINCE + 51 * S)
    assert split.rows("end_ns") == [(SINCE + S + 100 * MS,), (SINCE + 42 * S,)]


def test_what_the_splitter_counts_goes_on_over_its_restart(split: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([(10, 100.0), (14, 101.0), (3, 200.0), (4, 203.0)])
    monkeypatch.setattr(observers, "ended_requests", lambda _: next(counts))
    observer = split.observer(begun(1), begun(2), admin=Admin("127.0.0.1:1"))
    # The two that were under way in the first splitter are lost, and not waited for.
    for at_s, count, lost, settled_s in ((3, 0, 0, 1), (4, 4, 0, 1), (5, 7, 2, 3), (6, 8, 2, 4)):
        observer.step(SINCE + at_s * S)
        assert split.account("unplaced", "settled_ns") == [lost, SINCE + settled_s * S]
        assert split.account("splitter")[0]["count"] == count


def test_pinned_foreign_and_earlier_requests_are_counted_and_not_compared(split: Split) -> None:
    foreign = ended(3, path="/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
    rows = (ended(-1), ended(1, pinned="eager"), ended(2, arm=None), foreign, ended(5))
    split.observer(*rows).step(SINCE + 9 * S)
    assert split.account("finished", "pinned", "others", "passed") == [1, 1, 2, 4]
    assert split.rows("scheduled_ns") == [(SINCE + 5 * S,)]


def test_only_what_is_logged_from_the_given_byte_on_is_read_also_once_the_log_is_moved(split: Split) -> None:
    split.write(begun(1), ended(1))
    observer = split.observer(begun(2), ended(2), log_at=split.log.stat().st_size)
    observer.step(SINCE + 5 * S)
    split.log.rename(split.folder / "requests.log.1")
    split.write(begun(3), ended(3))
    observer.step(SINCE + 6 * S)
    assert split.rows("request_id", "scheduled_ns") == [("user-1", SINCE + 2 * S), ("user-2", SINCE + 3 * S)]


def under_way(*begun: tuple[int, int, str]) -> UnderWay:
    requests = UnderWay(longest_ns=60 * S)
    for one in begun:
        requests.begun(*one)
    return requests


def test_what_is_settled_waits_for_the_oldest_request_that_is_under_way_and_not_for_ever() -> None:
    requests = under_way((50 * S, 1, "eager"), (70 * S, 1, "eager"))
    for ended_s, connection, now_s, settled_s in (
        (None, 1, 100, 50),
        (50, 1, 100, 70),
        (70, 2, 100, 70),  # of another connection
        (None, 1, 131, 129),  # it has lasted for too long, and lines may be late
        (70, 1, 100, 98),
    ):
        if ended_s is not None:
            requests.ended(ended_s * S, connection, "eager")
        assert requests.settled_ns(now_s * S) == settled_s * S
    assert requests.lost() == 0


def test_two_of_the_same_instant_and_connection_both_count() -> None:
    requests = under_way((50 * S, 1, "eager"), (50 * S, 1, "compiled"))
    requests.ended(50 * S, 1, "eager")
    assert (requests.at("eager"), requests.at("compiled")) == (0, 1)
    assert [requests.at("compiled", until_ns=at_s * S) for at_s in (50, 51)] == [0, 1]
    assert (requests.lost(), requests.lost()) == (1, 0)
