"""Prompts as token ids: reproducible on every machine."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests.traffic.token_ids import prompt_token_ids
from servers.config import ConfigError


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
