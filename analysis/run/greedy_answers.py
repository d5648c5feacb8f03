"""What an external arm answered and the control did, each asked twice: equal answers, and where the others part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Final, Literal

import numpy as np

from analysis.records.asked_answers import AskedAnswer, Twice
from analysis.statistics.distributions import exact_share

CONFIDENCE: Final = 0.95
_CERTAIN: Final = -1e-6  # a server all of whose tokens are this likely states what is left after it chose


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first difference of two answers to one prompt.

    `at` is the index of the first token that differs, None without one; `of`, the tokens that were compared. `lead`
    (nats) is by how much each server preferred its own token there, both added up; where a server does not report the
    other's token, at least so much. `shifts` (nats) are by how much the log-probability of each token before differs.
    """

    kind: Literal["equal", "tie", "apart", "unknown"]
    at: int | None = None
    of: int = 0
    lead: float | None = None
    shifts: tuple[float, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether the two say the same, but for near ties."""
        return self.kind in ("equal", "tie")


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyAnswers:
    """Counts of prompts, but for `departs`, `tokens` and what is in nats.

    Of `prompts`, `answered` have all four answers with something in them; `failure` is why the first other has not.
    `same` are the control's, and `low` and `high` limit their share (95 %); `control_same` are the control's second
    answers that are its first, `control_agrees` and `own_agrees` the same but for near ties, of each arm. `departs` are
    the tokens at which the others part, rising, of `tokens` compared. `apart` part at no near tie though both repeat
    themselves. `held` counts the different answers that the control repeats, and `parted` those of them from which an
    answer of the arm parts at no near tie, or at an unknown one. `lead` is the largest, `shift` the mean over prompts.
    `sampled` is the largest share of an arm's tokens than which another was likelier by more than a near tie.
    """

    prompts: int
    answered: int
    failure: str
    same_prompts: bool  # both arms were asked in the same words
    log_probs: bool  # both report them
    same: int
    low: float | None
    high: float | None
    control_same: int
    control_agrees: int
    own_agrees: int
    departs: tuple[int, ...]
    tokens: int
    apart: int
    held: int
    parted: int
    lead: float | None
    shift: float | None
    sampled: float


def difference(one: AskedAnswer, other: AskedAnswer, *, near_tie: float) -> Difference:
    """Return the first difference of two answers, with log-probabilities where both report them."""
    if not (one.tokens and other.tokens):
        return _of_texts(one, other)
    at = _first_difference(one.tokens, other.tokens)
    same = min(len(one.tokens), len(other.tokens)) if at is None else at
    shifts = tuple(abs(own - its) for own, its in zip(one.log_probs[:same], other.log_probs[:same], strict=True))
    if at is None or (one.text == other.text and _is_whole(one) and _is_whole(other)):  # cut into other tokens
        return Difference(kind="equal", of=same, shifts=shifts)
    if at >= min(len(one.tokens), len(other.tokens)):  # one of them ended, which has no token to look up
        return Difference(kind="unknown", at=at, of=at + 1, shifts=shifts)
    (own, exact), (its, also) = _lead(one, other, at), _lead(other, one, at)
    lead = own + its
    kind: Literal["tie", "apart", "unknown"] = "apart" if lead > near_tie else "tie" if exact and also else "unknown"
    return Difference(kind=kind, at=at, of=at + 1, lead=lead, shifts=shifts)


def _first_difference(one: Sequence[str], other: Sequence[str]) -> int | None:
    return next((place for place, (own, its) in enumerate(zip_longest(one, other)) if own != its), None)


def _lead(one: AskedAnswer, other: AskedAnswer, at: int) -> tuple[float, bool]:
    """By how much `one` preferred its token to the other's, and whether that is exact and not only a least value."""
    value, likeliest = one.log_probs[at], one.likeliest[at]
    if other.tokens[at] in likeliest:
        return value - likeliest[other.tokens[at]], True
    return value - min([value, *likeliest.values()]), False


def _is_whole(answer: AskedAnswer) -> bool:
    return bool(answer.text) and "".join(answer.tokens) == answer.text


def _of_texts(one: AskedAnswer, other: AskedAnswer) -> Difference:
    """Texts have no tokens: where they part is taken as a share of all tokens that were asked for."""
    of = max(one.asked, one.pieces, 1)
    place = _first_difference(one.text, other.text)
    if place is None:
        return Difference(kind="equal", of=of)
    at = min(of - 1, int(place / max(1, len(one.text)) * of))
    return Difference(kind="unknown", at=at, of=at + 1)


def greedy_answers(control: Sequence[Twice], own: Sequence[Twice], *, near_tie: float) -> GreedyAnswers:
    """Count over the trials, in each of which both were asked the same number of prompts.

    Log-probabilities count where both report them for every answer, and not as of a server that is certain of every
    token.
    """
    fours = [four for base, arm in zip(control, own, strict=True) for four in zip(*base, *arm, strict=True)]
    whole: list[tuple[AskedAnswer, ...]] = [four for four in fours if not any(map(_failure, four))]
    log_probs = all(_reports([answer for four in whole for answer in four[arm : arm + 2]]) for arm in (0, 2))
    if not log_probs:
        whole = [tuple(replace(item, tokens=(), log_probs=(), likeliest=()) for item in four) for four in whole]

    def between(pairs: Sequence[tuple[int, int]]) -> list[list[Difference]]:
        return [[difference(four[one], four[two], near_tie=near_tie) for one, two in pairs] for four in whole]

    control_pairs = [pair for (pair,) in between([(0, 1)])]
    own_agree = [pair.agrees for (pair,) in between([(2, 3)])]
    across = between([(0, 2), (1, 3), (0, 3), (1, 2)])
    firsts = [row[0] for row in across]
    departs = sorted(item.at for item in firsts if item.at is not None)
    same = len(whole) - len(departs)
    low, high = exact_share(same, len(whole), confidence=CONFIDENCE) if whole else (None, None)
    held = [
        (four[0].tokens or (four[0].text,), row)
        for four, pair, row in zip(whole, control_pairs, across, strict=True)
        if pair.agrees
    ]
    repeated = zip(firsts, control_pairs, own_agree, strict=True)
    shifts = [float(np.mean(item.shifts)) for item in firsts if item.shifts]
    return GreedyAnswers(
        prompts=len(fours),
        answered=len(whole),
        failure=next(filter(None, (_failure(answer) for four in fours for answer in four)), ""),
        same_prompts=all(four[0].digest == four[2].digest for four in fours),
        log_probs=log_probs,
        same=same,
        low=low,
        high=high,
        control_same=sum(pair.at is None for pair in control_pairs),
        control_agrees=len(held),
        own_agrees=sum(own_agree),
        departs=tuple(departs),
        tokens=sum(item.of for item in firsts),
        apart=sum(item.kind == "apart" and pair.agrees and own for item, pair, own in repeated),
        held=len({words for words, _ in held}),
        parted=len({words for words, row in held if not all(item.agrees for item in row)}),
        lead=max((item.lead for item in firsts if item.lead is not None), default=None),
        shift=float(np.mean(shifts)) if shifts else None,
        sampled=max((_sampled(answers, near_tie) for answers in zip(*whole, strict=True)), default=0.0),
    )


def _sampled(answers: Sequence[AskedAnswer], near_tie: float) -> float:
    behind = [
        max(likeliest.values(), default=value) - value > near_tie
        for answer in answers
        for value, likeliest in zip(answer.log_probs, answer.likeliest, strict=True)
    ]
    return sum(behind) / len(behind) if behind else 0.0


def _failure(answer: AskedAnswer) -> str:
    return answer.error or ("" if answer.text or answer.tokens else "an answer is empty")


def _reports(answers: Sequence[AskedAnswer]) -> bool:
    """Whether every answer has log-probabilities, of a server that is not certain of every token."""
    return all(item.tokens for item in answers) and any(
        value < _CERTAIN for item in answers for value in item.log_probs
    )
