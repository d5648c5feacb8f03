"""What becomes of requests that are longer than the model takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from loadtests.traffic.lengths import BoolArray, Lengths
from loadtests.traffic.turns import Turns, sum_within
from servers.complaint import ConfigError

OverLimitPolicy = Literal["clip", "drop", "fail"]


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
        kept = sum_within(over.astype(np.int64), turns.turn) == 0
        lengths = lengths.rows(kept)
    counts = OverLimit(
        policy=policy,
        input_over=int(input_over.sum()),
        output_over=int(output_over.sum()),
        requests_dropped=int((~kept).sum()),
    )
    return lengths, kept, counts
