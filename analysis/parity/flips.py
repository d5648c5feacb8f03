"""Tokens that the reference would not have taken, and whether noise of the allowed size explains them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from analysis.arrays import Floats, Ints
from analysis.parity.measures import Matrix, Measures
from analysis.wording import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What one arm answered.

    `tokens` [request][token] are those of its free run. `logits` [positions, vocabulary] are along the control's
    tokens, request after request; `texts` are its logits along the given texts, if any.
    """

    name: str
    tokens: Sequence[Sequence[int]]
    logits: Matrix
    texts: Matrix | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A token behind the preferred one by `lead`, where noise of the allowed size turns a lead of `bound`."""

    position: int
    token: int
    lead: float
    bound: float

    @property
    def explained(self) -> bool:
        """Whether noise explains the token."""
        return self.lead <= self.bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The request and the token of each position, from the `lengths` of continuations and of `prompts`, in tokens."""

    lengths: Sequence[int]
    prompts: Sequence[int]

    @property
    def request(self) -> Ints:
        """The request of each position."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def position(self, request: int, token: int) -> int:
        """The row of the logits for that token of that request."""
        return int(sum(self.lengths[:request])) + token

    def text(self, position: int) -> str:
        """Name the position, such as "request 3 (prompt of 57 tokens), token 5 of 24"; tokens count from 1."""
        request = int(self.request[position])
        token = position - self.position(request, 0) + 1
        asked = counted(self.prompts[request], "token")
        return f"request {request} (prompt of {asked}), token {token} of {self.lengths[request]}"


def flips_of(
    arm: Answers, left: Sequence[tuple[int, int]], measures: Measures, bound: Floats, reference: Matrix, place: Places
) -> list[Flip]:
    """Return the tokens of the arm that float64 would not have taken.

    They are those along the control's tokens, and the first token at which each of its own answers leaves the
    control's: up to there both share every token, so the reference still answers the same question.
    """
    preferred = [(int(at), int(measures.top[at])) for at in np.flatnonzero(measures.lead > 0)]
    first = [(place.position(request, token), arm.tokens[request][token]) for request, token in left]
    return taken_flips(reference, bound, dict.fromkeys([*preferred, *first]))


def taken_flips(logits: Matrix, bound: Floats, taken: Iterable[tuple[int, int]]) -> list[Flip]:
    """Return a flip, with a lead of 0 or more in `logits`, for each (position, token)."""
    flips = []
    for position, token in taken:
        row = np.asarray(logits[position], dtype=np.float64)
        lead = float(row[~np.isneginf(row)].max() - row[token])
        flips.append(Flip(position=position, token=token, lead=lead, bound=float(bound[position])))
    return flips


def departures(arm: Answers, control: Answers) -> list[tuple[int, int]]:
    """Return (request, token) where an answer first leaves the control's. ValueError where lengths differ."""
    places = []
    for request, (own, due) in enumerate(zip(arm.tokens, control.tokens, strict=True)):
        if len(own) != len(due):
            raise ValueError(f"{arm.name} answered request {request} with {len(own)} tokens, not {len(due)}")
        first = next((token for token, pair in enumerate(zip(own, due, strict=True)) if pair[0] != pair[1]), None)
        if first is not None:
            places.append((request, first))
    return places


def largest_share_of_bound(flips: Sequence[Flip]) -> float:
    """Return the largest lead as a share of its bound; 0 without a flip."""
    return max((flip.lead / flip.bound for flip in flips), default=0.0)


def worst_text(strange: Sequence[Flip], place: Places) -> str:
    """Count the unexplained flips and describe the worst."""
    worst = max(strange, key=lambda flip: flip.lead / flip.bound)
    return (
        f"Noise does not explain {counted(len(strange), 'token')}; worst at {place.text(worst.position)}: it takes "
        f"{worst.token}, and another is preferred by {worst.lead:.3g} where noise can turn {worst.bound:.2g}"
    )
