"""Lengths, sessions, limits and prompts: the published figures, kept jointly, counted, and reproducible."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests.traffic.lengths import (
    CODE_INPUT,
    CODE_OUTPUT,
    CONVERSATION_INPUT,
    CONVERSATION_OUTPUT,
    Lengths,
    OverLimitPolicy,
    Turns,
    fitted_lengths,
    growing_context,
    prompt_token_ids,
    resampled_lengths,
    session_turns,
    within_limits,
)
from servers.config import ConfigError

SECOND = 1_000_000_000


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def lengths_of(rows: list[tuple[int, int]]) -> Lengths:
    columns = np.array(rows, dtype=np.int64).reshape(-1, 2)
    return Lengths(input_tokens=columns[:, 0], output_tokens=columns[:, 1])


def single_turns(count: int) -> Turns:
    zeros = np.zeros(count, dtype=np.int64)
    return Turns(session=np.arange(count), turn=zeros, offset_ns=zeros)


def test_conversation_fit_has_the_published_log_moments() -> None:
    drawn = fitted_lengths("conversation", 200_000, rng=rng())
    for tokens, mu, sigma in ((drawn.input_tokens, 6.633, 0.985), (drawn.output_tokens, 5.019, 0.859)):
        logs = np.log(tokens)
        assert logs.mean() == pytest.approx(mu, abs=0.01)
        assert logs.std() == pytest.approx(sigma, abs=0.01)
        # Lognormal quantiles: exp(mu + z sigma).
        expected = np.exp(mu + sigma * np.array([0.0, 1.2816, 2.3263]))
        assert np.quantile(tokens, [0.5, 0.9, 0.99]) == pytest.approx(expected, rel=0.03)


def test_code_fit_goes_through_the_published_quantiles() -> None:
    assert [CODE_INPUT.quantile(p) for p in (0.5, 0.9, 0.99)] == pytest.approx([1469, 5187, 7436])
    assert [CODE_OUTPUT.quantile(p) for p in (0.5, 0.9, 0.99)] == pytest.approx([13, 55, 251])
    drawn = fitted_lengths("code", 200_000, rng=rng())
    assert np.quantile(drawn.input_tokens, [0.5, 0.9, 0.99]) == pytest.approx([1469, 5187, 7436], rel=0.03)
    assert np.quantile(drawn.output_tokens, [0.5, 0.9, 0.99]) == pytest.approx([13, 55, 251], rel=0.05)
    assert drawn.input_tokens.max() == 7436


def test_long_context_fit_goes_through_the_quantiles_of_its_trace() -> None:
    drawn = fitted_lengths("long-context", 200_000, rng=rng())
    assert np.quantile(drawn.input_tokens, [0.5, 0.9, 0.99]) == pytest.approx([6909, 27367, 85400], rel=0.03)
    assert np.quantile(drawn.output_tokens, [0.5, 0.9, 0.99]) == pytest.approx([350, 597, 1118], rel=0.03)
    assert drawn.input_tokens.max() <= 126195
    assert drawn.output_tokens.max() <= 2000


def test_a_fit_without_a_tail_is_lognormal() -> None:
    assert CONVERSATION_INPUT.quantile(0.5) == pytest.approx(np.exp(6.633))
    assert CONVERSATION_OUTPUT.quantile(0.8413447) == pytest.approx(np.exp(5.019 + 0.859), rel=1e-5)


@pytest.mark.parametrize("fit", ["conversation", "code", "long-context"])
def test_more_rows_leave_the_first_as_they_are(fit: str) -> None:
    few = fitted_lengths(fit, 100, rng=rng())  # type: ignore[arg-type]
    many = fitted_lengths(fit, 1000, rng=rng())  # type: ignore[arg-type]
    assert np.array_equal(few.input_tokens, many.input_tokens[:100])
    assert np.array_equal(few.output_tokens, many.output_tokens[:100])


def test_unknown_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="use one of conversation, code, long-context, trace"):
        fitted_lengths("poems", 1, rng=rng())  # type: ignore[arg-type]


def test_resampling_keeps_each_input_with_its_output() -> None:
    inputs = np.arange(1, 51, dtype=np.int32)
    drawn = resampled_lengths(inputs, inputs * 7, 5000, rng=rng())
    assert np.array_equal(drawn.output_tokens, drawn.input_tokens * 7)
    assert set(drawn.input_tokens.tolist()) == set(range(1, 51))


def test_resampling_of_nothing_is_refused() -> None:
    empty = np.array([], dtype=np.int32)
    with pytest.raises(ConfigError, match="at least one"):
        resampled_lengths(empty, empty, 3, rng=rng())


def test_scaled_lengths_never_fall_below_one() -> None:
    scaled = lengths_of([(1, 1), (10, 4), (1000, 99)]).scaled(0.1)
    assert scaled.input_tokens.tolist() == [1, 1, 100]
    assert scaled.output_tokens.tolist() == [1, 1, 10]
    for bad in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="length_scale"):
            lengths_of([(1, 1)]).scaled(bad)


rows = st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 1000)), min_size=1, max_size=60)
limits = st.integers(1, 1000)


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


def test_limits_below_one_and_unknown_policies_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_new_tokens is 0"):
        within_limits(lengths_of([(1, 1)]), single_turns(1), policy="clip", max_prompt_tokens=1, max_new_tokens=0)
    with pytest.raises(ConfigError, match="use one of clip, drop, fail"):
        within_limits(
            lengths_of([(1, 1)]),
            single_turns(1),
            policy="cut",  # type: ignore[arg-type]
            max_prompt_tokens=1,
            max_new_tokens=1,
        )


def test_sessions_have_the_asked_mean_turns_and_think_time() -> None:
    starts = np.arange(40_000, dtype=np.int64) * SECOND
    turns = session_turns(starts, turns_mean=3, think_time_s=7, turns_rng=rng(1), think_rng=rng(2))
    assert len(turns.session) / 40_000 == pytest.approx(3, abs=0.05)
    assert np.array_equal(turns.offset_ns[turns.turn == 0], starts)
    follows = np.flatnonzero(turns.turn > 0)
    gaps = (turns.offset_ns[follows] - turns.offset_ns[follows - 1]) / 1e9
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(7, rel=0.02)
    assert gaps.std() == pytest.approx(7, rel=0.03)


@settings(max_examples=40, deadline=None)
@given(sessions=st.integers(0, 40), turns_mean=st.floats(1, 6), seed=st.integers(0, 2**32))
def test_turns_count_up_from_zero_and_never_step_back(sessions: int, turns_mean: float, seed: int) -> None:
    starts = np.sort(rng(seed).integers(0, 100 * SECOND, size=sessions))
    turns = session_turns(starts, turns_mean=turns_mean, think_time_s=1, turns_rng=rng(seed), think_rng=rng(seed + 1))
    for number in range(sessions):
        mine = turns.session == number
        assert turns.turn[mine].tolist() == list(range(int(mine.sum())))
        assert turns.offset_ns[mine][0] == starts[number]
        assert (np.diff(turns.offset_ns[mine]) >= 0).all()


def test_turns_mean_of_one_is_one_turn_a_session() -> None:
    starts = np.array([5, 9], dtype=np.int64)
    turns = session_turns(starts, turns_mean=1, think_time_s=7, turns_rng=rng(), think_rng=rng())
    assert turns.turn.tolist() == [0, 0]
    assert turns.offset_ns.tolist() == [5, 9]


@pytest.mark.parametrize(("turns_mean", "think_time_s"), [(0.5, 1.0), (float("nan"), 1.0), (2.0, 0.0), (2.0, -1.0)])
def test_nonsense_sessions_are_refused(turns_mean: float, think_time_s: float) -> None:
    with pytest.raises(ConfigError, match=r"(turns_mean|think_time_s) is"):
        session_turns(np.array([0]), turns_mean=turns_mean, think_time_s=think_time_s, turns_rng=rng(), think_rng=rng())


def test_context_grows_by_the_inputs_and_answers_before() -> None:
    turns = Turns(session=np.array([0, 0, 0, 1]), turn=np.array([0, 1, 2, 0]), offset_ns=np.array([0, 1, 2, 0]))
    grown = growing_context(lengths_of([(10, 3), (20, 400), (30, 5), (7, 7)]), turns, max_new_tokens=100)
    # The second answer is cut to 100 tokens, so only 100 of it come back as context.
    assert grown.input_tokens.tolist() == [10, 10 + 3 + 20, 10 + 3 + 20 + 100 + 30, 7]
    assert grown.output_tokens.tolist() == [3, 400, 5, 7]


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**63 - 1),
    short=st.integers(0, 200),
    more=st.integers(0, 200),
    vocab_size=st.integers(4, 200_000),
)
def test_shorter_prompt_is_a_prefix_of_the_longer(seed: int, short: int, more: int, vocab_size: int) -> None:
    long = prompt_token_ids(seed, short + more, vocab_size)
    assert prompt_token_ids(seed, short, vocab_size) == long[:short]
    assert len(long) == short + more
    assert all(type(token) is int and 3 <= token < vocab_size for token in long)


def test_prompt_ids_are_uniform_and_differ_between_seeds() -> None:
    ids = np.array(prompt_token_ids(11, 97_000, 100))
    counts = np.bincount(ids, minlength=100)[3:]
    # Chi-square with 96 degrees of freedom: mean 96, standard deviation 13.9.
    assert ((counts - 1000) ** 2 / 1000).sum() < 96 + 4 * 13.9
    assert prompt_token_ids(11, 20, 50_000) != prompt_token_ids(12, 20, 50_000)


def test_prompt_ids_stay_equal_across_versions() -> None:
    # Philox4x64-10 is fixed by its paper; these ids must never change, or old runs could not be repeated.
    assert prompt_token_ids(0, 4, 1003) == [262, 461, 52, 559]


@pytest.mark.parametrize(("seed", "count", "vocab_size"), [(-1, 1, 100), (0, -1, 100), (0, 1, 3)])
def test_nonsense_prompts_are_refused(seed: int, count: int, vocab_size: int) -> None:
    with pytest.raises(ConfigError, match="give"):
        prompt_token_ids(seed, count, vocab_size)
