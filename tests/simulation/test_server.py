"""The quick part of `python benchmarks/judging.py attribution`: a run or two of each kind of server, fixed seeds."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulation.attribution import CASES, Judged, judge, live, share
from benchmarks.simulation.engine import Engine, serve_behind_splitter
from benchmarks.simulation.scenario import Scenario, run
from benchmarks.simulation.server import Served, serve
from benchmarks.simulation.weather import arrivals
from tailgate.analysis.arrays import Bools


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


def served(
    engine: Engine,
    arrivals: list[float],
    tokens: list[int],
    *,
    replicas: int = 1,
    outside: tuple[tuple[float, float], ...] = (),
    compiles: Bools | None = None,
) -> Served:
    return serve_behind_splitter(
        np.array(arrivals),
        np.array(tokens),
        engine=engine,
        slower=np.ones(1),
        outside=[outside] * replicas,
        compile_s=5.0,
        compiles=compiles,
    )


PLAIN = Engine(kind="alternating", rows=2, step_s=1.0, row_s=0.0, prompt_s=1.0, token_s=0.0)


def test_a_prompt_answers_the_first_token_and_each_step_one_more() -> None:
    assert served(PLAIN, [0.0], [3]).first_token_s.tolist() == [1.0]
    assert served(PLAIN, [0.0], [3]).end_s.tolist() == [3.0]


def test_who_finds_no_row_waits_for_one() -> None:
    made = served(PLAIN, [0.0, 0.0, 0.0], [3, 3, 1])
    assert made.start_s[2] >= made.end_s[:2].min()


def test_a_compile_stops_every_row_and_is_recorded_with_its_request() -> None:
    free = served(PLAIN, [0.0, 1.5], [6, 2])
    held = served(PLAIN, [0.0, 1.5], [6, 2], compiles=np.array([False, True]))
    assert (held.end_s - free.end_s).tolist() == [5.0, 5.0]
    assert [(pause.start_s, pause.seconds, pause.request) for pause in held.pauses] == [(2.0, 5.0, 1)]


def test_a_stop_from_outside_follows_the_step_that_it_meets_and_delays_what_comes_in_it() -> None:
    made = served(PLAIN, [0.0, 9.5, 11.0], [3, 2, 1], outside=((1.5, 2.0), (10.0, 4.0)))
    assert made.end_s.tolist() == [5.0, 15.5, 16.5]
    assert made.start_s[2] == 15.5


def test_a_static_batch_is_over_before_the_next_begins() -> None:
    made = served(replace(PLAIN, kind="static", rows=4, together=4), [0.0, 0.5, 0.6], [5, 2, 2])
    assert made.start_s[1] == made.start_s[2] == made.end_s[0] == 5.0


def test_the_splitter_sends_to_the_replica_with_the_fewest_in_flight() -> None:
    made = served(PLAIN, [0.0, 0.1, 0.2, 8.0], [20, 2, 2, 2], replicas=2)
    first = made.replica[0]
    assert (made.replica[1:] != first).sum() >= 2
    assert made.replica[3] != first


def test_rows_share_memory_and_the_shortest_may_go_first() -> None:
    tight = replace(PLAIN, rows=8, memory=5)
    made = served(tight, [0.0, 0.0], [4, 3])
    assert made.start_s[1] >= made.end_s[0]
    short = served(replace(PLAIN, rows=1, shortest_first=True), [0.0, 0.1, 0.2], [3, 9, 2])
    assert short.start_s[2] < short.start_s[1]
    assert short.end_s.max() == pytest.approx(14.0)


QUICK = {
    "load 80 %": 2,
    "load 95 %": 1,
    "stalls of 20 s": 1,
    "six close together": 2,
    "collections": 1,
    "private stalls": 2,
    "host stalls": 1,
    "bursts that jam": 1,
    "steps": 1,
    "steps that grow": 1,
    "rows bound by memory": 1,
    "static batches": 1,
    "static batches, load 60 %": 1,
    "two replicas": 1,
    "client times alone": 1,
}


@pytest.fixture(scope="module")
def runs() -> list[Judged]:
    return [judge(CASES[name], seed) for name, seeds in QUICK.items() for seed in range(seeds)]


def test_spikes_that_compiles_caused_are_put_down_to_them_and_no_others(runs: list[Judged]) -> None:
    assert sum(run.caused for run in runs) >= 40
    assert share(runs, "right", "caused") >= 0.94
    assert share(runs, "right", "blamed") >= 0.97
    assert share(runs, "met", "shown") >= 0.9, "no silence is taken for success"


def test_spikes_of_other_causes_are_there_to_be_mistaken() -> None:
    judged = judge(CASES["private stalls"], 0)
    assert judged.spikes > judged.caused > 0


def test_the_truth_is_a_delay_that_compiles_alone_made() -> None:
    lived = live(CASES["private stalls"], 1)
    first = min(event.start_ns for event in lived.run.events)
    before = lived.run.requests.end_ns[:] < first
    assert before.any()
    assert (lived.delay_ms[before] == 0.0).all()
    assert (lived.delay_ms >= lived.run.attribution.stall_ms - 50.0).all()
