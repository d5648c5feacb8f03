from __future__ import annotations

import numpy as np
import pytest

from analysis.arrays import Bools
from benchmarks.simulation.server import Served
from benchmarks.simulation.steps import Machine, serve_steps


def served(
    machine: Machine,
    arrivals: list[float],
    tokens: list[int],
    *,
    replicas: int = 1,
    outside: tuple[tuple[float, float], ...] = (),
    compiles: Bools | None = None,
) -> Served:
    return serve_steps(
        np.array(arrivals),
        np.array(tokens),
        lambda at: 1.0,
        machine,
        replicas=replicas,
        outside=[outside] * replicas,
        compile_s=5.0,
        compiles=compiles,
    )


PLAIN = Machine(slots=2, step_s=1.0, prompt_s=1.0)


def test_a_prompt_answers_the_first_token_and_each_step_one_more() -> None:
    assert served(PLAIN, [0.0], [3]).first_token_s.tolist() == [1.0]
    assert served(PLAIN, [0.0], [3]).end_s.tolist() == [3.0]


def test_who_finds_no_row_waits_for_one() -> None:
    made = served(PLAIN, [0.0, 0.0, 0.0], [3, 3, 1])
    assert made.start_s[2] >= made.end_s[:2].min()


def test_a_compile_stops_every_row_and_is_told_with_its_request() -> None:
    free = served(PLAIN, [0.0, 1.5], [6, 2])
    held = served(PLAIN, [0.0, 1.5], [6, 2], compiles=np.array([False, True]))
    assert (held.end_s - free.end_s).tolist() == [5.0, 5.0]
    assert [(pause.start_s, pause.seconds, pause.request) for pause in held.pauses] == [(2.0, 5.0, 1)]


def test_a_stop_from_outside_lengthens_the_step_that_it_meets_and_delays_what_comes_in_it() -> None:
    made = served(PLAIN, [0.0, 11.0], [3, 1], outside=((1.5, 2.0), (10.0, 4.0)))
    assert made.end_s.tolist() == [5.0, 15.0]
    assert made.start_s[1] == 14.0


def test_a_static_batch_is_over_before_the_next_begins() -> None:
    made = served(Machine(slots=4, step_s=1.0, prompt_s=1.0, policy="static"), [0.0, 0.5, 0.6], [5, 2, 2])
    assert made.start_s[1] == made.start_s[2] == made.end_s[0] == 5.0
    assert made.batch[1] == made.batch[2] != made.batch[0]


def test_the_splitter_sends_to_the_replica_with_the_fewest_in_flight() -> None:
    made = served(PLAIN, [0.0, 0.1, 0.2, 8.0], [20, 2, 2, 2], replicas=2)
    first = made.replica[0]
    assert (made.replica[1:] != first).sum() >= 2
    assert made.replica[3] != first


def test_rows_share_memory_and_the_shortest_may_go_first() -> None:
    tight = Machine(slots=8, step_s=1.0, prompt_s=1.0, memory=5)
    made = served(tight, [0.0, 0.0], [4, 3])
    assert made.start_s[1] >= made.end_s[0]
    short = served(Machine(slots=1, step_s=1.0, prompt_s=1.0, shortest_first=True), [0.0, 0.1, 0.2], [3, 9, 2])
    assert short.start_s[2] < short.start_s[1]
    assert short.end_s.max() == pytest.approx(14.0)
