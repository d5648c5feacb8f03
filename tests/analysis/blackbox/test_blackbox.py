"""Stalls as a client sees them: when a server stopped, whether it compiled, and agreement with telemetry."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from analysis.blackbox import view as module
from analysis.blackbox.agreement import agreement_of, is_explained
from analysis.blackbox.firstseen import SlowFirst, shapes_of, slow_first
from analysis.blackbox.partial import partial_stalls
from analysis.blackbox.stalls import COMPILE, HOST, UNKNOWN, WORK, Stall, look
from analysis.blackbox.view import Outside, outside_of
from analysis.records.requests import Requests, requests_of
from analysis.records.schemas import REQUESTS
from analysis.run.spikes import CompileEvent, windows_of

S = 1_000_000_000
T0 = 1_700_000_000 * S
NEVER = windows_of([])


def at(seconds: float) -> int:
    return T0 + round(seconds * 1e9)


def table_of(rows: list[dict[str, Any]]) -> Requests:
    return requests_of(pa.Table.from_pylist(rows, schema=REQUESTS))


def served(arm: str, *stalls: tuple[float, float], long_at: float | None = None, **more: Any) -> list[dict[str, Any]]:
    """Requests every quarter of a second that take 0.2 s to the first token and 0.02 s for each of 40 more.

    In a stall (start, seconds) nothing continues. Lengths repeat, but the request at `long_at` is the first of its own.
    """

    def real(own: float) -> float:
        return own + sum(length for start, length in stalls if own >= start)

    def own(real_s: float) -> float:
        return real_s - sum(min(max(real_s - start, 0.0), length) for start, length in stalls)

    rows = []
    for index in range(480):
        sent = index * 0.25
        times = [real(own(sent) + 0.2 + 0.02 * token) for token in range(41)]
        row = {"request_id": f"{arm}-{index}", "arm": arm, "replica": f"{arm}-0", "trial": 1, "status": "OK"}
        row |= {"pair_id": str(index), "scheduled_ns": at(sent), "sent_ns": at(sent), "output_tokens": 41}
        row |= {"first_token_ns": at(times[0]), "end_ns": at(times[-1])}
        row |= {"prompt_tokens": 9000 if sent == long_at else 100 + index % 5}
        rows.append(row | {"token_ns": [at(time) - at(sent) for time in times]} | more)
    return rows


def seen(*arms: list[dict[str, Any]]) -> tuple[Requests, Any, Any]:
    requests = table_of([row for rows in arms for row in rows])
    stalls, watches = look(requests, {"new": shapes_of(requests, "new")})
    return requests, stalls["new"], watches["new"]


def test_a_stall_of_one_arm_is_seen_from_its_begin_to_its_end() -> None:
    requests, (stall,), watches = seen(served("new", (60.01, 3.0), long_at=60.0), served("old"))
    assert stall.cause == UNKNOWN
    assert (stall.start_ns - at(60.01)) / 1e9 == pytest.approx(0.0, abs=0.03)
    assert stall.seconds == pytest.approx(3.0, abs=0.05)
    assert requests.prompt_tokens[stall.trigger] == stall.shape == 9000
    assert 14 <= stall.requests.size <= 18  # four in flight and twelve that come meanwhile
    assert (watches[0].detectable_s < 0.5, watches[0].witnesses) == (True, 1)


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
    _, stalls, _ = seen(served("new", STOP), *others)
    assert [(stall.replica, stall.cause) for stall in stalls] == [("new-0", cause)]


def test_a_prompt_that_takes_as_long_on_the_other_arm_is_work() -> None:
    rows = served("old", long_at=60.0)
    for row in rows:
        if row["prompt_tokens"] == 9000:
            row |= {"first_token_ns": at(62.9), "end_ns": at(63.5), "token_ns": None}
    _, stalls, _ = seen(served("new", (60.01, 3.0), long_at=60.0), rows)
    assert [stall.cause for stall in stalls] == [WORK]


def test_silence_with_nothing_in_flight_is_no_stall() -> None:
    rows = [row for row in served("new") if not at(50.0) < row["scheduled_ns"] < at(80.0)]
    assert seen(rows, served("old"))[1] == []
    assert math.isnan(seen(rows[:1], served("old"))[2][0].detectable_s), "too little traffic"


def test_a_server_that_never_answers_again_stalls_until_its_clients_stop_waiting() -> None:
    rows = served("new")
    for row in rows:
        if row["scheduled_ns"] >= at(100.0):
            row |= {"status": "DEADLINE_EXCEEDED", "first_token_ns": None, "token_ns": None}
            row["end_ns"] = row["scheduled_ns"] + 30 * S
    (stall,) = seen(rows, served("old"))[1]
    assert stall.seconds > 30.0


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
    gaps = partial_stalls(made, np.arange(3), made.start_ns, NEVER)
    assert [gap.requests.size for gap in gaps] == [2] * found


def requests(lengths: list[int | None], waits_s: list[float] | None = None, **columns: list[object]) -> Requests:
    """One request a second with these prompt lengths and times to the first token."""
    rows = []
    for index, (length, wait) in enumerate(zip(lengths, waits_s or [0.1] * len(lengths), strict=True)):
        row = {"request_id": str(index), "arm": "a", "trial": 1, "scheduled_ns": at(index), "status": "OK"}
        row |= {"first_token_ns": at(index + wait), "end_ns": at(index + wait + 0.5), "prompt_tokens": length}
        rows.append(row | {name: values[index] for name, values in columns.items()})
    return table_of(rows)


def test_a_shape_is_new_once_for_each_replica_and_each_start() -> None:
    assert shapes_of(requests([5, 7, 5, None, 9]), "a").new.tolist() == [True, True, False, False, True]
    assert shapes_of(requests([5, 7, 12, 40]), "a", ladder=(8, 16)).shape.tolist() == [8, 8, 16, 40]
    replicas = requests([5, 5, 5, 5], replica=["x", "y", "x", "y"])
    assert shapes_of(replicas, "a").new.tolist() == [True, True, False, False]
    assert shapes_of(requests([5, 5], trial=[1, 2]), "a").new.tolist() == [True, True]


def test_slower_first_requests_of_a_shape_are_found() -> None:
    rng = np.random.default_rng(2)
    lengths = (100 * rng.integers(1, 31, 300)).tolist()
    waits = (0.1 * np.exp(0.3 * rng.standard_normal(300))).tolist()
    for factor, found in ((1.0, False), (3.0, True)):
        for length in set(lengths):
            waits[lengths.index(length)] *= factor
        made = requests(lengths, waits)
        slow = slow_first(made, shapes_of(made, "a"), NEVER, rng=np.random.default_rng(0))
        assert (slow.p_value < 1e-6) is found


def stall(start_s: float = 10.0, seconds: float = 2.0, **changes: Any) -> Stall:
    known: dict[str, Any] = {"arm": "a", "trial": 1, "replica": "a-0", "cause": UNKNOWN, "chance": 1e-6, "begun": True}
    known |= {"start_ns": int(start_s * S), "end_ns": int((start_s + seconds) * S), "trigger": 7, "shape": 64}
    known |= {"chance_new": 0.05, "chance_as_long": 1.0, "longest": 0.5, "work_s": 0.3}
    return Stall(**{**known, "requests": np.zeros(0, dtype=np.int64), **changes})


@pytest.mark.parametrize(
    ("stalls", "causes"),
    [
        ([stall()] * 4 + [stall(trigger=-1, shape=-1)], [COMPILE] * 4 + [UNKNOWN]),
        ([stall(chance_new=0.8)] * 6, [UNKNOWN] * 6),  # every shape is new
        ([stall()], [UNKNOWN]),
        ([stall(chance_new=0.002)], [COMPILE]),
        ([stall(chance_new=0.01, cause=cause) for cause in (HOST, WORK)], [HOST, WORK]),
        ([], []),
    ],
)
def test_stalls_with_unlikely_first_seen_shapes_are_compiles(
    monkeypatch: pytest.MonkeyPatch, stalls: list[Stall], causes: list[str]
) -> None:
    monkeypatch.setattr(module, "look", lambda *_: ({"a": stalls}, {"a": []}))
    made = requests([64, 64, 64])
    found = outside_of(made, {"a": shapes_of(made, "a")}, rng=np.random.default_rng(0))["a"]
    assert [one.cause for one in found.stalls] == causes
    assert found.recompiles == (COMPILE in causes)


def event(start_s: float, seconds: float, *, serving: bool = True, kind: str = "recompile") -> CompileEvent:
    times = {"start_ns": int(start_s * S), "end_ns": int((start_s + seconds) * S)}
    where = {"event_id": f"{start_s}", "trial": 1, "arm": "a", "replica": "a-0", "request_ids": (), "row": {}}
    return CompileEvent(**where, **times, kind=kind, serving=serving, stalls=kind == "recompile")  # type: ignore[arg-type]


def test_stalls_that_overlap_compiles_agree_with_telemetry() -> None:
    slow = SlowFirst(first=0, others=0, p_value=1.0, excess_ms=math.nan)
    stalls = (stall(10.02, 2.0, cause=COMPILE), stall(50.0, 1.0, cause=COMPILE), stall(70.0, 2.0))
    outside = Outside(arm="a", stalls=stalls, p_value=0.001, watches=(), slow=slow, shapes_known=True)
    events = [event(10, 2), event(30, 3), event(70, 2), event(90, 2, serving=False)]
    found = agreement_of(outside, events, [4] * 4)
    assert (found.telemetry, found.seen, found.called, found.missed, found.extra) == (3, 2, 1, 2, 1)


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
