"""The quick part of `python benchmarks/judging.py attribution`: a run or two of each kind of server, fixed seeds."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.simulation.attribution import CASES, Judged, judge, live, share
from benchmarks.simulation.engine import Engine, Served, serve_behind_splitter
from benchmarks.simulation.fleet import SLOTS, fleet
from benchmarks.simulation.kinds import on_slots
from benchmarks.simulation.weather import arrivals
from tailgate.analysis.arrays import Bools


def test_waits_are_those_of_queueing_theory() -> None:
    # M/M/c: Erlang's formula for the mean wait
    rate, mean, slots = 5.0, 1.5, 10
    rng = np.random.default_rng(3)
    times = np.cumsum(rng.exponential(1 / rate, 200_000))
    made = on_slots(times, rng.exponential(mean, len(times)), slots)
    load = rate * mean
    top = load**slots / math.factorial(slots) * slots / (slots - load)
    waits = top / (sum(load**k / math.factorial(k) for k in range(slots)) + top)
    expected = waits * mean / (slots - load)
    assert float((made.start_s - made.arrival_s).mean()) == pytest.approx(expected, rel=0.1)


def test_mirrored_arms_get_the_same_requests_and_the_same_weather() -> None:
    ((treatment,), (control,)) = fleet(replace(SLOTS, private=0.0), np.random.default_rng(1))
    for what in ("prompts", "answers"):
        own, other = (getattr(replica, what)[np.argsort(replica.pair)] for replica in (treatment, control))
        assert np.array_equal(own, other)
    assert treatment.served.end_s.max() == pytest.approx(control.served.end_s.max(), abs=0.1)
    ((treatment,), (control,)) = fleet(replace(SLOTS, design="split"), np.random.default_rng(1))
    assert len(treatment.prompts) != len(control.prompts)


def test_a_wandering_rate_keeps_its_mean() -> None:
    counts = [len(arrivals(replace(SLOTS, cox=0.3), np.random.default_rng(seed))) for seed in range(60)]
    assert np.mean(counts) == pytest.approx(2400, rel=0.05)
    assert np.var(counts) > 2 * np.mean(counts)


def test_as_many_shapes_compile_as_were_asked_for() -> None:
    made = replace(SLOTS, new_shapes=4, compile_s=2.0, host_stalls=1)
    ((treatment,), (control,)) = fleet(made, np.random.default_rng(2))
    compiled = treatment.served.compiled
    assert len(compiled) == 4
    shape = -(-treatment.prompts // made.step)
    for pause in compiled:
        assert (shape[: pause.request] != shape[pause.request]).all()
    assert len(control.served.pauses) == 1


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


def test_the_shortest_may_go_first() -> None:
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
    "static batches": 1,
    "static batches, load 60 %": 1,
    "two replicas": 1,
    "client times alone": 1,
}


@pytest.fixture(scope="module")
def runs() -> list[Judged]:
    return [judge(CASES[name], seed) for name, seeds in QUICK.items() for seed in range(seeds)]


def test_spikes_that_compiles_caused_are_put_down_to_them_and_no_others(runs: list[Judged]) -> None:
    assert sum(run.spikes for run in runs) > sum(run.caused for run in runs) >= 40
    assert share(runs, "right", "caused") >= 0.94
    assert share(runs, "right", "blamed") >= 0.97
    assert share(runs, "met", "shown") >= 0.9, "no silence is taken for success"


def test_the_truth_is_a_delay_that_compiles_alone_made() -> None:
    run, delay_ms = live(CASES["private stalls"], 1)
    before = run.requests.end_ns[:] < min(event.start_ns for event in run.events)
    assert before.any()
    assert (delay_ms[before] == 0.0).all()
    # The seconds after a compile may be quicker ones.
    assert (delay_ms >= 0.85 * run.attribution.stall_ms - 50.0).all()
