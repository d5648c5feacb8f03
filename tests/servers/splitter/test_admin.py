"""Weights, logs and statistics of a running Envoy, and the reading of its answers."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from tailgate.servers.metadata import STATUS_NAMES
from tailgate.servers.splitter.admin import (
    SAME_START_S,
    Admin,
    Shares,
    SplitterError,
    configured_shares,
    ended_requests,
    live_shares,
    log_path,
    replica_addresses,
    reweight,
)
from tailgate.servers.splitter.request_log import LoggedRequest, parse_line
from tests.fakes.processes import PATIENCE_S, wait_for
from tests.servers.splitter.split import Build, Split, ask, binomial_bound, build, dial, loop, shared
from tests.servers.test_config import refusal

__all__ = ["build", "loop", "shared"]


def test_reweighting_drops_no_stream_and_new_requests_follow(build: Build) -> None:
    split = build({"eager": 1, "compiled": 1})
    held = split.hold(50)
    for eager, compiled in ((1, 0), (0, 1), (9, 1), (1, 1)):
        reweight(split.envoy.admin, {"eager": eager, "compiled": compiled})
        assert live_shares(split.envoy.admin).weights == {"eager": eager, "compiled": compiled}
        counts = Counter(answer.arm for answer in split.ask(*[{}] * 200))
        share = eager / (eager + compiled)
        assert counts.total() == 200
        assert abs(counts["eager"] - 200 * share) <= binomial_bound(200, share)
    assert not held.done()
    split.release()
    assert {(answer.code, answer.tokens) for answer in held.result(PATIENCE_S)} == {(grpc.StatusCode.OK, 3)}


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ({"weights": {"eagre": 1}}, ('"eagre"', "eager, compiled-padded, idle.arm")),
        ({"weights": {"eager": -1}}, ('"eager"', "-1", "1000000")),
        ({"weights": {"eager": 0, "compiled-padded": 0}}, ("weight 0",)),
        ({"shadows": {"drak": 5.0}}, ('"drak"', "eager, compiled-padded, idle.arm")),
        ({"shadows": {"idle.arm": 250.0}}, ('"idle.arm"', "250 %", "100 %")),
        ({"shadows": {"eager": 5.0}}, ('"eager"', "5 %", "weight 3")),
    ],
)
def test_bad_shares_change_nothing(shared: Split, shares: dict[str, Any], words: tuple[str, ...]) -> None:
    refusal(reweight, shared.envoy.admin, shares.get("weights", {}), shares.get("shadows"), words=words)
    expected = Shares(weights={"eager": 3, "compiled-padded": 1, "idle.arm": 0}, shadows={})
    assert live_shares(shared.envoy.admin) == expected


def test_a_shadow_gets_its_share_as_copies_and_becomes_an_arm_in_one_step(build: Build) -> None:
    split = build({"eager": 1, "dark": 1}, weights={"eager": 1, "dark": 0}, shadows={"dark": 25})
    admin = split.envoy.admin
    assert live_shares(admin) == Shares(weights={"eager": 1, "dark": 0}, shadows={"dark": 25})
    assert reweight(admin, {}, {"dark": 50}).shadows == live_shares(admin).shadows == {"dark": 50}
    (eager,), (dark,) = split.replicas.values()
    dark.fails = True  # of which no user knows
    answers = split.ask(*[{"session": "one", "tokens": 3}] * 200)
    assert {(answer.code, answer.tokens, answer.arm) for answer in answers} == {(grpc.StatusCode.OK, 3, "eager")}
    assert abs(split.copies("dark") - 100) <= binomial_bound(200, 0.5)
    added = ("x-envoy-internal", "x-forwarded-for")  # by which Envoy marks what it copies
    assert {name: value for name, value in dark.metadata[0].items() if name not in added} == eager.metadata[0]
    for by_hand, percent in (("40", 40.0), ("400", 100.0)):  # as Envoy reads it
        admin.answer("POST", f"/runtime_modify?tailgate.shadow.dark={by_hand}")
        assert live_shares(admin).shadows == {"dark": percent}
    dark.fails = False
    shares = reweight(admin, {"dark": 1, "eager": 0}, {"dark": 0, "eager": 100})
    assert shares == live_shares(admin) == Shares(weights={"eager": 0, "dark": 1}, shadows={"eager": 100})
    assert {answer.arm for answer in split.ask(*[{}] * 20)} == {"dark"}


class Answering(Admin):
    """An admin port that answers every question with one body."""

    body = ""

    def fetch(self, method: str, path: str) -> tuple[int, str]:
        return 200, self.body


QUESTIONS = (live_shares, configured_shares, replica_addresses, log_path, ended_requests)
NO_TABLE = {
    "weighted_clusters": {"clusters": [{"name": "eager", "weight": float("inf")}]},
    "cluster_statuses": [5],
    "log_format": {"json_format": 5},
    "stats": [{"name": "server.uptime"}],
}


@pytest.mark.parametrize("body", ["", "[" * 5000, "1" * 5000, json.dumps(NO_TABLE)])
@pytest.mark.parametrize("question", QUESTIONS)
def test_an_answer_of_another_server_is_one_line(question: Callable[[Admin], object], body: str) -> None:
    admin = Answering("127.0.0.1:9901")
    object.__setattr__(admin, "body", body)
    with pytest.raises(SplitterError, match=r"^127\.0\.0\.1:9901 answered no") as refusal:
        question(admin)
    assert "\n" not in str(refusal.value)


def logged(split: Split, count: int) -> list[LoggedRequest]:
    path = Path(split.config.request_log)

    def ended() -> list[LoggedRequest]:
        rows = map(parse_line, path.read_text().splitlines()) if path.exists() else ()
        return [row for row in rows if row is not None and row.ended]

    wait_for(lambda: len(ended()) >= count, otherwise=path.read_text)
    assert len(ended()) == count
    return ended()


def test_a_request_has_a_line_when_it_begins_and_another_when_it_ends(build: Build, tmp_path: Path) -> None:
    path = tmp_path / "requests.log"
    split = build({"eager": 1}, request_log=str(path))
    assert log_path(split.envoy.admin) == str(path)
    assert log_path(build({"eager": 1}).envoy.admin) == ""
    split.hold(1)
    wait_for(lambda: path.exists() and path.read_text().count("\n") == 1)
    begun = parse_line(path.read_text())
    assert begun is not None
    assert (begun.ended, begun.inference) == (False, True)
    split.release()
    (whole,) = logged(split, 1)
    assert (whole.start_ns, whole.connection) == (begun.start_ns, begun.connection)


def test_a_line_holds_times_figures_and_status_of_a_request_and_not_of_its_copy(build: Build, tmp_path: Path) -> None:
    shadow: dict[str, Any] = {"weights": {"eager": 1, "dark": 0}, "shadows": {"dark": 100}}
    split = build({"eager": 1, "dark": 1}, request_log=str(tmp_path / "requests.jsonl"), **shadow)
    before = time.time_ns()
    split.ask({"tokens": 3, "session": "s1"})
    (row,) = logged(split, 1)
    assert (row.arm, row.session_id, row.pinned) == ("eager", "s1", False)
    assert (row.status, row.error, row.replica) == ("OK", "", "eager-0")
    assert row.path == "/tailgate.v1.Inference/Generate"
    assert row.figures == {"queue_ns": 1234567890123}
    assert row.first_ns is not None
    assert 0 < row.first_ns <= row.end_ns
    assert before - 1_000_000 <= row.start_ns <= time.time_ns()
    split.ask({"prompt": "RESOURCE_EXHAUSTED"}, {"prompt": "late INTERNAL", "tokens": 2})
    failed = [row for row in logged(split, 3) if row.status != "OK"]
    assert {row.status for row in failed} == {"INTERNAL", "RESOURCE_EXHAUSTED"}
    assert {row.error for row in failed} == {"the engine failed"}


ENDED = {
    "event": "DownstreamEnd",
    "connection": 4,
    "arm": "eager",
    "start_s": "1800000000.5",
    "duration_ms": 7,
    "status": 0,
}


def line(**fields: Any) -> str:
    return json.dumps({**ENDED, **fields})


def test_figures_are_numbers_that_a_column_holds_and_texts_are_whole() -> None:
    figures = {"queue_ns": "9" * 30, "batch_id": "1" * 5000, "recv_ns": "1795658587999068231", "end_ns": str(2**63)}
    row = parse_line(line(figures=figures, session="a\ud800", status=13, message="\udc00b"))
    assert row is not None
    assert (row.end_ns, row.figures) == (7_000_000, {"recv_ns": 1795658587999068231})
    assert (row.session_id, row.error) == ("a?", "?b")
    for flags, status in (("UF", "UNAVAILABLE"), ("DC", "CANCELLED"), ("DR", "CANCELLED"), ("-", "UNKNOWN")):
        row = parse_line(line(status=None, flags=flags, details="reset"))
        assert row is not None
        assert row.status == status


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", '{"start_s":"x.y"}', "[" * 50_000),
        line(end_ns=float("inf")),
        line(duration_ms=10**30),
        line(start_s="1" + "0" * 30),
        line(start_s="-5"),
    ],
)
def test_a_torn_line_or_one_with_impossible_times_is_none(text: str) -> None:
    assert parse_line(text) is None


def test_every_request_is_counted_once_however_it_ends(build: Build) -> None:
    shadow: dict[str, Any] = {"weights": {"eager": 1, "dark": 0}, "shadows": {"dark": 100}}
    split = build({"eager": 1, "dark": 1}, **shadow)
    first, start_s = ended_requests(split.envoy.admin)
    assert first == 0

    def ended(count: int) -> None:
        wait_for(
            lambda: ended_requests(split.envoy.admin)[0] == count,
            otherwise=lambda: ended_requests(split.envoy.admin)[0],
        )

    # with a status, in headers or in trailers; an unknown pin
    prompts = [f"{late}{name}" for name in STATUS_NAMES[1:] for late in ("", "late ")]
    split.ask(*[{"prompt": prompt, "tokens": 2} for prompt in [*prompts, "fine"]], {"arm": "eagre"})
    ended(34)

    async def cancel() -> None:
        async with dial(split.envoy.target) as channel:
            calls = [asyncio.create_task(ask(channel, prompt="hold", tokens=3)) for _ in range(4)]
            while [replica.active for replica in split.all] != [4, 4]:
                await asyncio.sleep(0.005)
            for call in calls:
                call.cancel()

    split.loop.run(cancel())
    ended(38)
    wait_for(lambda: [replica.active for replica in split.all] == [0, 4])  # copies go on
    # cut as the replica dies, with no connection, and without a healthy replica
    held = split.hold(7)
    wait_for(lambda: [replica.active for replica in split.all] == [7, 11])
    for replica in split.all:
        split.loop.run(replica.stop())
    assert {answer.tokens for answer in held.result(PATIENCE_S)} == {1}
    split.ask(*[{}] * 5)
    wait_for(lambda: {healthy for healthy, _ in split.envoy.healthy().values()} == {0})
    split.ask(*[{}] * 5)
    ended(55)
    assert abs(ended_requests(split.envoy.admin)[1] - start_s) < SAME_START_S
