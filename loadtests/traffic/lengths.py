"""How long requests are: (input, output) token rows from built-in fits.

All drawing is vectorised and takes an explicit numpy `Generator`. Rows are drawn in order, so that the first rows
stay the same when more are drawn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tailgate.servers.complaint import ConfigError
from tailgate.servers.config import Task

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

FitName = Literal["conversation", "sentences"]

# A length is at most this before limits apply.
_MAX_LENGTH = float(2**31 - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthFit:
    """The lognormal law of token counts with mean `mu` and deviation `sigma` of the logarithm, at most `ceiling`."""

    mu: float
    sigma: float
    ceiling: float = math.inf

    def at(self, z: FloatArray) -> FloatArray:
        """Return lengths (real, tokens) at normal scores `z`. Same shape."""
        return np.minimum(np.exp(self.mu + self.sigma * z), self.ceiling)


# What an encoder behind a search reads: queries and passages. One standard deviation below the median is the mean query
# of MS MARCO, one above it the mean passage: 5.96 and 55.98 words (Thakur et al. 2021, "BEIR", table 1), at about 1.3
# WordPiece tokens a word and 2 that BERT adds. It stops at BERT's 512 positions. p50, p90, p99: 27, 100, 289 tokens.
_QUERY, _PASSAGE = math.log(1.3 * 5.96 + 2), math.log(1.3 * 55.98 + 2)

# (input, answer); None: nothing is generated.
FITS: dict[FitName, tuple[LengthFit, LengthFit | None]] = {
    # Mean and standard deviation of log tokens in the Azure 2023 conversation trace (19,366 rows).
    "conversation": (LengthFit(mu=6.633, sigma=0.985), LengthFit(mu=5.019, sigma=0.859)),
    "sentences": (LengthFit(mu=(_PASSAGE + _QUERY) / 2, sigma=(_PASSAGE - _QUERY) / 2, ceiling=512), None),
}


def workloads_of(task: Task) -> list[FitName]:
    """Return the built-in fits for requests of this task, sorted."""
    return sorted(name for name, (_, answers) in FITS.items() if (answers is None) == (task == "embed"))


def fitted_lengths(fit: FitName, count: int, *, rng: np.random.Generator) -> IntArray:
    """Return `count` rows (input, output) of tokens from a built-in fit, int64, each 1 or more; outputs are 0 where
    nothing is generated.

    Input and output are independent (log correlation in the trace: 0.09).
    """
    inputs, outputs = FITS[fit]
    scores = rng.standard_normal((count, 2))
    rows = np.zeros((count, 2), dtype=np.int64)
    rows[:, 0] = _whole(inputs.at(scores[:, 0]))
    if outputs is not None:
        rows[:, 1] = _whole(outputs.at(scores[:, 1]))
    return rows


def scaled(lengths: IntArray, scale: float | FloatArray) -> IntArray:
    """Return rows (input, output) times `scale`, or times the scale of each, shape (n, 1): rounded, never below 1. An
    output of 0 stays 0."""
    low, high = (float(edge(scale, initial=1.0)) for edge in (np.min, np.max))
    if not 0 < low <= high < math.inf:
        raise ConfigError(f"length_scale is {low if low <= 0 else high}: give a factor above 0")
    return np.where(lengths > 0, _whole(lengths * scale), 0)


def _whole(lengths: npt.NDArray[np.floating[Any]]) -> IntArray:
    whole: IntArray = np.rint(np.clip(lengths, 1.0, _MAX_LENGTH)).astype(np.int64)
    return whole
