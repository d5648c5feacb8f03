"""Which compile delayed which request, for how long, and which spikes that explains."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailgate.analysis.records.requests import requests_of
from tailgate.analysis.records.schemas import COMPILE_EVENTS
from tailgate.analysis.run.attribution import CAUSES, attribute
from tailgate.analysis.run.compile_events import compile_events, windows_of
from tailgate.analysis.run.spikes import find_spikes
from tests.fakes.request_rows import T0, S, columns_of

SERVER = {"trial": 1, "arm": "compiled", "replica": "compiled-0"}


def at(seconds):
    return T0 + int(seconds * S)


def request(index, start_s, first_s, end_s, *, stall_s=None, tokens=5, **more):
    row = {**SERVER, "request_id": f"{index}", "status": "OK", "output_tokens": tokens}
    row |= {"scheduled_ns": at(start_s), "sent_ns": at(start_s), "first_token_ns": at(first_s), "end_ns": at(end_s)}
    return row | {"compile_stall_ns": None if stall_s is None else int(stall_s * S)} | more


def event(start_s, end_s, *, ids=(), name="e1", **more):
    row = {**SERVER, "event_id": name, "kind": "recompile", "phase": "serving", "request_ids": list(ids)}
    return row | {"start_ns": at(start_s), "end_ns": at(end_s)} | more


def joined(requests, events):
    table = requests_of(columns_of(requests))
    found = compile_events(pa.Table.from_pylist(events, schema=COMPILE_EVENTS), table)
    return table, found, attribute(table, found)


DURING, BACKLOG, OTHER = "during a compile", "in the backlog of a compile", "no compile"


def test_each_request_is_classed_by_what_the_compile_did_to_it():
    times = [(10.0, 15.2, 15.5), (11.0, 15.3, 15.6), (9.0, 9.5, 15.4), (20.0, 20.1, 20.5)]
    found = joined([request(index, *times[index]) for index in range(4)], [event(10, 15, ids=["0"])])[2]
    assert [CAUSES[code] for code in found.cause] == [DURING, DURING, DURING, OTHER]
    assert found.hit.tolist() == [True, True, True, False]


@pytest.mark.parametrize(("stall_s", "stall_ms"), [(None, 5000.0), (2, 2000.0), (0, 0.0)])
def test_the_seconds_of_the_server_decide_and_else_those_of_overlap_in_which_nested_compiles_count_once(
    stall_s, stall_ms
):
    _, _, found = joined([request(0, 9, 15.2, 16, stall_s=stall_s)], [event(10, 15), event(11, 14, name="e2")])
    assert (found.stall_ms.tolist(), found.hit.tolist()) == ([stall_ms], [stall_ms > 0])
    assert CAUSES[found.cause[0]] == DURING


@pytest.mark.parametrize(
    ("change", "hit"),
    [
        ({}, True),
        ({"replica": "compiled-1"}, False),
        ({"phase": "warmup"}, False),
        ({"kind": "eager_fallback", "ids": ["0"]}, False),
        ({"kind": "background_compile", "ids": ["0"]}, False),
        ({"kind": "limit_hit"}, True),
        ({"kind": "jit"}, True),
    ],
)
def test_requests_are_hit_by_compiles_that_hold_their_own_replica_while_serving(change, hit):
    requests = [request(0, 9, 15.2, 16), request(1, 9, 9.1, 9.2, replica="compiled-1")]
    assert joined(requests, [event(10, 15, **change)])[2].hit.tolist() == [hit, False]


def test_each_event_knows_the_requests_it_hit_by_their_arm_where_they_name_no_replica():
    requests = [request(0, 9, 15.2, 16, replica=None), request(1, 30, 30.1, 31), request(2, 40, 43, 44)]
    _, _, found = joined(requests, [event(10, 15), event(40, 42, name="e2"), event(90, 91, name="e3")])
    assert [rows.tolist() for rows in found.event_requests] == [[0], [2], []]


def test_events_without_a_phase_serve_once_traffic_has_begun():
    _, events, _ = joined([request(0, 9, 9.2, 10)], [event(1, 5, phase=None), event(20, 21, phase=None, name="e2")])
    assert [item.serving for item in events] == [False, True]


pairs = st.tuples(st.integers(0, 99), st.integers(0, 99)).map(sorted)


@given(st.lists(pairs, max_size=9), pairs)
def test_overlap_equals_a_sum_over_windows(spans, asked):
    windows = windows_of([tuple(span) for span in spans])
    covered = np.zeros(100, dtype=bool)
    for start, end in spans:
        covered[start:end] = True
    start, end = (np.array([value]) for value in asked)
    assert windows.overlap_ns(start, end).tolist() == [covered[slice(*asked)].sum()]
    if asked[0] < asked[1]:
        assert windows.touch(start, end).tolist() == [covered[slice(*asked)].any()]
    assert windows.seconds == pytest.approx(covered.sum() / 1e9)


def quiet_traffic(*, gap=(0, 0)):
    """A request a second, none in the gap."""
    took = 0.4 * np.random.default_rng(1).uniform(0.9, 1.1, 100)
    starts = [second for second in range(100) if not gap[0] <= second < gap[1]]
    return [request(index, index, index + 0.1, index + 0.1 + took[index]) for index in starts]


HELD = [request(600 + index, 50 + index / 10, 53.1, 53.4) for index in range(20)]


def spikes_of(requests, events=()):
    table, found, attribution = joined(requests, events)
    return find_spikes(table, attribution, found, control="compiled")


def test_a_stall_is_one_spike_with_its_cause():
    (spike,) = spikes_of([*quiet_traffic(gap=(49, 54)), *HELD], [event(50, 53, ids=["600"])])
    assert (spike.cause, spike.requests, spike.event_ids) == (DURING, 20, ("e1",))
    assert spike.peak_ms == pytest.approx(3400)
    assert spike.explained_pct > 90


def test_a_stall_without_a_compile_is_other():
    (spike,) = spikes_of([*quiet_traffic(), *HELD], [event(70, 70.01)])
    assert (spike.cause, spike.event_ids, spike.explained_pct) == (OTHER, (), 0.0)


def test_clean_traffic_and_a_long_answer_have_no_spike():
    assert spikes_of([*quiet_traffic(), request(500, 50.0, 50.1, 60.0, tokens=100)]) == []


def one_slot(*, takes=0.6, stall=5.0, extra=()):
    """A request a second, one at a time; the tenth needs a compile. `extra`: {index: row values}."""
    free, rows = 0.0, []
    for index in range(60):
        begin = max(float(index), free)
        took = stall if index == 10 else 0.0
        free = begin + takes + took
        rows.append(request(index, index, begin + 0.1 + took, free) | dict(extra).get(index, {}))
    return rows


def causes_of(found):
    return [CAUSES[code] for code in found.cause]


def test_a_backlog_lasts_until_the_requests_in_flight_are_back_to_their_level_and_it_drains():
    _, _, found = joined(one_slot(), [event(10, 15, ids=["10"])])
    # 5 s of stall and 0.4 s to spare in each second: the queue is empty after the request of second 22.
    assert causes_of(found)[16:23] == [BACKLOG] * 7
    assert set(causes_of(found)[:10] + causes_of(found)[24:]) == {OTHER}
    assert found.event_requests[0].tolist() == list(range(10, 15))
    assert found.event_backlog[0].tolist() == list(range(15, 23))
    assert found.hit.sum() == 5, "who came later is not hit"
    most = found.most_ms[15:23]
    assert most[0] <= 5000, "no more than the compile"
    assert (np.diff(most) < 0).all()
    assert (found.most_ms[:10] == 0).all()


def test_a_compile_that_holds_up_no_request_starts_no_busy_period():
    rows = [row | {"compile_stall_ns": 0} for row in one_slot()]
    _, _, found = joined(rows, [event(10, 15)])
    assert found.event_backlog[0].size == 0
    assert BACKLOG not in causes_of(found)


def test_a_compile_in_the_backlog_of_another_prolongs_it_to_the_level_before_the_first():
    rows = one_slot(stall=10.0)
    _, _, found = joined(rows, [event(10, 15, ids=["10"]), event(17, 20, name="e2")])
    back = next(index for index in range(20, 60) if causes_of(found)[index] == OTHER)
    assert rows[back - 1]["end_ns"] > rows[back]["scheduled_ns"] - S
    assert found.event_backlog[1].tolist() == list(range(20, back))
    assert found.event_backlog[0].tolist() == list(range(15, back))


def test_load_that_rises_by_itself_ends_a_backlog_after_twenty_times_its_compile():
    rows = [request(index, index, index + 0.1, index + (0.4 if index < 50 else 20.4)) for index in range(200)]
    _, _, found = joined(rows, [event(50, 51, ids=["50"])])
    assert causes_of(found)[52:71] == [BACKLOG] * 19
    assert set(causes_of(found)[72:]) == {OTHER}


def test_a_backlog_that_never_drains_ends_with_the_trial():
    _, _, found = joined(one_slot(takes=1.0), [event(10, 15, ids=["10"])])
    assert causes_of(found)[16:] == [BACKLOG] * 44


@pytest.mark.parametrize("status", ["CANCELLED", "DEADLINE_EXCEEDED"])
def test_a_request_that_failed_is_in_flight_until_it_ends(status):
    failing = {"status": status, "first_token_ns": None, "end_ns": at(40)}
    _, _, found = joined(one_slot(extra={12: failing, 13: failing}), [event(10, 15, ids=["10"])])
    assert causes_of(found)[23:40] == [BACKLOG] * 17
    assert set(causes_of(found)[41:]) == {OTHER}


def test_the_backlog_of_one_replica_is_shared_since_the_splitter_sends_more_to_the_others():
    here = one_slot()
    there = [request(100 + index, index + 0.5, index + 0.6, index + 0.7, replica="compiled-1") for index in range(60)]
    _, _, found = joined([*here, *there], [event(10, 15, ids=["10"])])
    causes = causes_of(found)
    assert set(causes[60 + 16 : 60 + 22]) == {BACKLOG}
    assert set(causes[60 : 60 + 10] + causes[60 + 24 :]) == {OTHER}
    assert not found.hit[60:].any()


def test_arms_and_trials_do_not_share_a_backlog():
    other = [row | {"trial": 2, "request_id": f"t{row['request_id']}"} for row in one_slot(stall=0.0)]
    _, _, found = joined([*one_slot(), *other], [event(10, 15, ids=["10"])])
    assert set(causes_of(found)[60:]) == {OTHER}


def test_a_spike_of_a_backlog_is_put_down_to_its_compile():
    late = [request(600 + index, 53.1 + index / 10, 55.1, 55.4 + index / 100) for index in range(15)]
    trigger = [request(599, 50.0, 53.1, 53.4)]
    (spike,) = spikes_of([*quiet_traffic(gap=(49, 56)), *trigger, *late], [event(50, 53, ids=["599"])])
    assert (spike.cause, spike.event_ids, spike.requests) == (DURING, ("e1",), 16)
