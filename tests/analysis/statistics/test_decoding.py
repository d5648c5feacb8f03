"""Decode steps that are played from a trace."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.statistics.decoding import DecodeSteps, decode_steps
from analysis.statistics.exposure import ExposureError

REQUESTS = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 30), st.integers(1, 9)), min_size=1, max_size=30)


def played(rows: list[tuple[float, int, int]], *, slots: int, step_s: float = 1.0, **more: int) -> DecodeSteps:
    """`rows`: (seconds, prompt tokens, answer tokens)."""
    at, prompts, answers = (np.asarray(column) for column in zip(*sorted(rows), strict=True))
    return decode_steps((at * 1e9).astype(np.int64), prompts, answers, slots=slots, step_s=step_s, **more)


def test_a_request_by_itself_holds_one_position_more_each_step() -> None:
    found = played([(0, 10, 4)], slots=8)
    assert found.batch.tolist() == [1, 1, 1]
    assert found.context.tolist() == [11, 12, 13]
    assert found.end_s == 3.0


def test_requests_that_overlap_share_steps_whose_context_is_the_longest() -> None:
    # the second joins at the third step, and outlasts the first
    found = played([(0, 10, 5), (2, 50, 5)], slots=8)
    assert found.batch.tolist() == [1, 1, 2, 2, 1, 1]
    assert found.context.tolist() == [11, 12, 51, 52, 53, 54]


def test_a_slower_server_runs_more_rows_at_once_up_to_its_slots() -> None:
    rows = [(float(second), 10, 11) for second in range(20)]
    fast, slow, full = (played(rows, slots=4, step_s=step_s) for step_s in (0.05, 0.2, 1.0))
    assert fast.batch.max() == 1
    assert slow.batch.max() == 2
    assert full.batch.max() == 4
    assert full.end_s > 30


def test_answers_of_one_token_decode_nothing() -> None:
    assert played([(0, 10, 1), (1, 5, 1)], slots=2).batch.tolist() == []


def test_what_is_beyond_the_most_steps_is_counted_as_left_out() -> None:
    found = played([(0, 10, 101), (500, 10, 101)], slots=1, most_steps=50)
    assert (len(found.batch), found.left_out) == (100, 1)


@given(rows=REQUESTS, slots=st.integers(1, 5))
def test_every_token_but_the_first_is_a_row_of_one_step(rows: list[tuple[float, int, int]], slots: int) -> None:
    found = played(rows, slots=slots)
    assert found.batch.sum() == sum(answer - 1 for _, _, answer in rows)
    assert found.batch.max(initial=0) <= slots
    assert found.context.max(initial=0) <= max(prompt + answer - 1 for _, prompt, answer in rows)


@pytest.mark.parametrize(("slots", "step_s"), [(0, 1.0), (1, 0.0), (1, float("nan"))])
def test_a_server_that_cannot_be_is_refused(slots: int, step_s: float) -> None:
    with pytest.raises(ExposureError, match="give at least 1 slot"):
        played([(0, 10, 4)], slots=slots, step_s=step_s)
