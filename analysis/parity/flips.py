"""Tokens that the reference would not have taken, and whether noise of the allowed size can have chosen them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from analysis.arrays import Floats, Ints
from analysis.parity.measures import Matrix, Measures
from analysis.wording import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What one arm answered: the tokens of its free run for each request, and its logits [positions, vocabulary] along
    the control's tokens, request after request. `texts` are its logits along the texts that were given, if any."""

    name: str
    tokens: Sequence[Sequence[int]]
    logits: Matrix
    texts: Matrix | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A token that the reference would not have taken. `free`: of the free run, else along the control's tokens."""

    position: int
    token: int
    free: bool
    lead: float  # by how much the reference prefers its own token
    bound: float  # how much of a lead noise can turn round at that position

    @property
    def explained(self) -> bool:
        """Whether noise of the allowed size can have done it."""
        return self.lead <= self.bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where a position lies: which request, and which of its tokens."""

    lengths: Sequence[int]  # tokens of each request's continuation
    prompts: Sequence[int]

    @property
    def request(self) -> Ints:
        """The request of each position."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def position(self, request: int, token: int) -> int:
        """Where the logits for that token of that request stand."""
        return int(sum(self.lengths[:request])) + token

    def text(self, position: int) -> str:
        """Such as "request 3 (prompt of 57 tokens), token 5 of 24"; tokens count from 1."""
        request = int(self.request[position])
        token = position - self.position(request, 0) + 1
        asked = counted(self.prompts[request], "token")
        return f"request {request} (prompt of {asked}), token {token} of {self.lengths[request]}"


def flips_of(
    arm: Answers, control: Answers, measures: Measures, bound: Floats, reference: Matrix, place: Places
) -> list[Flip]:
    """Tokens of the arm that float64 would not have taken, along the control's tokens, and where its own answers first
    leave the control's: up to there they share every token, so the reference still knows the question."""
    leads, tokens = measures.lead, measures.top
    flips = [
        Flip(position=int(at), token=int(tokens[at]), free=False, lead=float(leads[at]), bound=float(bound[at]))
        for at in np.flatnonzero(leads > 0)
    ]
    for request, token in departures(arm, control):
        position, taken = place.position(request, token), arm.tokens[request][token]
        if taken != tokens[position]:  # else it is what the logits prefer, and counted
            flips.append(_taken(reference, bound, position, taken))
    return flips


def answered(arm: Answers, reference: Matrix, bound: Floats, place: Places) -> list[Flip]:
    """Every token of the continuation itself, as a flip of lead 0 or more."""
    return [
        _taken(reference, bound, place.position(request, token), taken)
        for request, tokens in enumerate(arm.tokens)
        for token, taken in enumerate(tokens)
    ]


def _taken(reference: Matrix, bound: Floats, position: int, token: int) -> Flip:
    row = np.asarray(reference[position], dtype=np.float64)
    lead = float(row[np.isfinite(row)].max() - row[token])
    return Flip(position=position, token=int(token), free=True, lead=lead, bound=float(bound[position]))


def departures(arm: Answers, control: Answers) -> list[tuple[int, int]]:
    """(request, token) where each answer first leaves the control's. An answer that ends early leaves at its end."""
    places = []
    for request, (own, due) in enumerate(zip(arm.tokens, control.tokens, strict=True)):
        if len(own) != len(due):
            raise ValueError(f"{arm.name} answered request {request} with {len(own)} tokens, not {len(due)}")
        first = next((token for token, pair in enumerate(zip(own, due, strict=True)) if pair[0] != pair[1]), None)
        if first is not None:
            places.append((request, first))
    return places


def largest_share_of_bound(flips: Sequence[Flip]) -> float:
    return max((flip.lead / flip.bound for flip in flips), default=0.0)
