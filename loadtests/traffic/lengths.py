"""How long requests are: (input, output) token rows from built-in fits. More rows leave the first ones as they are."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from tailgate.analysis.arrays import Floats, Ints
from tailgate.servers.config import Task

FitName = Literal["conversation", "sentences"]

# A length is at most this before limits apply.
_MAX_LENGTH = float(2**31 - 1)

# What an encoder behind a search reads: queries and passages. One standard deviation below the median is the mean query
# of MS MARCO, one above it the mean passage: 5.96 and 55.98 words (Thakur et al. 2021, "BEIR", table 1), at about 1.3
# WordPiece tokens a word and 2 that BERT adds. It stops at BERT's 512 positions. p50, p90, p99: 27, 100, 289 tokens.
_QUERY, _PASSAGE = math.log(1.3 * 5.96 + 2), math.log(1.3 * 55.98 + 2)

# Lognormal laws of the input and, where something is generated, of the answer: mean and standard deviation of the log
# of tokens, and the longest.
FITS: dict[FitName, tuple[tuple[float, float, float], ...]] = {
    # The Azure 2023 conversation trace (19,366 rows).
    "conversation": ((6.633, 0.985, math.inf), (5.019, 0.859, math.inf)),
    "sentences": (((_PASSAGE + _QUERY) / 2, (_PASSAGE - _QUERY) / 2, 512),),
}
FIT_OF: dict[Task, FitName] = {"generate": "conversation", "embed": "sentences"}


def fitted_lengths(fit: FitName, count: int, *, rng: np.random.Generator) -> Ints:
    """Return `count` rows (input, output) of tokens from a built-in fit, int64, each 1 or more; outputs are 0 where
    nothing is generated.

    Input and output are independent (log correlation in the trace: 0.09).
    """
    scores = rng.standard_normal((count, 2))
    rows = np.zeros((count, 2), dtype=np.int64)
    for column, (mu, sigma, most) in enumerate(FITS[fit]):
        rows[:, column] = _whole(np.minimum(np.exp(mu + sigma * scores[:, column]), most))
    return rows


def scaled(lengths: Ints, scale: float | Floats) -> Ints:
    """Return rows (input, output) times `scale`, or times the scale of each, shape (n, 1): rounded, never below 1. An
    output of 0 stays 0."""
    return np.where(lengths > 0, _whole(lengths * scale), 0)


def _whole(lengths: Floats) -> Ints:
    whole: Ints = np.rint(np.clip(lengths, 1.0, _MAX_LENGTH)).astype(np.int64)
    return whole
