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

from servers.complaint import ConfigError
from servers.config import Task

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
        """Lengths (real, tokens) at normal scores `z`. Same shape."""
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
    """The built-in fits for requests of this task, sorted."""
    return sorted(name for name, (_, answers) in FITS.items() if (answers is None) == (task == "embed"))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lengths:
    """Input and output tokens of requests, row by row: int64, equal shape (n,), every value 1 or more.

    All outputs are 0 where nothing is generated.
    """

    input_tokens: IntArray
    output_tokens: IntArray

    def __len__(self) -> int:
        return len(self.input_tokens)

    def scaled(self, scale: float | npt.NDArray[np.float64]) -> Lengths:
        """Every length times `scale`, or times its own, shape (n,), rounded, never below 1."""
        low, high = (float(edge(scale, initial=1.0)) for edge in (np.min, np.max))
        if not 0 < low <= high < math.inf:
            raise ConfigError(f"length_scale is {low if low <= 0 else high}: give a factor above 0")
        if low == high == 1.0:
            return self
        inputs = _whole(self.input_tokens * scale)
        if not self.output_tokens.any():
            return Lengths(input_tokens=inputs, output_tokens=self.output_tokens)
        return Lengths(input_tokens=inputs, output_tokens=_whole(self.output_tokens * scale))


def fitted_lengths(fit: FitName, count: int, *, rng: np.random.Generator) -> Lengths:
    """`count` rows from a built-in fit; input and output are independent (log correlation in the trace: 0.09)."""
    input_fit, output_fit = FITS[fit]
    scores = rng.standard_normal((count, 2))
    inputs = _whole(input_fit.at(scores[:, 0]))
    outputs = np.zeros_like(inputs) if output_fit is None else _whole(output_fit.at(scores[:, 1]))
    return Lengths(input_tokens=inputs, output_tokens=outputs)


def _whole(lengths: npt.NDArray[np.floating[Any]]) -> IntArray:
    whole: IntArray = np.rint(np.clip(lengths, 1.0, _MAX_LENGTH)).astype(np.int64)
    return whole
