from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulation.scenario import Scenario, run
from benchmarks.simulation.server import serve
from benchmarks.simulation.weather import arrivals


def ones(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64)


def test_a_free_slot_serves_at_once_and_a_full_server_makes_wait() -> None:
    served = serve(ones(0, 1, 2), ones(5, 1, 1), np.zeros(3, int), slots=2, prefill_share=0.5)
    assert served.start_s.tolist() == [0, 1, 2]
    assert serve(ones(0, 1, 2), ones(5, 1, 1), np.zeros(3, int), slots=1).end_s.tolist() == [5, 6, 7]
    assert served.first_token_s.tolist() == [2.5, 1.5, 2.5]


def test_a_pause_holds_up_exactly_what_is_in_flight() -> None:
    served = serve(ones(0, 3, 9), ones(2, 4, 1), np.zeros(3, int), slots=4, outside=[(5.0, 10.0)])
    assert served.end_s.tolist() == [2, 17, 16]
    assert served.start_s.tolist() == [0, 3, 5], "what comes during a pause waits at its door"


def test_a_compile_begins_when_its_request_does() -> None:
    served = serve(
        ones(0, 1, 4),
        ones(2, 3, 1),
        np.array([7, 8, 8]),
        slots=4,
        compile_s=5.0,
        compiles=np.array([False, True, False]),
    )
    assert [(pause.start_s, pause.seconds, pause.request) for pause in served.pauses] == [(1.0, 5.0, 1)]
    assert served.end_s.tolist() == [7, 9, 7]


def test_pauses_that_meet_follow_one_another() -> None:
    served = serve(ones(0), ones(4), np.zeros(1, int), slots=1, outside=[(1.0, 2.0), (2.0, 3.0)])
    assert served.end_s.tolist() == [9]


@given(
    gaps=st.lists(st.floats(0, 3), min_size=1, max_size=30),
    outside=st.lists(st.tuples(st.floats(0, 60), st.floats(0.1, 4)), max_size=4),
    slots=st.integers(1, 5),
)
@settings(max_examples=60)
def test_nothing_is_faster_than_its_work_and_pauses_only_add(
    gaps: list[float], outside: list[tuple[float, float]], slots: int
) -> None:
    times, work = np.cumsum(gaps), np.full(len(gaps), 1.5)
    shape = np.zeros(len(gaps), int)
    free, paused = (serve(times, work, shape, slots=slots, outside=some) for some in ((), outside))
    assert (free.end_s - free.start_s >= work - 1e-9).all()
    assert (paused.end_s >= free.end_s - 1e-9).all()
    assert (paused.end_s <= free.end_s + sum(seconds for _, seconds in outside) + 1e-9).all()


def test_waits_are_those_of_queueing_theory() -> None:
    # M/M/c: Erlang's formula for the mean wait
    rate, mean, slots = 5.0, 1.5, 10
    rng = np.random.default_rng(3)
    times = np.cumsum(rng.exponential(1 / rate, 200_000))
    served = serve(times, rng.exponential(mean, len(times)), np.zeros(len(times), int), slots=slots)
    load = rate * mean
    top = load**slots / math.factorial(slots) * slots / (slots - load)
    waits = top / (sum(load**k / math.factorial(k) for k in range(slots)) + top)
    expected = waits * mean / (slots - load)
    assert float((served.start_s - served.arrival_s).mean()) == pytest.approx(expected, rel=0.1)


def test_mirrored_arms_get_the_same_requests_and_the_same_weather() -> None:
    served = run(Scenario(private=0.0, jitter=0.0), np.random.default_rng(1))
    assert np.array_equal(served.treatment.end_s, served.control.end_s)
    other = run(Scenario(design="split"), np.random.default_rng(1))
    assert len(other.treatment.end_s) != len(other.control.end_s)


def test_a_wandering_rate_keeps_its_mean() -> None:
    counts = [len(arrivals(Scenario(cox=0.3), np.random.default_rng(seed))) for seed in range(60)]
    assert np.mean(counts) == pytest.approx(2400, rel=0.05)
    assert np.var(counts) > 2 * np.mean(counts)


def test_as_many_shapes_compile_as_were_asked_for() -> None:
    served = run(Scenario(new_shapes=4, compile_s=2.0, host_stalls=1), np.random.default_rng(2))
    compiled = served.treatment.compiled
    assert len(compiled) == 4
    for pause in compiled:
        request = pause.request
        assert served.treatment.start_s[request] == pytest.approx(pause.start_s)
        assert (served.treatment.shape[:request] != served.treatment.shape[request]).all()
    assert len(served.control.pauses) == 1
