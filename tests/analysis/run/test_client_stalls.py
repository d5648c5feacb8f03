"""Stalls as clients see them: when a server stopped, what explains it, and which compiles it agrees with."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tailgate.analysis.records.requests import Requests, requests_of
from tailgate.analysis.run import silences
from tailgate.analysis.run.client_stalls import HOST, PART, UNKNOWN, WORK, ArmStalls, Stall, client_stalls, is_explained
from tailgate.analysis.run.compile_events import CompileEvent
from tailgate.analysis.run.silences import partial_stalls, servers_of, silences_of
from tests.fakes.request_rows import T0, S, columns_of


def at(seconds: float) -> int:
    return T0 + round(seconds * 1e9)


def table_of(rows: list[dict[str, Any]]) -> Requests:
    return requests_of(columns_of(rows))


def served(
    arm: str, *stalls: tuple[float, float], long_at: float | None = None, tokens: int = 40, **more: Any
) -> list[dict[str, Any]]:
    """Requests every quarter of a second that take 0.2 s to the first token and 0.02 s for each of `tokens` more.

    In a stall (start, seconds) nothing continues. Lengths repeat, but the request at `long_at` is the first of its own.
    """

    def real(own: float) -> float:
        return own + sum(length for start, length in stalls if own >= start)

    def own(real_s: float) -> float:
        return real_s - sum(min(max(real_s - start, 0.0), length) for start, length in stalls)

    rows = []
    for index in range(480):
        sent = index * 0.25
        times = [real(own(sent) + 0.2 + 0.02 * token) for token in range(tokens + 1)]
        row = {"request_id": f"{arm}-{index}", "arm": arm, "replica": f"{arm}-0", "trial": 1, "status": "OK"}
        row |= {"pair_id": str(index), "scheduled_ns": at(sent), "sent_ns": at(sent), "output_tokens": tokens + 1}
        row |= {"first_token_ns": at(times[0]), "end_ns": at(times[-1])}
        row |= {"prompt_tokens": 9000 if sent == long_at else 100 + index % 5}
        rows.append(row | {"token_ns": [at(time) - at(sent) for time in times]} | more)
    return rows


def seen(*arms: list[dict[str, Any]]) -> ArmStalls:
    requests = table_of([row for rows in arms for row in rows])
    return client_stalls(requests, ["new"])["new"]


def test_a_stall_of_one_arm_is_seen_from_its_begin_to_its_end() -> None:
    found = seen(served("new", (60.01, 3.0), long_at=60.0), served("old"))
    (stall,) = found.stalls
    assert stall.cause == UNKNOWN
    assert (stall.start_ns - at(60.01)) / 1e9 == pytest.approx(0.0, abs=0.03)
    assert stall.seconds == pytest.approx(3.0, abs=0.05)
    assert 14 <= stall.requests.size <= 18  # four in flight and twelve that come meanwhile
    assert found.detectable_s < 0.5


def test_a_stall_is_seen_where_of_many_silences_some_show_what_is_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = served("new", (60.01, 3.0)), served("old")
    (stall,) = seen(*rows).stalls
    monkeypatch.setattr(silences, "_MANY", 150)
    (found,) = seen(*rows).stalls
    assert (found.start_ns, found.end_ns, found.cause) == (stall.start_ns, stall.end_ns, stall.cause)


def test_silences_that_alternate_between_two_lengths_are_no_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, free_s = [], 0.0
    for index in range(240):
        begin, free_s = free_s, free_s + (0.01, 0.27)[index % 2]
        row = {"request_id": str(index), "arm": "new", "replica": "new-0", "trial": 1, "status": "OK"}
        row |= {"scheduled_ns": at(begin), "sent_ns": at(begin), "end_ns": at(free_s), "output_tokens": 1}
        rows.append(row)
    monkeypatch.setattr(silences, "_MANY", 150)
    (server,) = servers_of(table_of(rows), 1)
    found = silences_of(server)
    assert (found.stall.size, found.stall.sum()) == (240, 0)


STOP = (60.0, 2.0)


@pytest.mark.parametrize(
    ("others", "cause"),
    [
        ([served("old", (60.3, 1.8))], HOST),
        ([served("old", STOP), served("third")], UNKNOWN),
        ([served("new", replica="new-1", request_id=None)], UNKNOWN),
    ],
    ids=["every server stops", "one server continues", "another replica continues"],
)
def test_a_stall_is_of_the_host_where_no_server_continues(others: list[list[dict[str, Any]]], cause: str) -> None:
    found = seen(served("new", STOP), *others)
    assert [(stall.replica, stall.cause) for stall in found.stalls] == [("new-0", cause)]


@pytest.mark.parametrize(
    ("token_s", "tokens", "cause"),
    [(0.001, 3000, WORK), (0.001, 300, UNKNOWN), (0.0, 3000, UNKNOWN)],
    ids=["a long prompt", "a short one", "a long one where the length takes no time"],
)
def test_a_stall_is_work_where_its_prompt_takes_as_long_at_the_servers_pace(
    token_s: float, tokens: int, cause: str
) -> None:
    rows, free_s = [], 0.0
    for index in range(120):
        short = 60 + index % 80
        first = max(free_s, float(index)) + (3.0 if index == 60 else 0.1 + token_s * (short - 100))
        free_s = first + 0.05
        row = {"request_id": str(index), "arm": "new", "replica": "new-0", "trial": 1, "status": "OK"}
        row |= {"scheduled_ns": at(index), "sent_ns": at(index), "first_token_ns": at(first), "end_ns": at(free_s)}
        rows.append(row | {"prompt_tokens": tokens if index == 60 else short, "output_tokens": 2})
    (stall,) = seen(rows).stalls
    assert (stall.cause, round(stall.seconds)) == (cause, 3)


def test_silence_with_nothing_in_flight_is_no_stall() -> None:
    rows = [row for row in served("new") if not at(50.0) < row["scheduled_ns"] < at(80.0)]
    assert seen(rows, served("old")).stalls == ()
    assert math.isnan(seen(rows[:1], served("old")).detectable_s), "too little traffic"


def test_a_server_that_never_answers_again_stalls_until_its_clients_stop_waiting() -> None:
    rows = served("new")
    for row in rows:
        if row["scheduled_ns"] >= at(100.0):
            row |= {"status": "DEADLINE_EXCEEDED", "first_token_ns": None, "token_ns": None}
            row["end_ns"] = row["scheduled_ns"] + 30 * S
    (stall,) = seen(rows, served("old")).stalls
    assert stall.seconds > 30.0


@pytest.mark.parametrize(("tokens", "cause"), [(200, PART), (75, UNKNOWN)])
def test_new_requests_that_are_held_while_running_answers_go_on_are_a_stall(tokens: int, cause: str) -> None:
    """The longer answers run on through all of it; the shorter end before, so that the server is silent at last."""
    rows = served("new", tokens=tokens)
    for row in rows:
        if 60.0 <= (sent_s := (row["sent_ns"] - T0) / S) < 62.5:
            late_ns = at(62.5) - at(sent_s)
            row |= {"first_token_ns": row["first_token_ns"] + late_ns, "end_ns": row["end_ns"] + late_ns}
            row["token_ns"] = [time + late_ns for time in row["token_ns"]]
    (stall,) = seen(rows, served("old")).stalls
    assert stall.cause == cause
    assert stall.seconds == pytest.approx(2.5, abs=0.1)
    assert stall.requests.size >= 10


@pytest.mark.parametrize(("third_held", "found"), [(False, 1), (True, 0)])
def test_requests_that_stop_while_others_continue_are_a_partial_stall(third_held: bool, found: int) -> None:
    times = np.arange(0.1, 6.0, 0.02)
    rows = []
    for index in range(3):
        came = times if index == 2 and not third_held else times[(times <= 2.0) | (times >= 4.0)]
        row = {"request_id": str(index), "arm": "a", "trial": 1, "status": "OK", "output_tokens": len(came)}
        row |= {"scheduled_ns": T0, "sent_ns": T0, "first_token_ns": T0 + int(came[0] * S), "prompt_tokens": 100}
        row |= {"end_ns": T0 + int(came[-1] * S), "token_ns": (came * S).astype(int).tolist()}
        rows.append(row)
    made = table_of(rows)
    (server,) = servers_of(made, 1)
    assert [rows.size for *_, rows in partial_stalls(made, server, silences_of(server))] == [2] * found


def stall(start_s: float = 10.0, seconds: float = 2.0, **changes: Any) -> Stall:
    known: dict[str, Any] = {"arm": "a", "trial": 1, "replica": "a-0", "cause": UNKNOWN}
    known |= {"start_ns": int(start_s * S), "end_ns": int((start_s + seconds) * S)}
    return Stall(**{**known, "requests": np.zeros(0, dtype=np.int64), **changes})


def event(start_s: float, seconds: float, *, serving: bool = True, kind: str = "recompile") -> CompileEvent:
    times = {"start_ns": int(start_s * S), "end_ns": int((start_s + seconds) * S)}
    where = {"event_id": f"{start_s}", "trial": 1, "arm": "a", "replica": "a-0", "request_ids": (), "row": {}}
    return CompileEvent(**where, **times, kind=kind, serving=serving, stalls=kind == "recompile")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("events", "explained"),
    [
        ([], False),
        ([event(10.0, 3.0)], True),
        ([event(11.2, 1.8)], True),
        ([event(12.0, 1.0)], False),
        ([event(10.0, 1.0), event(11.0, 0.8, serving=False)], True),  # two, one of a warm-up
        ([event(10.0, 3.0, kind="background_compile")], False),
        ([event(5.0, 3.0)], False),
    ],
)
def test_a_stall_is_explained_by_compiles_that_last_for_most_of_it(events: list[CompileEvent], explained: bool) -> None:
    assert is_explained(stall(10.0, 3.0), events) is explained
    assert not is_explained(stall(10.0, 3.0, replica="a-1"), events)
