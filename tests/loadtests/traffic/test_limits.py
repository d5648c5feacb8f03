"""Requests over a limit: cut, dropped or refused, and counted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.traffic.lengths import Lengths
from loadtests.traffic.limits import OverLimitPolicy, within_limits
from loadtests.traffic.turns import Turns
from servers.fields import ConfigError

rows = st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 1000)), min_size=1, max_size=60)
limits = st.integers(1, 1000)


def lengths_of(rows: list[tuple[int, int]]) -> Lengths:
    columns = np.array(rows, dtype=np.int64).reshape(-1, 2)
    return Lengths(input_tokens=columns[:, 0], output_tokens=columns[:, 1])


def single_turns(count: int) -> Turns:
    zeros = np.zeros(count, dtype=np.int64)
    return Turns(session=np.arange(count), turn=zeros, offset_ns=zeros)


@given(rows=rows, max_prompt=limits, max_new=limits)
def test_clip_never_exceeds_a_limit_and_counts_each_side(
    rows: list[tuple[int, int]], max_prompt: int, max_new: int
) -> None:
    lengths = lengths_of(rows)
    clipped, kept, counts = within_limits(
        lengths, single_turns(len(rows)), policy="clip", max_prompt_tokens=max_prompt, max_new_tokens=max_new
    )
    assert kept.all()
    assert clipped.input_tokens.tolist() == [min(given, max_prompt) for given, _ in rows]
    assert clipped.output_tokens.tolist() == [min(asked, max_new) for _, asked in rows]
    assert counts.input_over == sum(given > max_prompt for given, _ in rows)
    assert counts.output_over == sum(asked > max_new for _, asked in rows)
    assert counts.requests_dropped == 0


@given(rows=rows, max_prompt=limits, max_new=limits)
def test_drop_keeps_exactly_the_rows_within_both_limits(
    rows: list[tuple[int, int]], max_prompt: int, max_new: int
) -> None:
    stay = [given <= max_prompt and asked <= max_new for given, asked in rows]
    left, kept, counts = within_limits(
        lengths_of(rows), single_turns(len(rows)), policy="drop", max_prompt_tokens=max_prompt, max_new_tokens=max_new
    )
    assert kept.tolist() == stay
    assert len(left) == sum(stay)
    assert counts.requests_dropped == len(rows) - sum(stay)


def test_drop_ends_the_session_at_its_first_long_turn() -> None:
    turns = Turns(
        session=np.array([0, 0, 0, 1, 1]), turn=np.array([0, 1, 2, 0, 1]), offset_ns=np.array([0, 1, 2, 0, 1])
    )
    # The second turn of the first session asks for too long an answer; its third turn would have fitted.
    lengths = lengths_of([(5, 5), (9, 50), (10, 5), (5, 5), (9, 5)])
    left, kept, counts = within_limits(lengths, turns, policy="drop", max_prompt_tokens=20, max_new_tokens=10)
    assert kept.tolist() == [True, False, False, True, True]
    assert left.input_tokens.tolist() == [5, 5, 9]
    assert (counts.input_over, counts.output_over, counts.requests_dropped) == (0, 1, 2)


def test_fail_names_the_value_the_limit_and_the_remedy() -> None:
    lengths = lengths_of([(5, 5), (640, 5), (5, 99)])
    with pytest.raises(ConfigError) as refused:
        within_limits(lengths, single_turns(3), policy="fail", max_prompt_tokens=512, max_new_tokens=64)
    message = str(refused.value)
    assert message.startswith("2 of 3 requests are over")
    assert "prompt of 640 tokens and max_prompt_tokens is 512" in message
    assert "over_limit" in message
    assert "\n" not in message
    with pytest.raises(ConfigError, match="answer of 99 tokens and max_new_tokens is 64"):
        within_limits(lengths, single_turns(3), policy="fail", max_prompt_tokens=1000, max_new_tokens=64)


@pytest.mark.parametrize("policy", ["clip", "drop", "fail"])
def test_lengths_at_the_limit_pass_untouched(policy: OverLimitPolicy) -> None:
    left, kept, counts = within_limits(
        lengths_of([(512, 64)]), single_turns(1), policy=policy, max_prompt_tokens=512, max_new_tokens=64
    )
    assert kept.all()
    assert (left.input_tokens[0], left.output_tokens[0]) == (512, 64)
    assert (counts.input_over, counts.output_over, counts.requests_dropped) == (0, 0, 0)
