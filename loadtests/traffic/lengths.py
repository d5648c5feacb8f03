"""How long requests are: (input, output) token rows from built-in fits or a trace, sessions, limits, prompts.

All drawing is vectorised and takes an explicit numpy `Generator`. Rows are drawn in order, so that the first rows
stay the same when more are asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from servers.config import ConfigError

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

FitName = Literal["conversation", "code", "long-context"]
OverLimitPolicy = Literal["clip", "drop", "fail"]

FIRST_TOKEN_ID = 3  # ids below are padding, start and end of text in the common vocabularies
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

    def quantile(self, p: float) -> float:
        """The length below which a share `p` of requests lies, 0 < p < 1."""
        return float(self.at(np.array([NormalDist().inv_cdf(p)]))[0])


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

FITS: dict[FitName, tuple[LengthFit, LengthFit]] = {
    "conversation": (CONVERSATION_INPUT, CONVERSATION_OUTPUT),
    "code": (CODE_INPUT, CODE_OUTPUT),
    "long-context": (LONG_CONTEXT_INPUT, LONG_CONTEXT_OUTPUT),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lengths:
    """Input and output tokens of requests, row by row: int64, equal shape (n,), every value 1 or more."""

    input_tokens: IntArray
    output_tokens: IntArray

    def __len__(self) -> int:
        return len(self.input_tokens)

    def rows(self, chosen: slice | BoolArray | IntArray) -> Lengths:
        """The chosen rows, input with its output."""
        return Lengths(input_tokens=self.input_tokens[chosen], output_tokens=self.output_tokens[chosen])

    def scaled(self, scale: float) -> Lengths:
        """Every length times `scale`, rounded, never below 1."""
        if not 0 < scale < math.inf:
            raise ConfigError(f"length_scale is {scale}: give a factor above 0")
        if scale == 1.0:
            return self
        return Lengths(input_tokens=_whole(self.input_tokens * scale), output_tokens=_whole(self.output_tokens * scale))


def fitted_lengths(fit: FitName, count: int, *, rng: np.random.Generator) -> Lengths:
    """`count` rows from a built-in fit; input and output are independent (log correlation in the trace: 0.09)."""
    if fit not in FITS:
        raise ConfigError(f'workload is "{fit}": use one of {", ".join(FITS)}, trace')
    input_fit, output_fit = FITS[fit]
    scores = rng.standard_normal((count, 2))
    return Lengths(input_tokens=_whole(input_fit.at(scores[:, 0])), output_tokens=_whole(output_fit.at(scores[:, 1])))


def resampled_lengths(
    input_tokens: npt.NDArray[np.integer],
    output_tokens: npt.NDArray[np.integer],
    count: int,
    *,
    rng: np.random.Generator,
) -> Lengths:
    """`count` rows drawn with replacement from a trace's rows, each input with its own output."""
    if len(input_tokens) != len(output_tokens) or not len(input_tokens):
        raise ConfigError(
            f"the trace has {len(input_tokens)} inputs and {len(output_tokens)} outputs: "
            "give as many of each, at least one"
        )
    chosen = resampled_rows(len(input_tokens), count, rng=rng)
    return Lengths(
        input_tokens=input_tokens[chosen].astype(np.int64), output_tokens=output_tokens[chosen].astype(np.int64)
    )


def resampled_rows(rows: int, count: int, *, rng: np.random.Generator) -> IntArray:
    """Which of `rows` rows to take, `count` times with replacement."""
    return rng.integers(0, rows, size=count)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turns:
    """The turns of all sessions, session by session and turn by turn. Shape (n,), n >= number of sessions."""

    session: IntArray  # 0, 0, 0, 1, 2, 2, ...
    turn: IntArray  # 0, 1, 2, 0, 0, 1, ...
    offset_ns: IntArray

    def rows(self, chosen: slice | BoolArray | IntArray) -> Turns:
        """The chosen rows."""
        return Turns(session=self.session[chosen], turn=self.turn[chosen], offset_ns=self.offset_ns[chosen])


def session_turns(
    starts_ns: IntArray,
    *,
    turns_mean: float,
    think_time_s: float,
    turns_rng: np.random.Generator,
    think_rng: np.random.Generator,
) -> Turns:
    """Every session's turns: 1 + a geometric number, `turns_mean` on average, exponential think times between them.

    The schedule is open loop: a turn starts one think time after the *scheduled start* of the turn before, however
    long the answer takes. `turns_mean` 1 gives every session one turn and draws nothing.
    """
    if not 1 <= turns_mean <= 1000:
        raise ConfigError(f"turns_mean is {turns_mean}: give a mean from 1 (sessions off) to 1000")
    sessions = len(starts_ns)
    if turns_mean == 1:
        return Turns(session=np.arange(sessions), turn=np.zeros(sessions, dtype=np.int64), offset_ns=starts_ns)
    counts = turns_rng.geometric(1 / turns_mean, size=sessions)
    return turns_of(starts_ns, counts, think_time_s=think_time_s, think_rng=think_rng)


def turns_of(starts_ns: IntArray, counts: IntArray, *, think_time_s: float, think_rng: np.random.Generator) -> Turns:
    """As `session_turns`, for sessions of `counts` turns, each at least 1. Shape (sessions,) both."""
    if not 0 < think_time_s < math.inf:
        raise ConfigError(f"think_time_s is {think_time_s}: give seconds above 0")
    sessions = len(starts_ns)
    session = np.repeat(np.arange(sessions), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    turn = np.arange(len(session)) - first
    gaps_ns = np.rint(think_rng.standard_exponential(len(session)) * think_time_s * 1e9).astype(np.int64)
    gaps_ns[turn == 0] = 0
    return Turns(session=session, turn=turn, offset_ns=starts_ns[session] + _sum_within(gaps_ns, turn))


def growing_context(lengths: Lengths, turns: Turns, *, max_new_tokens: int) -> Lengths:
    """Row k of a session gets the context of the turns before it: their inputs and answers, then its own input.

    Answers count at most `max_new_tokens`: more is never generated.
    """
    if not turns.turn.any():
        return lengths
    answers = np.minimum(lengths.output_tokens, max_new_tokens)
    context = _sum_within(lengths.input_tokens + answers, turns.turn) - answers
    return Lengths(input_tokens=context, output_tokens=lengths.output_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverLimit:
    """How many requests were longer than the model takes, and what became of them."""

    policy: OverLimitPolicy
    input_over: int  # requests with a prompt over the limit
    output_over: int  # requests with an answer over the limit; one request may be in both
    requests_dropped: int  # 0 unless the policy is "drop"; later turns of a cut session are among them


def within_limits(
    lengths: Lengths, turns: Turns, *, policy: OverLimitPolicy, max_prompt_tokens: int, max_new_tokens: int
) -> tuple[Lengths, BoolArray, OverLimit]:
    """Lengths that the model takes, which rows stay (shape (n,)), and the counts.

    "clip" cuts a length to its limit, "drop" ends the session before the first turn over a limit, "fail" raises
    ConfigError on the first row over a limit. The returned lengths are those of the rows that stay.
    """
    for key, limit in (("max_prompt_tokens", max_prompt_tokens), ("max_new_tokens", max_new_tokens)):
        if not 1 <= limit <= 2**31 - 1:
            raise ConfigError(f"{key} is {limit}: give a value from 1 to {2**31 - 1}")
    input_over = lengths.input_tokens > max_prompt_tokens
    output_over = lengths.output_tokens > max_new_tokens
    over = input_over | output_over
    kept = np.ones(len(lengths), dtype=np.bool_)
    if policy == "fail" and over.any():
        first = int(np.argmax(over))
        what, value, key, limit = (
            ("prompt", lengths.input_tokens[first], "max_prompt_tokens", max_prompt_tokens)
            if input_over[first]
            else ("answer", lengths.output_tokens[first], "max_new_tokens", max_new_tokens)
        )
        raise ConfigError(
            f"{int(over.sum())} of {len(over)} requests are over the model's limits; the first has a {what} of {value} "
            f'tokens and {key} is {limit}: use over_limit = "clip" or "drop", lower length_scale, or raise {key}'
        )
    if policy == "clip":
        lengths = Lengths(
            input_tokens=np.minimum(lengths.input_tokens, max_prompt_tokens),
            output_tokens=np.minimum(lengths.output_tokens, max_new_tokens),
        )
    elif policy == "drop":
        # A later turn holds the dropped one in its context, so the session ends there.
        kept = _sum_within(over.astype(np.int64), turns.turn) == 0
        lengths = lengths.rows(kept)
    elif policy != "fail":
        raise ConfigError(f'over_limit is "{policy}": use one of clip, drop, fail')
    counts = OverLimit(
        policy=policy,
        input_over=int(input_over.sum()),
        output_over=int(output_over.sum()),
        requests_dropped=int((~kept).sum()),
    )
    return lengths, kept, counts


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


def _whole(lengths: npt.NDArray[np.floating[Any]]) -> IntArray:
    whole: IntArray = np.rint(np.clip(lengths, 1.0, _MAX_LENGTH)).astype(np.int64)
    return whole


def _sum_within(values: IntArray, turn: IntArray) -> IntArray:
    """Running sums that start anew at every turn 0. Shape (n,)."""
    if not len(values):
        return values
    running = np.cumsum(values)
    starts = np.flatnonzero(turn == 0)
    before = running[starts] - values[starts]
    return running - np.repeat(before, np.diff(np.append(starts, len(values))))
