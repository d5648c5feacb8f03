from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pytest

from analysis.blackbox.firstseen import shapes_of
from analysis.blackbox.stalls import HOST, UNKNOWN, WORK, look
from analysis.records.requests import Requests, requests_of
from analysis.records.schemas import REQUESTS

S = 1_000_000_000
T0 = 1_700_000_000 * S


def served(
    arm: str,
    *,
    stalls: tuple[tuple[float, float], ...] = (),
    seconds: float = 120.0,
    every: float = 0.25,
    tokens: bool = True,
    long_at: float | None = None,
    replica: str | None = None,
    offset: float = 0.0,
) -> list[dict[str, Any]]:
    """Requests every quarter of a second that take 0.2 s to the first token and 0.02 s for each of 40 more.

    In a stall (start, seconds) nothing goes on. Lengths repeat, but the request at `long_at` is the first of its own.
    """

    def real(own: float) -> float:
        for start, length in stalls:
            own += length if own >= start else 0.0
        return own

    def own(real_s: float) -> float:
        for start, length in reversed(stalls):
            real_s -= min(max(real_s - start, 0.0), length)
        return real_s

    rows = []
    for index in range(int(seconds / every)):
        sent = index * every + offset
        begin = own(sent)
        times = [real(begin + 0.2 + 0.02 * token) for token in range(41)]
        length = 9000 if long_at is not None and abs(sent - long_at) < every / 2 else 100 + index % 5
        row = {"request_id": f"{arm}-{replica}-{index}", "arm": arm, "replica": replica or f"{arm}-0", "trial": 1}
        row |= {"pair_id": str(index), "scheduled_ns": at(sent), "sent_ns": at(sent), "status": "OK"}
        row |= {"first_token_ns": at(times[0]), "end_ns": at(times[-1]), "prompt_tokens": length, "output_tokens": 41}
        if tokens:
            row["token_ns"] = [at(time) - at(sent) for time in times]
        rows.append(row)
    return rows


def at(seconds: float) -> int:
    return T0 + round(seconds * 1e9)


def seen(*arms: list[dict[str, Any]]) -> tuple[Requests, Any, Any]:
    requests = requests_of(pa.Table.from_pylist([row for rows in arms for row in rows], schema=REQUESTS))
    stalls, watches = look(requests, {"new": shapes_of(requests, "new")})
    return requests, stalls["new"], watches["new"]


def test_a_stall_of_one_arm_is_seen_from_its_begin_to_its_end() -> None:
    requests, stalls, watches = seen(served("new", stalls=((60.01, 3.0),), long_at=60.0), served("old"))
    assert [stall.cause for stall in stalls] == [UNKNOWN]
    assert (stalls[0].start_ns - at(60.01)) / 1e9 == pytest.approx(0.0, abs=0.03)
    assert stalls[0].seconds == pytest.approx(3.0, abs=0.05)
    assert requests.prompt_tokens[stalls[0].trigger] == stalls[0].shape == 9000
    # four in flight and twelve that come meanwhile
    assert 14 <= stalls[0].requests.size <= 18
    assert watches[0].detectable_s < 0.5
    assert watches[0].witnesses == 1


def test_what_stops_every_server_is_the_host() -> None:
    _, stalls, _ = seen(served("new", stalls=((60.0, 2.0),)), served("old", stalls=((60.3, 1.8),)))
    assert [stall.cause for stall in stalls] == [HOST]


def test_one_server_that_goes_on_proves_that_the_host_does() -> None:
    stall = ((60.0, 2.0),)
    _, stalls, _ = seen(served("new", stalls=stall), served("old", stalls=stall), served("third"))
    assert [stall.cause for stall in stalls] == [UNKNOWN]


def test_another_replica_is_a_witness_and_is_watched_by_itself() -> None:
    _, stalls, watches = seen(
        served("new", stalls=((60.0, 2.0),), replica="new-0"), served("new", replica="new-1", offset=0.1)
    )
    assert [(stall.replica, stall.cause) for stall in stalls] == [("new-0", UNKNOWN)]
    assert len(watches) == 2


def test_a_prompt_that_takes_as_long_on_the_other_arm_is_work() -> None:
    rows = served("old")
    for row in rows:
        if row["scheduled_ns"] == at(60.0):
            row |= {"first_token_ns": at(62.9), "end_ns": at(63.5), "prompt_tokens": 9000, "token_ns": None}
    _, stalls, _ = seen(served("new", stalls=((60.01, 3.0),), long_at=60.0), rows)
    assert [stall.cause for stall in stalls] == [WORK]


def test_silence_with_nothing_in_flight_is_no_stall() -> None:
    rows = [row for row in served("new") if not at(50.0) < row["scheduled_ns"] < at(80.0)]
    assert seen(rows, served("old"))[1] == []


def test_a_server_that_never_comes_back_stalls_until_its_clients_give_up() -> None:
    rows = served("new")
    for row in rows:
        if row["scheduled_ns"] >= at(100.0):
            row |= {"status": "DEADLINE_EXCEEDED", "first_token_ns": None, "token_ns": None}
            row["end_ns"] = row["scheduled_ns"] + 30 * S
    _, stalls, _ = seen(rows, served("old"))
    assert len(stalls) == 1
    assert stalls[0].seconds > 30.0


def test_too_little_traffic_is_not_watched() -> None:
    for rows in (served("new")[:1], served("new", tokens=False)[:10]):
        _, stalls, watches = seen(rows, served("old"))
        assert stalls == []
        assert math.isnan(watches[0].detectable_s)
