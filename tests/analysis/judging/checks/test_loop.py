"""Whether starts wait for ends: users who think are seen, and no schedule is taken for them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from analysis.judging.checks.loop import UNKNOWN, Loop, loop_of
from analysis.judging.checks.traffic import check_open_loop, starts_after_ends
from benchmarks.simulation.loops import KINDS, SERVERS, closed_loop, open_loop, server_of, users

S = 1_000_000_000


@pytest.mark.parametrize("server", list(SERVERS))
@pytest.mark.parametrize("think_s", [0.005, 0.05, 0.5, 2.0])
@pytest.mark.parametrize("count", [1, 8, 64])
def test_users_who_think_are_not_taken_for_a_schedule(count: int, think_s: float, server: str) -> None:
    found = closed_loop(count, think_s, server, 3)
    assert found.closed or not found.known
    assert found.closed or count == 1


@pytest.mark.parametrize("server", list(SERVERS))
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_schedule_is_not_taken_for_users(kind: str, server: str) -> None:
    assert not any(open_loop(kind, server, seed).closed for seed in range(3))


@pytest.mark.parametrize("kind", ["Poisson", "a rate that wanders", "on and off", "paced", "batches"])
def test_a_schedule_is_told_from_users(kind: str) -> None:
    assert open_loop(kind, "noisy", 1).known


def test_users_who_think_five_milliseconds_are_beyond_what_follows_ends_at_once() -> None:
    rng = np.random.default_rng(0)
    starts, ends = users(8, 0.005, server_of("noisy", rng), rng)
    share, _ = starts_after_ends(starts, ends)
    assert share < 0.5
    assert loop_of(starts, ends).closed


def test_what_is_in_flight_does_not_depend_on_the_order_of_the_records() -> None:
    rng = np.random.default_rng(0)
    starts, ends = users(8, 0.5, server_of("noisy", rng), rng)
    order = rng.permutation(len(starts))
    assert loop_of(starts[order], ends[order]) == loop_of(starts, ends)


def test_a_few_requests_tell_nothing() -> None:
    for count in (0, 1, 2, 5):
        starts = np.arange(count, dtype=np.int64) ** 2 * S
        found = loop_of(starts, starts + S // 2)
        assert not found.closed
        assert not found.known
    same = np.zeros(50, dtype=np.int64)
    assert not loop_of(same, same + S).closed


def test_the_check_says_what_was_found_unless_the_records_say_how_they_were_made() -> None:
    waits, free = Loop(z=-9.0, kept=0.4), Loop(z=0.2, kept=0.95)
    assert check_open_loop(None, True, loops=[free, free]).ok
    closed = check_open_loop(None, True, loops=[free, waits])
    assert not closed.ok
    assert "closed loop" in closed.reason
    assert "60 %" in closed.reason
    untold = check_open_loop(None, True, loops=[free, UNKNOWN])
    assert not untold.ok
    assert "Nothing says" in untold.reason
    assert "open_loop" in untold.remedy
    assert check_open_loop(True, True, loops=[]).ok
    assert math.isnan(UNKNOWN.z)
