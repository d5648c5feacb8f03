"""What prompts are made of: for each seed the same random words, on every machine and of every version."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_FIRST_TOKEN_ID = np.uint64(3)  # ids below are padding, start and end of text in the common vocabularies

Words = npt.NDArray[np.uint64]

# One generator whose key is set anew for each prompt: making one costs six times as much, most of it for entropy from
# the system that a key makes useless.
_PHILOX = np.random.Philox(key=0)
_PHILOX_START: Any = _PHILOX.state
_PHILOX_KEY = _PHILOX_START["state"]["key"]


def prompt_words(seed: int, count: int) -> Words:
    """The first `count` random words of the sequence that `seed` names: what every prompt is made from.

    For equal seeds fewer words are the beginning of more. Raw Philox words are used because numpy keeps them equal
    across versions and platforms, which it does not promise for its distributions. Not for several threads at once.
    """
    _PHILOX_KEY[0] = seed
    _PHILOX.state = _PHILOX_START
    words: Words = _PHILOX.random_raw(count)
    return words


def token_ids(words: Words, vocab_size: int) -> list[int]:
    """A token id for each of `words`, uniform over [3, vocab_size) but for a bias below vocab_size / 2^64."""
    ids: list[int] = (words % (np.uint64(vocab_size) - _FIRST_TOKEN_ID) + _FIRST_TOKEN_ID).tolist()
    return ids
