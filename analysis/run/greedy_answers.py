"""What an external arm answered beside the control, each asked twice: equal answers, where others part, and by how much
log-probabilities differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Final

import numpy as np

from analysis.records.asked_answers import AskedAnswer, Twice
from analysis.run.answer_difference import Difference, difference
from analysis.statistics.distributions import exact_share, t_quantile

CONFIDENCE: Final = 0.95
_SURE: Final = -1e-6  # a server all of whose tokens are this likely states what is left after it chose


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """By how much log-probabilities of the same token after the same text differ, in nats: the mean over prompts, its
    one-sided 95 % limits (None of a single prompt), and the largest of all tokens."""

    mean: float
    low: float | None
    high: float | None
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyAnswers:
    """Counts of prompts, but for `departs`, `tokens` and what is in nats.

    Of `prompts`, `answered` have all four answers with something in them; `failure` is why the first other has not.
    `same` are the control's, and `low` and `high` limit their share (95 %); `control_same` and `own_same` are each
    arm's own second answers that are its first. `departs` are the tokens at which the others part, rising, of `tokens`
    compared. `ties` are near ties, `apart` are not, and of the rest nobody knows. `held` counts the different answers
    that the control repeats, and `parted` those of them from which an answer of the arm parts at no near tie, or
    nobody knows whether. `repeated` departures are of arms that both repeat themselves, and `swapped` of the two other
    ways to make pairs of the four. `sampled` is the largest share of tokens than which others would have been likelier.
    """

    prompts: int
    answered: int
    failure: str
    same_prompts: bool  # both arms were asked in the same words
    told: bool  # both tell log-probabilities
    same: int
    low: float | None
    high: float | None
    control_same: int
    own_same: int
    control_agrees: int
    own_agrees: int
    departs: tuple[int, ...]
    tokens: int
    ties: int
    apart: int
    repeated: int
    swapped: int
    distinct: int
    held: int
    parted: int
    lead: float | None  # the largest at a departure, both servers' added up
    shift: Shift | None
    control_shift: Shift | None
    sampled: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Four:
    """Two answers of the control and two of the arm to one prompt, and the differences between them."""

    first: AskedAnswer  # of the control
    control: Difference
    own: Difference
    across: Difference  # first answers
    again: Difference  # second answers
    crossed: tuple[Difference, Difference]  # a first and a second

    @property
    def parts(self) -> bool:
        """Whether some answer of the arm is not the control's, but for near ties."""
        return not all(item.agrees for item in (self.across, self.again, *self.crossed))

    def repeated(self, told: bool) -> bool:
        """Whether both repeat themselves and differ from one another."""
        return self.control.agrees and self.own.agrees and _is_apart(self.across, told)

    def swapped(self, told: bool) -> int:
        """How many of the other two ways to make pairs of the four show what `repeated` asks of the arms."""
        if not _is_apart(self.control, told):
            return 0
        return (self.across.agrees and self.again.agrees) + all(item.agrees for item in self.crossed)


def _is_apart(item: Difference, told: bool) -> bool:
    return item.kind == "apart" if told else item.at is not None


def greedy_answers(control: Sequence[Twice], own: Sequence[Twice], *, near_tie: float) -> GreedyAnswers:
    """The figures over the trials, in each of which both were asked the same number of prompts.

    Log-probabilities count where both tell them for every answer with something in it, and not as of a server that is
    sure of every token.
    """
    fours = [four for base, arm in zip(control, own, strict=True) for four in zip(*base, *arm, strict=True)]
    whole = [four for four in fours if not any(answer.error or _is_empty(answer) for answer in four)]
    told = bool(whole) and all(
        _tells([answer for four in whole for answer in of_arm(four)]) for of_arm in (itemgetter(0, 1), itemgetter(2, 3))
    )
    if not told:
        whole = [(_untold(a), _untold(b), _untold(c), _untold(d)) for a, b, c, d in whole]
    rows = [_four(*four, near_tie=near_tie) for four in whole]
    departs = sorted(row.across.at for row in rows if row.across.at is not None)
    same = len(rows) - len(departs)
    limits = exact_share(same, len(rows), confidence=CONFIDENCE) if rows else None
    stable = [row for row in rows if row.control.agrees]
    failures = (
        answer.error or "an answer is empty" for four in fours for answer in four if answer.error or _is_empty(answer)
    )
    return GreedyAnswers(
        prompts=len(fours),
        answered=len(rows),
        failure=next(failures, ""),
        same_prompts=all(four[0].digest == four[2].digest for four in fours),
        told=told,
        same=same,
        low=None if limits is None else limits[0],
        high=None if limits is None else limits[1],
        control_same=sum(row.control.at is None for row in rows),
        own_same=sum(row.own.at is None for row in rows),
        control_agrees=len(stable),
        own_agrees=sum(row.own.agrees for row in rows),
        departs=tuple(departs),
        tokens=sum(row.across.of for row in rows),
        ties=sum(row.across.kind == "tie" for row in rows),
        apart=sum(_is_apart(row.across, told) for row in rows) if told else 0,
        repeated=sum(row.repeated(told) for row in rows),
        swapped=sum(row.swapped(told) for row in rows),
        distinct=len({_words(row.first) for row in rows}),
        held=len({_words(row.first) for row in stable}),
        parted=len({_words(row.first) for row in stable if row.parts}),
        lead=max((row.across.lead for row in rows if row.across.lead is not None), default=None),
        shift=_shift([row.across.shifts for row in rows]),
        control_shift=_shift([row.control.shifts for row in rows]),
        sampled=max((_sampled(answers, near_tie) for answers in zip(*whole, strict=True)), default=0.0),
    )


def _four(first: AskedAnswer, second: AskedAnswer, own: AskedAnswer, again: AskedAnswer, *, near_tie: float) -> _Four:
    def between(one: AskedAnswer, other: AskedAnswer) -> Difference:
        return difference(one, other, near_tie=near_tie)

    return _Four(
        first=first,
        control=between(first, second),
        own=between(own, again),
        across=between(first, own),
        again=between(second, again),
        crossed=(between(first, again), between(second, own)),
    )


def _words(answer: AskedAnswer) -> tuple[str, ...]:
    return answer.tokens or (answer.text,)


def _is_empty(answer: AskedAnswer) -> bool:
    return not (answer.text or answer.tokens)


def _tells(answers: Sequence[AskedAnswer]) -> bool:
    return all(answer.tokens for answer in answers) and any(
        value < _SURE for answer in answers for value in answer.log_probs
    )


def _untold(answer: AskedAnswer) -> AskedAnswer:
    return replace(answer, tokens=(), log_probs=(), likeliest=())


def _sampled(answers: Sequence[AskedAnswer], near_tie: float) -> float:
    """The share of their tokens than which another was likelier, by more than a near tie."""
    tokens = [
        (value, max(likeliest.values(), default=value))
        for answer in answers
        for value, likeliest in zip(answer.log_probs, answer.likeliest, strict=True)
    ]
    return sum(best - value > near_tie for value, best in tokens) / len(tokens) if tokens else 0.0


def _shift(shifts: Sequence[Sequence[float]]) -> Shift | None:
    """The unit is the prompt, since tokens of one share a context. None where no token can be compared."""
    means = np.array([np.mean(values) for values in shifts if values])
    if not means.size:
        return None
    mean, half = float(means.mean()), None
    if means.size > 1:
        half = float(t_quantile(CONFIDENCE, means.size - 1) * means.std(ddof=1) / np.sqrt(means.size))
    return Shift(
        mean=mean,
        low=None if half is None else mean - half,
        high=None if half is None else mean + half,
        most=max(max(values) for values in shifts if values),
    )
