"""Prompt words and their token ids: reproducible on every machine."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests.traffic.prompt_words import prompt_words, token_ids


@settings(max_examples=50)
@given(
    seed=st.integers(0, 2**63 - 1),
    short=st.integers(0, 200),
    more=st.integers(0, 200),
    vocab_size=st.integers(4, 200_000),
)
def test_shorter_prompt_is_a_prefix_of_the_longer(seed: int, short: int, more: int, vocab_size: int) -> None:
    long = token_ids(prompt_words(seed, short + more), vocab_size)
    assert token_ids(prompt_words(seed, short), vocab_size) == long[:short]
    assert len(long) == short + more
    assert all(type(token) is int and 3 <= token < vocab_size for token in long)


def test_prompt_ids_are_uniform_and_differ_between_seeds() -> None:
    ids = np.array(token_ids(prompt_words(11, 97_000), 100))
    counts = np.bincount(ids, minlength=100)[3:]
    # Chi-square with 96 degrees of freedom: mean 96, standard deviation 13.9.
    assert ((counts - 1000) ** 2 / 1000).sum() < 96 + 4 * 13.9
    assert token_ids(prompt_words(11, 20), 50_000) != token_ids(prompt_words(12, 20), 50_000)


def test_prompt_ids_stay_equal_across_versions() -> None:
    # Philox4x64-10 is fixed by its paper; these ids must never change, or old runs could not be repeated.
    assert token_ids(prompt_words(0, 4), 1003) == [262, 461, 52, 559]
