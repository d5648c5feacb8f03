"""How long requests are: (input, output) token rows from built-in fits.

All drawing is vectorised and takes an explicit numpy `Generator`. Rows are drawn in order, so that the first rows
stay the same when more are drawn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from servers.complaint import ConfigError
from servers.config import Task

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

FitName = Literal["conversation", "code", "long-context", "sentences"]

_Z90 = NormalDist().inv_cdf(0.90)
_Z99 = NormalDist().inv_cdf(0.99)
# A length is at most this before limits apply: sums of many turns then stay far inside 64 bits.
_MAX_LENGTH = float(2**31 - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthFit:
    """A law of token counts whose logarithm is a broken line over the normal score z.

    log length = mu + sigma * z up to z = tail_from, and goes on with slope sigma_tail above; at most `ceiling`.
    Without a tail it is the lognormal law.
    """

    mu: float
    sigma: float
    sigma_tail: float | None = None
    tail_from: float = _Z90
    ceiling: float = math.inf

    @classmethod
    def from_quantiles(cls, *, p50: float, p90: float, p99: float, ceiling: float = math.inf) -> Self:
        """The law that goes exactly through three quantiles; its lower half mirrors the line from p50 to p90."""
        return cls(
            mu=math.log(p50),
            sigma=math.log(p90 / p50) / _Z90,
            sigma_tail=math.log(p99 / p90) / (_Z99 - _Z90),
            ceiling=ceiling,
        )

    def at(self, z: FloatArray) -> FloatArray:
        """Lengths (real, tokens) at normal scores `z`. Same shape."""
        log_length = self.mu + self.sigma * z
        if self.sigma_tail is not None:
            log_length += (self.sigma_tail - self.sigma) * np.maximum(z - self.tail_from, 0.0)
        return np.minimum(np.exp(log_length), self.ceiling)


# Mean and standard deviation of log tokens in the Azure 2023 conversation trace (19,366 rows).
CONVERSATION_INPUT = LengthFit(mu=6.633, sigma=0.985)
CONVERSATION_OUTPUT = LengthFit(mu=5.019, sigma=0.859)
# Through the published quantiles of the Azure 2023 code trace. Its inputs pile up at the service's own limit, which is
# the p99: the fit stops there.
CODE_INPUT = LengthFit.from_quantiles(p50=1469, p90=5187, p99=7436, ceiling=7436)
CODE_OUTPUT = LengthFit.from_quantiles(p50=13, p90=55, p99=251)
# Through the quantiles of the Mooncake conversation trace (12,031 rows); inputs stop at its largest. A tenth of the
# trace's answers are shorter than 24 tokens, of which the fit has none: its lower half mirrors the upper one.
LONG_CONTEXT_INPUT = LengthFit.from_quantiles(p50=6909, p90=27367, p99=85400, ceiling=126195)
LONG_CONTEXT_OUTPUT = LengthFit.from_quantiles(p50=350, p90=597, p99=1118, ceiling=2000)

# What an encoder behind a search reads: queries and passages. One standard deviation below the median is the mean query
# of MS MARCO, one above it the mean passage: 5.96 and 55.98 words (Thakur et al. 2021, "BEIR", table 1), at about 1.3
# WordPiece tokens a word and 2 that BERT adds. It stops at BERT's 512 positions. p50, p90, p99: 27, 100, 289 tokens.
_QUERY_TOKENS, _PASSAGE_TOKENS = 1.3 * 5.96 + 2, 1.3 * 55.98 + 2
SENTENCE_INPUT = LengthFit(
    mu=(math.log(_PASSAGE_TOKENS) + math.log(_QUERY_TOKENS)) / 2,
    sigma=(math.log(_PASSAGE_TOKENS) - math.log(_QUERY_TOKENS)) / 2,
    ceiling=512,
)

# None: nothing is generated.
FITS: dict[FitName, tuple[LengthFit, LengthFit | None]] = {
    "conversation": (CONVERSATION_INPUT, CONVERSATION_OUTPUT),
    "code": (CODE_INPUT, CODE_OUTPUT),
    "long-context": (LONG_CONTEXT_INPUT, LONG_CONTEXT_OUTPUT),
    "sentences": (SENTENCE_INPUT, None),
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

    def rows(self, chosen: slice | BoolArray | IntArray) -> Lengths:
        """The chosen rows, input with its output."""
        return Lengths(input_tokens=self.input_tokens[chosen], output_tokens=self.output_tokens[chosen])

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

    def without_answers(self) -> Lengths:
        """The same inputs, of requests for which nothing is generated."""
        return Lengths(input_tokens=self.input_tokens, output_tokens=np.zeros_like(self.output_tokens))


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
