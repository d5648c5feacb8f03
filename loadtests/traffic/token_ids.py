"""Prompts as token ids: for each seed the same sequence, on every machine and of every version."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from servers.config import ConfigError

FIRST_TOKEN_ID = 3  # ids below are padding, start and end of text in the common vocabularies


def prompt_token_ids(seed: int, count: int, vocab_size: int) -> list[int]:
    """The first `count` ids of the token sequence that `seed` names, uniform over [3, vocab_size).

    For equal seeds a shorter list is a prefix of a longer one. Raw Philox words are used because numpy keeps them
    equal across versions and platforms, which it does not promise for its distributions; the bias of the remainder
    is below vocab_size / 2^64.
    """
    if seed < 0:
        raise ConfigError(f"prompt seed is {seed}: give 0 or more")
    if count < 0:
        raise ConfigError(f"prompt length is {count}: give 0 or more tokens")
    if vocab_size <= FIRST_TOKEN_ID:
        raise ConfigError(f"vocab_size is {vocab_size}: give at least {FIRST_TOKEN_ID + 1}; ids 0 to 2 are reserved")
    ids: list[int] = (
        prompt_words(seed, count) % np.uint64(vocab_size - FIRST_TOKEN_ID) + np.uint64(FIRST_TOKEN_ID)
    ).tolist()
    return ids


# One generator whose key is set anew for each prompt: making one costs six times as much, most of it for entropy from
# the system that a key makes useless.
_PHILOX = np.random.Philox(key=0)
_PHILOX_START: Any = _PHILOX.state
_PHILOX_KEY = _PHILOX_START["state"]["key"]


def prompt_words(seed: int, count: int) -> npt.NDArray[np.uint64]:
    """The first `count` random words of the sequence that `seed` names: what every prompt is made from.

    Not for several threads at once.
    """
    _PHILOX_KEY[0] = seed
    _PHILOX.state = _PHILOX_START
    words: npt.NDArray[np.uint64] = _PHILOX.random_raw(count)
    return words
