"""What prompts take by themselves, by the silences that their first tokens ended."""

from __future__ import annotations

import math

import numpy as np
import pytest

from analysis.blackbox.prefills import Prefills, Work


def prefills(tokens: list[float], seconds_a_token: float = 1e-3, *, new: list[bool] | None = None) -> Prefills:
    array = np.array(tokens, dtype=np.float64)
    return Prefills(tokens=array, seconds=array * seconds_a_token, new=np.array(new or [False] * len(tokens), np.bool_))


MANY = [float(tokens) for tokens in range(100, 3100, 50)]


def test_a_stall_as_long_as_prompts_of_its_length_take_is_their_work() -> None:
    work = Work.of(prefills(MANY), [])
    assert work.explains(2000, 2.0)
    assert work.explains(2000, 1.0), "shorter than usual is no stall"
    assert not work.explains(2000, 4.0)
    assert not work.explains(200, 2.0)
    assert not work.explains(0, 0.1), "no prompt was run"


def test_the_limit_has_room_for_noise_and_grows_with_the_square_beyond_what_was_seen() -> None:
    work = Work.of(prefills(MANY), [])
    assert 2.0 <= work.at_most_s(2000) <= 5.0
    longest = work.at_most_s(3000)
    assert work.at_most_s(6000) == pytest.approx(4.0 * longest, rel=0.5)
    assert work.at_most_s(100) <= 0.5


def test_one_accident_does_not_raise_the_limit_and_two_do() -> None:
    plain, one, two = prefills(MANY), prefills(MANY), prefills(MANY)
    one.seconds[30] = two.seconds[30] = two.seconds[31] = 30.0
    limits = [Work.of(part, []).at_most_s(MANY[30]) for part in (plain, one, two)]
    assert limits[1] <= 1.1 * limits[0]
    assert limits[2] > 20.0


def test_first_seen_lengths_tell_nothing_of_work_on_the_arm_that_may_have_compiled_them() -> None:
    slow = prefills([*MANY, *[4000.0] * 5], new=[False] * len(MANY) + [True] * 5)
    slow.seconds[-5:] = 60.0
    assert Work.of(slow, []).at_most_s(4000) < 15.0


def test_another_arm_tells_of_work_at_its_own_pace() -> None:
    fast = prefills([*MANY, *[9000.0] * 5], 1e-4)
    work = Work.of(prefills(MANY), [fast])
    assert work.explains(9000, 9.0), "the other arm took 0.9 s and is ten times as fast"
    assert not work.explains(9000, 20.0)


def test_too_little_is_known_of_a_few() -> None:
    for part in (prefills([]), prefills([500.0] * 4)):
        assert Work.of(part, []).at_most_s(500) == math.inf
        assert not Work.of(part, [prefills([])]).explains(500, 3.0)
