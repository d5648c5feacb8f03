"""Which stalls are called compiles, and how many of the calls may be wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from analysis.blackbox.calls import WRONG, Evidence, calls, wrong_shares

EMPTY = Evidence(
    new=np.zeros(0, dtype=np.bool_),
    begun=np.zeros(0, dtype=np.bool_),
    beyond=np.zeros(0, dtype=np.bool_),
    seconds=np.zeros(0),
    chance=np.zeros(0),
    chance_as_long=np.zeros(0),
    longest=np.zeros(0),
)


def evidence(new: int, *, others: int = 0, empty: int = 0, chance: float = 0.1, others_s: float = 3.0) -> Evidence:
    """Stalls of 3 s that began with first-seen shapes, others that began with known ones, and with no request."""
    count = new + others + empty
    return Evidence(
        new=np.arange(count) < new,
        begun=np.arange(count) < new + others,
        beyond=np.ones(count, dtype=np.bool_),
        seconds=np.where(np.arange(count) < new, 3.0, others_s),
        chance=np.where(np.arange(count) < new + others, chance, 0.0),
        chance_as_long=np.full(count, 0.6),
        longest=np.full(count, 0.5),
    )


def test_stalls_are_called_where_nothing_else_stalls() -> None:
    called, p_value = calls(evidence(4))
    assert called.all()
    assert p_value < 1e-3


def test_a_few_among_as_many_others_are_not_called_and_many_are() -> None:
    few, _ = calls(evidence(3, others=3, chance=0.2))
    assert not few.any()
    many, _ = calls(evidence(40, others=2, chance=0.2))
    assert many[:40].all()
    assert not many[40:].any(), "what began with a known shape is no compile"


def test_stalls_that_no_request_began_with_show_that_there_are_other_reasons() -> None:
    alone = wrong_shares(evidence(5), long=False)[0]
    beside = wrong_shares(evidence(5, empty=3), long=False)[0]
    assert alone < WRONG < beside


def test_other_stalls_count_the_less_the_more_their_length_differs() -> None:
    shares = [wrong_shares(evidence(6, others=1, others_s=seconds), long=False)[0] for seconds in (3.0, 2.0, 0.5)]
    assert shares[0] > shares[1] > shares[2]


def test_stalls_about_as_long_that_go_by_the_length_of_prompts_are_held_to_prompts_as_long() -> None:
    made = evidence(12)
    by_length = replace(made, longest=np.where(np.arange(12) < 6, 0.9, 0.3), seconds=np.repeat([1.2, 3.0], 6))
    shares = wrong_shares(by_length, long=False)
    assert shares[:6].min() > 3.0 * shares[6:].max()
    called, _ = calls(replace(by_length, chance_as_long=np.full(12, 0.9)))
    assert called.tolist() == [False] * 6 + [True] * 6


def test_stalls_that_prompts_may_have_made_are_never_called() -> None:
    made = evidence(6)
    called, _ = calls(replace(made, beyond=np.arange(6) < 5))
    assert called.tolist() == [True] * 5 + [False]


@pytest.mark.parametrize(("with_others", "limit"), [(0.2, 0.02), (1.0, 0.04)])
def test_calls_are_right_as_often_as_promised(with_others: float, limit: float) -> None:
    rng = np.random.default_rng(5)
    right = wrong = 0
    for _ in range(200):
        compiles, others = int(rng.integers(0, 20)), int(rng.integers(0, 4) * (rng.uniform() < with_others))
        chance = rng.uniform(0.02, 0.3, compiles + others)
        made = evidence(compiles + others)
        truth = np.arange(compiles + others) < compiles
        seconds = rng.uniform(1.0, 5.0, compiles + others)
        new = np.where(truth, rng.uniform(size=truth.size) < 0.97, rng.uniform(size=truth.size) < chance)
        called, _ = calls(replace(made, new=new, chance=chance, seconds=seconds, longest=rng.uniform(size=truth.size)))
        right += int((called & truth).sum())
        wrong += int((called & ~truth).sum())
    assert right > 500
    assert wrong <= limit * (right + wrong)


def test_no_stall_is_no_call() -> None:
    called, p_value = calls(EMPTY)
    assert (called.size, p_value) == (0, 1.0)
