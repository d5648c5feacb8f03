"""Sessions: how many turns, when, and how much context each has."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests.traffic.lengths import Lengths
from loadtests.traffic.turns import Turns, growing_context, session_turns

SECOND = 1_000_000_000


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def lengths_of(rows: list[tuple[int, int]]) -> Lengths:
    columns = np.array(rows, dtype=np.int64).reshape(-1, 2)
    return Lengths(input_tokens=columns[:, 0], output_tokens=columns[:, 1])


def test_sessions_have_the_asked_mean_turns_and_think_time() -> None:
    starts = np.arange(40_000, dtype=np.int64) * SECOND
    turns = session_turns(starts, rng(1).geometric(1 / 3, size=40_000), think_time_s=7, rng=rng(2))
    assert len(turns.session) / 40_000 == pytest.approx(3, abs=0.05)
    assert np.array_equal(turns.offset_ns[turns.turn == 0], starts)
    follows = np.flatnonzero(turns.turn > 0)
    gaps = (turns.offset_ns[follows] - turns.offset_ns[follows - 1]) / 1e9
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(7, rel=0.02)
    assert gaps.std() == pytest.approx(7, rel=0.03)


@settings(max_examples=40)
@given(counts=st.lists(st.integers(1, 6), max_size=40), seed=st.integers(0, 2**32))
def test_turns_count_up_from_zero_and_never_step_back(counts: list[int], seed: int) -> None:
    starts = np.sort(rng(seed).integers(0, 100 * SECOND, size=len(counts)))
    turns = session_turns(starts, np.array(counts, dtype=np.int64), think_time_s=1, rng=rng(seed))
    for number in range(len(counts)):
        mine = turns.session == number
        assert turns.turn[mine].tolist() == list(range(int(mine.sum())))
        assert turns.offset_ns[mine][0] == starts[number]
        assert (np.diff(turns.offset_ns[mine]) >= 0).all()


def test_a_session_of_one_turn_starts_when_it_is_due() -> None:
    starts = np.array([5, 9], dtype=np.int64)
    turns = session_turns(starts, np.array([1, 1]), think_time_s=7, rng=rng())
    assert turns.turn.tolist() == [0, 0]
    assert turns.offset_ns.tolist() == [5, 9]


def test_context_grows_by_the_inputs_and_answers_before() -> None:
    turns = Turns(session=np.array([0, 0, 0, 1]), turn=np.array([0, 1, 2, 0]), offset_ns=np.array([0, 1, 2, 0]))
    grown = growing_context(lengths_of([(10, 3), (20, 400), (30, 5), (7, 7)]), turns, max_new_tokens=100)
    # The second answer is cut to 100 tokens, so only 100 of it come back as context.
    assert grown.tolist() == [10, 10 + 3 + 20, 10 + 3 + 20 + 100 + 30, 7]
