from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from analysis.blackbox.firstseen import shapes_of
from analysis.blackbox.stalls import HOST, UNKNOWN, WORK, first_seen_rows, look
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


def test_a_server_that_goes_on_has_no_stall() -> None:
    assert seen(served("new"), served("old"))[1] == []


def test_a_stall_without_a_first_seen_shape_has_no_trigger() -> None:
    _, stalls, _ = seen(served("new", stalls=((60.1, 3.0),)), served("old"))
    assert [(stall.trigger, stall.shape) for stall in stalls] == [(-1, -1)]


def test_rows_are_first_seen_where_a_silence_ends_with_more_than_any_before() -> None:
    answering = np.array([0, 1, 1, 2, 1, 2, 2, 3, 4, 3])
    new, share = first_seen_rows(answering, np.array([0, 3, 6, 8]))
    assert new.tolist() == [False, True, False, True]
    # what came before, and the silence itself as one that may be
    assert share.tolist() == pytest.approx([1.0, 2 / 4, 3 / 7, 4 / 9])


def test_a_stall_at_a_row_more_than_ever_says_so() -> None:
    # Four answers at once; from 60.3 s on there are eight.
    twice = [row | {"request_id": f"x{row['request_id']}"} for row in served("new", stalls=((61.195, 3.0),))]
    rows = [*served("new", stalls=((61.195, 3.0),)), *(row for row in twice if row["sent_ns"] >= at(60.2))]
    _, (stall,), _ = seen(rows, served("old"))
    assert stall.new_rows
    assert stall.chance_rows < 0.3
    _, (stall,), _ = seen(served("new", stalls=((61.195, 3.0),)), served("old"))
    assert not stall.new_rows
    assert stall.chance_rows < 0.1


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


def test_prompts_of_that_length_that_take_as_long_elsewhere_are_work_where_there_are_no_copies() -> None:
    rows = served("old")
    for row in rows:
        row["pair_id"] = None
        if row["scheduled_ns"] == at(20.0):
            row |= {"first_token_ns": at(23.0), "end_ns": at(23.5), "prompt_tokens": 9100, "token_ns": None}
    mine = [{**row, "pair_id": None} for row in served("new", stalls=((60.01, 3.0),), long_at=60.0)]
    assert [stall.cause for stall in seen(mine, rows)[1]] == [WORK]


def test_requests_without_a_replica_wait_for_the_only_one_there_is_and_are_nobodys_where_there_are_two() -> None:
    lost = [{**row, "request_id": f"lost-{row['request_id']}", "replica": None} for row in served("new")[:3]]
    for row in lost:
        row |= {"status": "UNAVAILABLE", "first_token_ns": None, "token_ns": None}
    assert len(seen([*served("new"), *lost], served("old"))[2]) == 1
    both = [*served("new", replica="new-0"), *served("new", replica="new-1"), *lost]
    watches = seen(both, served("old"))[2]
    assert [watch.detectable_s < 0.5 for watch in watches] == [True, True]


def test_tokens_of_one_step_are_one_sign_however_many_requests_it_answers() -> None:
    def stepped(name: str, stalls: tuple[tuple[float, float], ...]) -> list[dict[str, Any]]:
        # eight copies that differ by some ns, as where one step answers a whole batch
        copies = []
        for number in range(8):
            for row in served(name, stalls=stalls):
                shifted = {key: row[key] + 3 * number for key in ("first_token_ns", "end_ns")}
                copies.append({**row, **shifted, "request_id": f"{number}-{row['request_id']}", "pair_id": None})
        return copies

    _, stalls, watches = seen(stepped("new", ((60.02, 2.0),)), stepped("old", ()))
    assert [round(stall.seconds, 1) for stall in stalls] == [2.0]
    assert watches[0].detectable_s <= 0.5


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


def test_a_server_that_compiles_for_its_first_request_stalls_from_then_on() -> None:
    _, stalls, _ = seen(served("new", stalls=((0.0, 4.0),)), served("old"))
    assert len(stalls) == 1
    assert stalls[0].start_ns == at(0.0)
    assert stalls[0].seconds == pytest.approx(4.2, abs=0.1)


def test_without_token_times_only_longer_stalls_show() -> None:
    long = seen(served("new", stalls=((60.1, 5.0),), tokens=False), served("old", tokens=False))
    assert len(long[1]) == 1
    with_tokens = seen(served("new"), served("old"))
    assert with_tokens[2][0].detectable_s < long[2][0].detectable_s


def test_a_stall_as_long_as_the_detectable_length_is_detected() -> None:
    for tokens in (True, False):
        limit = seen(served("new", tokens=tokens), served("old"))[2][0].detectable_s
        _, stalls, _ = seen(served("new", stalls=((60.02, 1.5 * limit),), tokens=tokens), served("old"))
        assert len(stalls) == 1
        assert seen(served("new", stalls=((60.0, 0.1),), tokens=tokens), served("old"))[1] == []


def test_too_little_traffic_is_not_watched() -> None:
    for rows in (served("new")[:1], served("new", tokens=False)[:10]):
        _, stalls, watches = seen(rows, served("old"))
        assert stalls == []
        assert math.isnan(watches[0].detectable_s)


def test_an_arm_whose_requests_all_failed_is_not_watched() -> None:
    rows = served("new")
    for row in rows:
        row |= {"status": "INTERNAL", "first_token_ns": None, "token_ns": None}
    _, stalls, watches = seen(rows, served("old"))
    assert stalls == []
    assert math.isnan(watches[0].detectable_s)
    assert seen(served("old"))[1] == [], "an arm without any request"


def test_broken_times_are_left_out() -> None:
    rows = served("new")
    for row in rows[10:20]:
        row["end_ns"] = row["scheduled_ns"] - S
    _, stalls, _ = seen(rows, served("old"))
    assert stalls == []


def test_stalls_do_not_depend_on_the_order_of_the_records() -> None:
    rows = served("new", stalls=((60.1, 3.0),))
    shuffled = [rows[index] for index in np.random.default_rng(0).permutation(len(rows))]
    one, two = seen(rows, served("old"))[1], seen(shuffled, served("old"))[1]
    assert [(s.start_ns, s.end_ns) for s in one] == [(s.start_ns, s.end_ns) for s in two]
