from __future__ import annotations

import time

import gevent
import pytest

from loadtests.generator import precise_sleep
from servers.clock import now_ns


@pytest.fixture(params=["kernel", "naps"])
def timer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(precise_sleep, "spare_timers", [])
    if request.param == "naps":
        monkeypatch.setattr(precise_sleep, "LIBC", None)
    elif precise_sleep.LIBC is None:
        pytest.skip("this kernel has no timerfd")
    return str(request.param)


@pytest.mark.parametrize("ahead_ms", [-1.0, 0.0, 0.05, 0.4, 3.0])
def test_a_sleep_never_ends_early(timer: str, ahead_ms: float) -> None:
    for _ in range(20):
        due = now_ns() + int(ahead_ms * 1e6)
        precise_sleep.sleep_until(due)
        assert now_ns() >= due


def test_sleepers_wake_in_the_order_of_their_moments_and_share_the_kernels_timers(timer: str) -> None:
    woken: list[int] = []
    start = now_ns() + 20_000_000

    def sleeper(number: int) -> None:
        precise_sleep.sleep_until(start + number * 10_000_000)
        woken.append(number)

    gevent.joinall([gevent.spawn(sleeper, number) for number in (3, 0, 2, 1)])
    assert woken == [0, 1, 2, 3]
    assert len(precise_sleep.spare_timers) <= 4


def test_a_killed_sleeper_leaves_a_timer_that_wakes_nobody(timer: str) -> None:
    sleeper = gevent.spawn(precise_sleep.sleep_until, now_ns() + 1_000_000)
    gevent.sleep(0)
    sleeper.kill()
    due = now_ns() + 1_400_000
    precise_sleep.sleep_until(due)
    assert now_ns() >= due


def test_others_run_while_one_sleeps(timer: str) -> None:
    turns: list[int] = []

    def other() -> None:
        for turn in range(5):
            turns.append(turn)
            gevent.sleep(0)

    gevent.spawn(other)
    precise_sleep.sleep_until(now_ns() + 1_200_000)
    assert turns == [0, 1, 2, 3, 4]


def test_the_kernels_timer_costs_no_core() -> None:
    if precise_sleep.LIBC is None:
        pytest.skip("this kernel has no timerfd")
    used, began = time.thread_time(), time.perf_counter()
    for _ in range(300):
        precise_sleep.sleep_until(now_ns() + 1_000_000)
    assert time.thread_time() - used < 0.5 * (time.perf_counter() - began)


def test_a_timer_of_the_process_that_forked_this_one_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    if precise_sleep.LIBC is None:
        pytest.skip("this kernel has no timerfd")
    monkeypatch.setattr(precise_sleep, "spare_timers", [])
    precise_sleep.sleep_until(now_ns() + 900_000)
    (first,) = precise_sleep.spare_timers
    first.process += 1
    precise_sleep.sleep_until(now_ns() + 900_000)
    assert len(precise_sleep.spare_timers) == 1
    assert precise_sleep.spare_timers[0] is not first
