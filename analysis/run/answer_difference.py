"""Where two answers to one prompt part, and whether both servers saw a near tie there."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from analysis.records.asked_answers import AskedAnswer

Kind = Literal["equal", "tie", "apart", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """`at` is the index of the first token that differs, None where none does; `of`, the tokens that were compared.

    `lead` (nats) is by how much each server preferred its own token there, both added up; where a server does not tell
    of the other's token, at least so much. `shifts` (nats) are by how much the log-probability of each token before
    that differs. Up to the first difference both have read the same, and behind it no longer.
    """

    kind: Kind
    at: int | None = None
    of: int = 0
    lead: float | None = None
    shifts: tuple[float, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether the two say the same, but for near ties."""
        return self.kind in ("equal", "tie")


def difference(one: AskedAnswer, other: AskedAnswer, *, near_tie: float) -> Difference:
    """Of two answers to one prompt, with their log-probabilities where both tell them."""
    if not (one.tokens and other.tokens):
        return _of_texts(one, other)
    pairs = enumerate(zip_longest(one.tokens, other.tokens))
    at = next((place for place, (own, its) in pairs if own != its), None)
    same = min(len(one.tokens), len(other.tokens)) if at is None else at
    shifts = tuple(abs(own - its) for own, its in zip(one.log_probs[:same], other.log_probs[:same], strict=True))
    if at is None or (one.text == other.text and _is_whole(one) and _is_whole(other)):  # cut into other tokens
        return Difference(kind="equal", of=same, shifts=shifts)
    if at >= min(len(one.tokens), len(other.tokens)):  # one of them ended, which has no token to look up
        return Difference(kind="unknown", at=at, of=at + 1, shifts=shifts)
    (own, sure), (its, also) = _lead(one, other, at), _lead(other, one, at)
    lead = own + its
    kind: Kind = "apart" if lead > near_tie else "tie" if sure and also else "unknown"
    return Difference(kind=kind, at=at, of=at + 1, lead=lead, shifts=shifts)


def _lead(one: AskedAnswer, other: AskedAnswer, at: int) -> tuple[float, bool]:
    """By how much `one` preferred its token to the other's, and whether that is known and not only a least value."""
    value, likeliest = one.log_probs[at], one.likeliest[at]
    if other.tokens[at] in likeliest:
        return value - likeliest[other.tokens[at]], True
    return value - min([value, *likeliest.values()]), False


def _is_whole(answer: AskedAnswer) -> bool:
    return bool(answer.text) and "".join(answer.tokens) == answer.text


def _of_texts(one: AskedAnswer, other: AskedAnswer) -> Difference:
    """Texts say nothing of tokens: where they part is taken as a share of all tokens that were asked for."""
    of = max(one.asked, one.pieces, 1)
    if one.text == other.text:
        return Difference(kind="equal", of=of)
    pairs = enumerate(zip_longest(one.text, other.text))
    place = next(place for place, (own, its) in pairs if own != its)
    at = min(of - 1, int(place / max(1, len(one.text)) * of))
    return Difference(kind="unknown", at=at, of=at + 1)
