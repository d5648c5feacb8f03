import numpy as np
import pyarrow as pa
import pytest

from analysis.records.requests import requests_of
from analysis.records.schemas import COMPILE_EVENTS, REQUESTS
from analysis.run.spikes import (
    CAUSES,
    attribute,
    compile_events,
    find_spikes,
    stall_windows,
    windows_of,
    without_stalls_ms,
)

S = 1_000_000_000
T0 = 1_700_000_000 * S


def request(
    index, start_s, first_s, end_s, *, arm="compiled", replica="compiled-0", stall_s=None, tokens=5, batch=None
):
    return {
        "request_id": f"1-{index}-{arm}",
        "trial": 1,
        "arm": arm,
        "replica": replica,
        "scheduled_ns": T0 + int(start_s * S),
        "sent_ns": T0 + int(start_s * S),
        "first_token_ns": None if first_s is None else T0 + int(first_s * S),
        "end_ns": T0 + int(end_s * S),
        "status": "OK",
        "output_tokens": tokens,
        "batch_id": batch,
        "compile_stall_ns": None if stall_s is None else int(stall_s * S),
    }


def event(start_s, end_s, *, kind="recompile", replica="compiled-0", ids=(), phase="serving", name="e1", batch=None):
    return {
        "event_id": name,
        "trial": 1,
        "arm": "compiled",
        "replica": replica,
        "kind": kind,
        "start_ns": T0 + int(start_s * S),
        "end_ns": T0 + int(end_s * S),
        "batch_id": batch,
        "request_ids": list(ids),
        "phase": phase,
    }


def joined(requests, events):
    table = requests_of(pa.Table.from_pylist(requests, schema=REQUESTS))
    found = compile_events(pa.Table.from_pylist(events, schema=COMPILE_EVENTS), table)
    return table, found, attribute(table, found)


def causes(requests, events):
    return [CAUSES[code] for code in joined(requests, events)[2].cause]


def test_each_request_is_classed_by_what_the_compile_did_to_it():
    requests = [
        request(0, 10.0, 15.2, 15.5),  # its shape was new
        request(1, 11.0, 15.3, 15.6),  # waited behind it for its first token
        request(2, 9.0, 9.5, 15.4),  # was decoding when it began
        request(3, 20.0, 20.1, 20.5),  # came after it
    ]
    expected = ["recompiled", "queued behind a compile", "slowed by one", "other"]
    assert causes(requests, [event(10, 15, ids=["1-0-compiled"])]) == expected


HELD = ["1-0-compiled", "1-1-compiled", "1-2-compiled"]


def held_up():
    return [
        request(0, 10.0, 15.2, 15.5, batch=7),
        request(1, 11.0, 15.3, 15.6, batch=8),
        request(2, 9.0, 9.5, 15.4, batch=6),
    ]


def test_of_all_requests_held_up_those_of_the_prefill_batch_recompiled():
    expected = ["recompiled", "queued behind a compile", "slowed by one"]
    assert causes(held_up(), [event(10, 15, ids=HELD, batch=7)]) == expected


def test_of_all_requests_held_up_those_being_decoded_recompiled_in_a_decode_step():
    expected = ["queued behind a compile", "queued behind a compile", "recompiled"]
    assert causes(held_up(), [event(10, 15, ids=HELD, batch=99)]) == expected


def test_overlap_gives_the_seconds_where_the_server_reports_none():
    _, _, found = joined([request(0, 9, 15.2, 16)], [event(10, 15)])
    assert found.stall_ms.tolist() == [5000.0]
    assert found.delay.before_first_ms.tolist() == [5000.0]


def test_the_servers_number_decides_the_seconds():
    _, _, found = joined([request(0, 9, 15.2, 16, stall_s=2)], [event(10, 15)])
    assert found.stall_ms.tolist() == [2000.0]


def test_a_server_that_saw_no_stall_makes_no_hit_of_an_overlap():
    table, _, found = joined([request(0, 9, 9.5, 16, stall_s=0)], [event(10, 15)])
    assert not found.hit.any()
    assert CAUSES[found.cause[0]] == "slowed by one"
    assert without_stalls_ms(table, found, "e2e").tolist() == table.e2e_ms.tolist()


def test_nested_compiles_count_once():
    _, _, found = joined([request(0, 9, 15.2, 16)], [event(10, 15), event(11, 14, name="e2")])
    assert found.stall_ms.tolist() == [5000.0]


def test_a_compile_on_another_replica_or_in_the_warm_up_hits_no_request():
    for other in (event(10, 15, replica="compiled-1"), event(10, 15, phase="warmup")):
        requests = [request(0, 9, 15.2, 16), request(1, 9, 9.1, 9.2, replica="compiled-1")]
        assert not joined(requests, [other])[2].hit.any()


def test_a_request_that_names_no_replica_is_joined_by_its_arm():
    assert joined([request(0, 9, 15.2, 16, replica=None)], [event(10, 15)])[2].hit.all()


def test_kinds_of_events_that_compile_delay_requests_and_others_do_not():
    for kind, held in (("eager_fallback", False), ("background_compile", False), ("limit_hit", True), ("jit", True)):
        _, _, found = joined([request(0, 9, 15.2, 16)], [event(10, 15, kind=kind, ids=["1-0-compiled"])])
        assert found.hit.all() is np.bool_(held)


def test_which_kinds_hold_the_device_is_what_the_server_says():
    table = pa.Table.from_pylist([event(10, 15, kind="autotune")], schema=COMPILE_EVENTS)
    requests = requests_of(REQUESTS.empty_table())
    assert [[item.stalls for item in compile_events(table, requests, stalling=kinds)] for kinds in (None, {"x"})] == [
        [True],
        [False],
    ]


def test_each_event_knows_the_requests_it_hit():
    requests = [request(0, 9, 15.2, 16), request(1, 30, 30.1, 31), request(2, 40, 43, 44)]
    _, _, found = joined(requests, [event(10, 15), event(40, 42, name="e2"), event(90, 91, name="e3")])
    assert [rows.tolist() for rows in found.event_requests] == [[0], [2], []]


def test_only_the_wait_before_the_first_token_leaves_ttft():
    table, _, found = joined([request(0, 9, 10.5, 16)], [event(10, 10.4), event(12, 14, name="e2")])
    assert without_stalls_ms(table, found, "ttft").tolist() == pytest.approx([1100.0])
    assert without_stalls_ms(table, found, "e2e").tolist() == pytest.approx([4600.0])


def test_overlap_equals_a_sum_over_windows():
    rng = np.random.default_rng(0)
    spans = [(int(start), int(start + length)) for start, length in rng.integers(0, 500, size=(20, 2))]
    windows = windows_of(spans)
    covered = np.zeros(2000, dtype=bool)
    for start, end in spans:
        covered[start:end] = True
    starts = rng.integers(0, 1000, 50)
    ends = starts + rng.integers(0, 900, 50)
    expected = [covered[start:end].sum() for start, end in zip(starts, ends, strict=True)]
    assert windows.overlap_ns(starts, ends).tolist() == pytest.approx(expected)
    assert windows.touch(starts, ends).tolist() == [count > 0 for count in expected]
    assert windows.seconds == pytest.approx(covered.sum() / 1e9)


def test_no_windows_overlap_nothing():
    windows = stall_windows([], arm="compiled", trial=1)
    assert windows.overlap_ns(np.array([1]), np.array([5])).tolist() == [0.0]
    assert not windows.touch(np.array([1]), np.array([5])).any()


def quiet_traffic(count=100):
    rng = np.random.default_rng(1)
    return [request(index, index, index + 0.1, index + 0.1 + 0.4 * rng.uniform(0.9, 1.1)) for index in range(count)]


def test_clean_traffic_has_no_spike():
    table, events, found = joined(quiet_traffic(), [])
    assert find_spikes(table, found, events, control="compiled") == []


def test_a_long_answer_is_no_spike():
    slow = request(500, 50.0, 50.1, 60.0, tokens=100)
    table, events, found = joined([*quiet_traffic(), slow], [])
    assert find_spikes(table, found, events, control="compiled") == []


def test_a_stall_is_one_spike_with_its_cause():
    held = [request(600 + index, 50 + index / 10, 53.1, 53.4) for index in range(20)]
    calm = [item for item in quiet_traffic() if not 49 <= (item["scheduled_ns"] - T0) / S < 54]
    table, events, found = joined([*calm, *held], [event(50, 53, ids=["1-600-compiled"])])
    (spike,) = find_spikes(table, found, events, control="compiled")
    assert spike.cause == "recompiled"
    assert spike.requests == 20
    assert spike.event_ids == ("e1",)
    assert spike.peak_ms == pytest.approx(3400)
    assert spike.explained_pct > 90


def test_a_stall_without_a_compile_is_other():
    held = [request(600 + index, 50 + index / 10, 53.1, 53.4) for index in range(20)]
    table, events, found = joined([*quiet_traffic(), *held], [event(70, 70.01)])
    (spike,) = find_spikes(table, found, events, control="compiled")
    assert (spike.cause, spike.event_ids, spike.explained_pct) == ("other", (), 0.0)


def test_events_without_a_phase_serve_once_traffic_has_begun():
    _, events, _ = joined([request(0, 9, 9.2, 10)], [event(1, 5, phase=None), event(20, 21, phase=None, name="e2")])
    assert [item.serving for item in events] == [False, True]


def test_no_events_table_is_no_event():
    assert compile_events(None, requests_of(REQUESTS.empty_table())) == ()
