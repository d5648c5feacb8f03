from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from analysis.records.requests import Requests, requests_of
from analysis.records.schemas import COMPILE_EVENTS, REQUESTS
from analysis.run import backlog
from analysis.run.backlog import with_backlog
from analysis.run.spikes import (
    CAUSES,
    Attribution,
    CompileEvent,
    attribute,
    compile_events,
    find_spikes,
    without_stalls_ms,
)
from benchmarks.simulation.server import Served, serve

S = 1_000_000_000
T0 = 1_700_000_000 * S
BEHIND = CAUSES.index("in the backlog of one")


def request(
    index: int,
    recv_s: float,
    begin_s: float,
    end_s: float,
    *,
    replica: str = "compiled-0",
    told: bool = True,
    stall_s: float | None = None,
    status: str = "OK",
) -> dict[str, object]:
    """A request whose first token comes 0.1 s after its begin."""
    queue = int((begin_s - recv_s) * S)
    return {
        "request_id": f"{index}",
        "trial": 1,
        "arm": "compiled",
        "replica": replica,
        "scheduled_ns": T0 + int(recv_s * S),
        "sent_ns": T0 + int(recv_s * S),
        "first_token_ns": T0 + int((begin_s + 0.1) * S) if status == "OK" else None,
        "end_ns": T0 + int(end_s * S),
        "status": status,
        "output_tokens": 5,
        "queue_ns": queue if told else None,
        "server_recv_ns": T0 + int(recv_s * S) if told else None,
        "server_end_ns": T0 + int(end_s * S) if told else None,
        "compile_stall_ns": None if stall_s is None else int(stall_s * S),
    }


def event(start_s: float, end_s: float, *, name: str = "e1", replica: str = "compiled-0") -> dict[str, object]:
    return {
        "event_id": name,
        "trial": 1,
        "arm": "compiled",
        "replica": replica,
        "kind": "recompile",
        "start_ns": T0 + int(start_s * S),
        "end_ns": T0 + int(end_s * S),
        "phase": "serving",
    }


def followed(
    requests: list[dict[str, object]], events: list[dict[str, object]]
) -> tuple[Requests, tuple[CompileEvent, ...], Attribution]:
    table = requests_of(pa.Table.from_pylist(requests, schema=REQUESTS))
    found = compile_events(pa.Table.from_pylist(events, schema=COMPILE_EVENTS), table)
    return table, found, with_backlog(table, found, attribute(table, found))


def one_slot(*, compile_s: float = 5.0, told: bool = True, gap_s: float = 1.0) -> list[dict[str, object]]:
    """A request each second that takes 0.6 s, one at a time; the tenth needs a compile, the queue then drains."""
    free, rows = 0.0, []
    for index in range(60):
        recv = index * gap_s
        begin = max(recv, free)
        free = begin + 0.6 + (compile_s if index == 10 else 0.0)
        row = request(index, recv, begin, free, told=told)
        if index == 10:
            row["first_token_ns"] = T0 + int((begin + compile_s + 0.1) * S)
        rows.append(row)
    return rows


def test_the_queue_that_a_compile_made_is_its_backlog_until_it_is_drained() -> None:
    table, _, found = followed(one_slot(), [event(10.0, 15.0)])
    # 5 s of standstill, 0.4 s to spare in each second: the wait shrinks from 5 s by 0.4 s a request.
    delay = found.stall_ms + found.backlog_ms
    assert delay[10:23] == pytest.approx([5000 - 400 * step for step in range(12)] + [200], abs=6)
    assert (delay[:10] == 0).all()
    assert (delay[23:] == 0).all()
    assert found.stall_ms[15:].sum() == 0.0, "the compile was over when they came"
    assert (found.cause[16:23] == BEHIND).all()
    without = without_stalls_ms(table, found, "e2e")
    assert without == pytest.approx(np.full(60, 600.0), abs=6)
    assert without_stalls_ms(table, found, "ttft") == pytest.approx(np.full(60, 100.0), abs=6)


def test_an_event_knows_its_backlog_apart_from_the_requests_it_hit() -> None:
    _, _, found = followed(one_slot(), [event(10.0, 15.0), event(40.0, 40.001, name="late")])
    assert found.event_requests[0].tolist() == [10, 11, 12, 13, 14]
    assert set(range(15, 23)) <= set(found.event_backlog[0].tolist())
    assert found.event_backlog[1].size == 0


def test_a_spike_says_how_much_is_direct_and_how_much_is_backlog() -> None:
    calm = [request(100 + index, 100.0 + index, 100.0 + index, 100.6 + index) for index in range(200)]
    table, events, found = followed([*one_slot(), *calm], [event(10.0, 15.0)])
    (spike,) = find_spikes(table, found, events, control="eager")
    assert spike.cause == "queued behind a compile"
    assert spike.event_ids == ("e1",)
    assert spike.backlog_pct > spike.direct_pct > 30
    assert spike.explained_pct == pytest.approx(100, abs=2)
    assert spike.explained_pct == pytest.approx(spike.direct_pct + spike.backlog_pct)


def test_the_backlog_alone_can_be_the_cause() -> None:
    # Nobody overlaps the compile but the one that it compiled for, which is cut from the records.
    rows = [row for index, row in enumerate(one_slot()) if not 10 <= index < 15]
    calm = [request(100 + index, 100.0 + index, 100.0 + index, 100.6 + index) for index in range(200)]
    hidden = request(10, 10.0, 10.0, 15.6, stall_s=5.0)
    table, events, found = followed([*rows, hidden, *calm], [event(10.0, 15.0)])
    worst = find_spikes(table, found, events, control="eager")
    assert any(spike.cause != "other" and spike.backlog_pct > 0 for spike in worst)


def test_a_stall_that_is_no_compile_has_no_backlog() -> None:
    _, _, found = followed(one_slot(), [event(50.0, 50.2)])
    assert found.backlog_ms[:50].sum() == 0.0
    assert (found.cause[:50] != BEHIND).all()


def test_a_stall_of_its_own_in_the_backlog_is_not_put_down_to_the_compile() -> None:
    """Free slots, a compile of 1 s, and 2 s later a standstill of 3 s for another reason."""
    requests = [request(index, index * 0.1, index * 0.1, index * 0.1 + 0.3) for index in range(300)]
    for index in range(100, 110):  # the compile from 10 s to 11 s
        requests[index] = request(index, index * 0.1, 11.0, 11.3)
    for index in range(130, 160):  # the other from 13 s to 16 s
        requests[index] = request(index, index * 0.1, 16.0, 16.3)
    _, _, found = followed(requests, [event(10.0, 11.0)])
    assert found.stall_ms[100:110].sum() == pytest.approx(5500, abs=10)
    assert found.backlog_ms[112:].sum() == 0.0


def test_a_compile_that_holds_nobody_up_leaves_no_backlog() -> None:
    requests = [request(index, index, index, index + 0.6, stall_s=0.0) for index in range(60)]
    _, _, found = followed(requests, [event(10.0, 15.0)])
    assert found.backlog_ms.sum() == 0.0


def test_without_the_servers_times_first_tokens_stand_for_the_begin() -> None:
    _, _, found = followed(one_slot(told=False), [event(10.0, 15.0)])
    delay = found.stall_ms + found.backlog_ms
    assert delay[10:23] == pytest.approx([5000 - 400 * step for step in range(12)] + [200], abs=150)


def test_what_failed_behind_a_compile_is_known_as_unserved() -> None:
    failed = request(500, 12.0, 12.0, 16.0, status="DEADLINE_EXCEEDED")
    _, _, found = followed([*one_slot(), failed], [event(10.0, 15.0)])
    assert np.flatnonzero(found.unserved).size == 1


def test_a_compile_on_one_replica_fills_the_other() -> None:
    """While one of two replicas compiles, all requests go to the other, whose queue is the compile's doing."""
    requests = []
    free = {0: 0.0, 1: 0.0}
    for step in range(120):
        recv = step * 0.5
        compiling = 20.0 <= recv < 28.0
        replica = 1 if compiling else step % 2
        begin = max(recv, free[replica])
        free[replica] = begin + 0.8
        if recv == 20.0:
            replica, begin, free[0] = 0, 20.0, 28.8
        requests.append(request(step, recv, begin, free[replica], replica=f"compiled-{replica}"))
    _, _, found = followed(requests, [event(20.0, 28.0)])
    spilled = [row for row in range(46, 56) if requests[row]["replica"] == "compiled-1"]
    assert found.stall_ms[spilled].sum() == 0.0
    assert found.backlog_ms[spilled].sum() > 5_000
    assert found.delay_least.ms[spilled].sum() < 0.2 * found.backlog_ms[spilled].sum()


def test_a_server_that_takes_whole_batches_is_replayed_by_batches() -> None:
    """A batch of up to four lasts 1 s; the compile in one makes the next ones full, so that nobody catches up soon."""
    waiting = [(index, 0.4 * index) for index in range(400)]

    def served(compile_s: float) -> dict[int, tuple[float, float]]:
        times, over, at = {}, 0.0, 0
        while at < len(waiting):
            begin = max(over, waiting[at][1])
            batch = [index for index, recv in waiting[at : at + 4] if recv <= begin]
            over = begin + 1.0 + (compile_s if 50 in batch else 0.0)
            times |= dict.fromkeys(batch, (begin, over))
            at += len(batch)
        return times

    seen, without = served(6.0), served(0.0)
    requests = [request(index, recv, *seen[index]) for index, recv in waiting]
    begin = seen[50][0]
    for index, (began, _) in seen.items():
        if began == begin:
            requests[index]["first_token_ns"] = T0 + int((begin + 6.1) * S)
    table, _, found = followed(requests, [event(begin, begin + 6.0)])
    expected = [1e3 * (without[index][1] - recv) for index, recv in waiting]
    assert without_stalls_ms(table, found, "e2e") == pytest.approx(expected, abs=10)
    assert (found.cause == BEHIND).sum() > 5


def test_a_server_that_keeps_no_order_is_known_by_how_far_the_replay_is_off() -> None:
    _, _, found = followed(one_slot(), [event(10.0, 15.0)])
    assert found.misfit["compiled"] < 0.01
    # The last come is the first served, while the queue lasts.
    queue, over, rows = [], 0.0, []
    coming = [(index, 0.7 * index) for index in range(200)]
    while coming or queue:
        while coming and (coming[0][1] <= over or not queue):
            queue.append(coming.pop(0))
        index, recv = queue.pop()
        begin = max(over, recv)
        over = begin + 0.6 + (20.0 if index == 10 else 0.0)
        rows.append(request(index, recv, begin, over))
    _, _, found = followed(rows, [event(7.0, 27.0)])
    assert found.misfit["compiled"] > 0.5


def recorded(served: Served, *, replica: str = "compiled-0") -> list[dict[str, object]]:
    until = [pause.start_s + pause.seconds for pause in served.pauses]
    rows = []
    for index in range(len(served.arrival_s)):
        recv, begin = served.arrival_s[index], served.start_s[index]
        if begin < recv - 1e-6:  # what comes during a pause begins at its end
            begin = next(end for end in until if end > recv)
        row = request(index, recv, max(begin, recv), served.end_s[index], replica=replica)
        row["first_token_ns"] = T0 + int(served.first_token_s[index] * S)
        rows.append(row)
    return rows


@given(
    seed=st.integers(0, 10_000),
    slots=st.integers(1, 6),
    load=st.floats(0.3, 1.1),
    compile_s=st.floats(0.2, 10.0),
)
@example(seed=988, slots=5, load=1.0, compile_s=6.0)  # the second compile begins in the backlog of the first
@settings(max_examples=60)
def test_the_replay_of_a_queue_with_slots_is_the_queue_without_compiles(
    seed: int, slots: int, load: float, compile_s: float
) -> None:
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1.0 / (load * slots), 150))
    work, shape = rng.exponential(1.0, 150), np.arange(150)
    compiles = np.zeros(150, dtype=bool)
    compiles[rng.choice(np.arange(10, 120), 2, replace=False)] = True
    seen, without = (
        serve(times, work, shape, slots=slots, compile_s=compile_s, compiles=mask) for mask in (compiles, None)
    )
    events = [
        event(pause.start_s, pause.start_s + pause.seconds, name=f"e{number}")
        for number, pause in enumerate(seen.pauses)
    ]
    table, _, found = followed(recorded(seen), events)
    assert without_stalls_ms(table, found, "e2e") == pytest.approx(without.e2e_ms, abs=25)
    assert without_stalls_ms(table, found, "ttft") == pytest.approx(without.ttft_ms, abs=25)


@pytest.mark.parametrize(("at_once", "one_by_one"), [(1, 1), (3, 2), (7, 1000)])
def test_a_queue_is_the_same_however_many_visits_are_followed_at_once(
    monkeypatch: pytest.MonkeyPatch, at_once: int, one_by_one: int
) -> None:
    rng = np.random.default_rng(5)
    times, work = np.cumsum(rng.exponential(0.4, 200)), rng.exponential(1.0, 200)
    compiles = np.isin(np.arange(200), [40, 120])
    seen = serve(times, work, np.arange(200), slots=3, compile_s=4.0, compiles=compiles)
    events = [event(pause.start_s, pause.start_s + pause.seconds, name=str(pause.start_s)) for pause in seen.pauses]
    _, _, usual = followed(recorded(seen), events)
    monkeypatch.setattr(backlog, "_AT_ONCE", at_once)
    monkeypatch.setattr(backlog, "_ONE_BY_ONE", one_by_one)
    _, _, found = followed(recorded(seen), events)
    assert (usual.backlog_ms > 0).sum() > 20
    assert (found.delay.ms == usual.delay.ms).all()
    assert found.misfit == usual.misfit


@pytest.mark.parametrize("damage", ["ends first", "far future", "queue longer than the request", "negative queue"])
def test_odd_times_neither_break_the_replay_nor_make_a_backlog(damage: str) -> None:
    requests, events = one_slot(), [event(10.0, 15.0)]
    if damage == "ends first":
        events = [event(15.0, 10.0)]
    elif damage == "far future":
        events = [{**event(10.0, 15.0), "end_ns": 9_000_000_000_000_000_000}]
    elif damage == "queue longer than the request":
        requests = [{**row, "queue_ns": 10**17} for row in requests]
    else:
        requests = [{**row, "queue_ns": -5} for row in requests]
    table, _, found = followed(requests, events)
    assert np.isfinite(found.backlog_ms).all()
    assert (found.backlog_ms >= 0).all()
    assert (without_stalls_ms(table, found, "e2e") >= 0).all()


def test_a_request_that_lost_its_replicas_name_stays_with_the_only_one() -> None:
    requests = one_slot()
    for index in (12, 18):
        requests[index]["replica"] = None
    _, _, found = followed(requests, [event(10.0, 15.0)])
    _, _, expected = followed(one_slot(), [event(10.0, 15.0)])
    assert found.backlog_ms == pytest.approx(expected.backlog_ms)


def test_no_event_changes_nothing() -> None:
    table = requests_of(pa.Table.from_pylist(one_slot(), schema=REQUESTS))
    found = attribute(table, ())
    assert with_backlog(table, (), found) is found
    assert with_backlog(table, (), replace(found)).backlog_ms.sum() == 0.0
