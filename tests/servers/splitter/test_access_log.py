"""What the real Envoy writes of requests and of the copies that shadows got, and the reading of it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from servers.splitter.access_log import LoggedRequest, log_path, parse_line
from tests.fakes.patience import PATIENCE_S, wait_for
from tests.servers.splitter.house import Build, House


def logged(house: House, count: int) -> list[LoggedRequest]:
    """The lines of the log once there are `count`."""
    path = Path(house.config.request_log)

    def ended() -> list[LoggedRequest]:
        rows = map(parse_line, path.read_text().splitlines()) if path.exists() else ()
        return [row for row in rows if row is not None and row.ended]

    wait_for(lambda: len(ended()) >= count, otherwise=path.read_text)
    assert len(ended()) == count
    return ended()


def test_a_request_that_is_under_way_has_a_line_and_its_end_the_same_start(build: Build, tmp_path: Path) -> None:
    house = build({"eager": 1}, request_log=str(tmp_path / "requests.log"))
    house.hold(1)
    path = tmp_path / "requests.log"
    wait_for(lambda: path.exists() and path.read_text().count("\n") == 1)
    begun = parse_line(path.read_text())
    assert begun is not None
    assert (begun.ended, begun.inference) == (False, True)
    house.release()
    (whole,) = logged(house, 1)
    assert (whole.start_ns, whole.connection) == (begun.start_ns, begun.connection)


def test_the_log_of_a_split_is_found_by_its_admin_address(build: Build, tmp_path: Path) -> None:
    house = build({"eager": 1, "compiled": 1}, request_log=str(tmp_path / "requests.log"))
    assert log_path(house.envoy.admin) == str(tmp_path / "requests.log")
    assert log_path(build({"eager": 1}).envoy.admin) == ""


def mirrored(build: Build, tmp_path: Path, **settings: object) -> House:
    shadow: dict[str, object] = {"weights": {"eager": 1, "dark": 0}, "shadows": {"dark": 100}, **settings}
    return build({"eager": 1, "dark": 1}, request_log=str(tmp_path / "requests.jsonl"), **shadow)


def test_a_copy_has_a_line_like_the_request_that_it_copies(build: Build, tmp_path: Path) -> None:
    house = mirrored(build, tmp_path)
    before = time.time_ns()
    house.ask({"tokens": 3, "session": "s1", "request_id": "1-7"})
    rows = {row.arm: row for row in logged(house, 2)}
    assert {arm: row.copy for arm, row in rows.items()} == {"eager": False, "dark": True}
    for arm, row in rows.items():
        assert (row.request_id, row.session_id, row.pinned) == ("1-7", "s1", False)
        assert (row.status, row.error, row.replica) == ("OK", "", f"{arm}-0")
        assert row.path == "/tailgate.v1.Inference/Generate"
        assert row.figures == {"queue_ns": 1234567890123}
        assert row.first_ns is not None
        assert 0 < row.first_ns <= row.end_ns
        assert before - 1_000_000 <= row.start_ns <= time.time_ns()


def test_the_first_byte_of_an_answer_is_its_first_token(build: Build, tmp_path: Path) -> None:
    house = mirrored(build, tmp_path)
    began = time.monotonic()
    held = house.hold(1, prompt="mute")
    house.release()
    held.result(PATIENCE_S)
    waited_ns = (time.monotonic() - began) * 1e9
    for row in logged(house, 2):
        assert row.first_ns is not None
        assert 0 < row.first_ns <= row.end_ns <= waited_ns


def test_a_status_is_read_from_headers_and_trailers_with_its_message(build: Build, tmp_path: Path) -> None:
    house = mirrored(build, tmp_path)
    house.ask({"prompt": "RESOURCE_EXHAUSTED"}, {"prompt": "late INTERNAL", "tokens": 2})
    rows = logged(house, 4)
    assert sorted((row.arm, row.status) for row in rows) == [
        (arm, status) for arm in ("dark", "eager") for status in ("INTERNAL", "RESOURCE_EXHAUSTED")
    ]
    assert {row.error for row in rows} == {"the engine failed"}


def test_a_copy_of_a_dead_shadow_is_unavailable_and_the_user_notices_nothing(build: Build, tmp_path: Path) -> None:
    house = mirrored(build, tmp_path, wired=True)
    held = house.hold(1)
    wait_for(lambda: house.replicas["dark"][0].active == 1)
    wire = house.replicas["dark"][0].wire
    assert wire is not None
    house.loop.run(wire.cut())
    copy = logged(house, 1)[0]
    assert (copy.arm, copy.copy, copy.status) == ("dark", True, "UNAVAILABLE")
    house.release()
    assert [answer.tokens for answer in held.result(PATIENCE_S)] == [3]
    assert [row.status for row in logged(house, 2) if not row.copy] == ["OK"]


def test_a_copy_outlives_the_request_that_it_copies(build: Build, tmp_path: Path) -> None:
    house = mirrored(build, tmp_path)
    held = house.hold(1)
    wait_for(lambda: house.replicas["dark"][0].active == 1)
    house.loop.loop.call_soon_threadsafe(house.replicas["eager"][0].release.set)
    assert [answer.tokens for answer in held.result(PATIENCE_S)] == [3]
    assert logged(house, 1)[0].arm == "eager"
    assert house.replicas["dark"][0].active == 1
    house.release()
    assert logged(house, 2)[1].status == "OK"


def test_torn_lines_are_none() -> None:
    assert [parse_line(line) for line in ("", "{", "[]", "null", '{"arm":"a"}', '{"start_s":"x.y"}')] == [None] * 6


ENDED = {
    "event": "DownstreamEnd",
    "connection": 4,
    "arm": "eager",
    "copy": "0",
    "start_s": "1800000000.5",
    "duration_ms": 7,
    "status": 0,
}


def test_what_is_beyond_a_column_is_no_figure() -> None:
    whole = parse_line(json.dumps({**ENDED, "figures": {"queue_ns": "9" * 30, "batch_id": "1" * 5000, "recv_ns": "5"}}))
    assert whole is not None
    assert (whole.end_ns, whole.figures) == (7_000_000, {"recv_ns": 5})


def test_a_clock_of_today_is_a_figure() -> None:
    whole = parse_line(json.dumps({**ENDED, "figures": {"recv_ns": "1795658587999068231", "end_ns": str(2**63)}}))
    assert whole is not None
    assert whole.figures == {"recv_ns": 1795658587999068231}


def test_half_a_character_is_none() -> None:
    whole = parse_line(json.dumps({**ENDED, "session": "a\ud800", "status": 13, "message": "\udc00b"}))
    assert whole is not None
    assert (whole.session_id, whole.error) == ("a?", "?b")


@pytest.mark.parametrize(
    "line",
    [
        "[" * 50_000,
        json.dumps({**ENDED, "end_ns": float("inf")}),
        json.dumps({**ENDED, "duration_ms": 10**30}),
        json.dumps({**ENDED, "start_s": "1" + "0" * 30}),
        json.dumps({**ENDED, "start_s": "-5"}),
    ],
)
def test_a_line_with_times_of_no_clock_is_none(line: str) -> None:
    assert parse_line(line) is None
