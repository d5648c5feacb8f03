"""Whether an external arm gives the control's greedy answers: the share of equal ones, where they part, one gate.

Servers with batches do not repeat themselves to the bit: where two tokens are nearly tied, rounding chooses. So each
arm is asked twice, and only answers that both repeat count against an arm. Where equal arms repeat themselves on three
quarters of the prompts or more, both repeat and yet differ on an eighth of the other half at most, 6 %, and FAIL takes
surely more than 10 %. Decision 0019 says why the limits are what they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Final, Literal

import numpy as np

from analysis.judging.gates import FAIL, INCONCLUSIVE, PASS, Gate
from analysis.records.asked_answers import AFTER, BEFORE, AskedAnswer, Twice, answers_in
from analysis.statistics.distributions import beta_quantile, exact_share
from analysis.wording import counted, digits, percent

MOST_APART: Final = 0.1  # of the answers, may part from the control's at no near tie
# Two servers of one model in bfloat16 preferred their own tokens by more together in 2 of 300 answers.
NEAR_TIE: Final = 1.0  # nats, where the experiment does not say
FAR: Final = 3.0  # times that, which no rounding explains: a single such answer leaves parity open
# What log-probabilities of equal tokens may differ by on average, of `near_tie`. The same two: 0.029 nats.
SHIFT_SHARE: Final = 0.1
# Departures per token, where no log-probability is known. The same two, of which logits are nearly flat: 0.029.
BEYOND_ROUNDING: Final = 0.25
_CONFIDENCE: Final = 0.95
_LEAST_REPEATED: Final = 0.75
_MOST_SAMPLED: Final = 0.05
_ANALYSES: Final = 2  # before and after the load, each with its part of alpha
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyParity:
    """What was answered `when`, before or after the load, and what follows from it."""

    when: str
    answers: GreedyAnswers
    verdict: str
    reason: str


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
    low, high = exact_share(same, len(whole), confidence=_CONFIDENCE) if whole else (None, None)
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


def judge_greedy(arm: str, answers: GreedyAnswers, *, when: str, near_tie: float, alpha: float) -> GreedyParity:
    """Judge the answers, with a false FAIL of at most `alpha` of equal arms."""
    verdict, why = _finding(arm, answers, near_tie=near_tie, alpha=alpha)
    if answers.answered:
        share = f" ({percent(answers.low or 0.0)} to {percent(answers.high or 0.0)})"
        first = ""
        if answers.departs:
            middle = answers.departs[(len(answers.departs) - 1) // 2] + 1
            first = f"; half of those that differ do so by token {middle}"
        why = (
            f"{answers.same} of {answers.answered} greedy answers of {arm} {when} the load are the control's{share}"
            f"{first}; the control's own second answers: {answers.control_same}. {why}"
        )
    return GreedyParity(when=when, answers=answers, verdict=verdict, reason=why)


def _finding(arm: str, answers: GreedyAnswers, *, near_tie: float, alpha: float) -> tuple[str, str]:
    """(verdict, why): first what makes the answers useless, then what is surely wrong, then what is open."""
    if not answers.answered:
        return INCONCLUSIVE, f"No prompt was answered by both: {answers.failure or 'nothing was recorded'}."
    if not answers.same_prompts:
        return INCONCLUSIVE, (
            "The two were asked in other words (chat or text, with or without a tokenizer), so that answers may "
            "differ: ask both alike, or set parity.served = false."
        )
    if answers.sampled > _MOST_SAMPLED:
        return INCONCLUSIVE, (
            f"One of the two is not greedy: {percent(answers.sampled)} of its tokens are not the likeliest. It ignores "
            "temperature = 0."
        )
    for name, agrees in (("The control", answers.control_agrees), (arm, answers.own_agrees)):
        if agrees < _LEAST_REPEATED * answers.answered:
            return INCONCLUSIVE, (
                f"{name} does not repeat itself ({agrees} of {answers.answered}): it ignores temperature = 0, or "
                "rounds otherwise in each batch."
            )
    if _least(answers.apart, answers.answered, alpha) > MOST_APART:
        return FAIL, (
            f"{counted(answers.apart, 'answer')} that both repeat part where the two prefer their tokens by up to "
            f"{digits(answers.lead or 0.0)} nats together, which is no near tie, and {percent(MOST_APART)} is allowed."
        )
    if not answers.log_probs and answers.departs:
        if _least(len(answers.departs), answers.tokens, alpha) > BEYOND_ROUNDING:
            return FAIL, (
                f"They part at {len(answers.departs)} of the {answers.tokens} tokens compared, more than rounding "
                f"explains ({BEYOND_ROUNDING:g} a token)."
            )
        return INCONCLUSIVE, (
            "Without log-probabilities from both, near ties cannot be told from another result: serve them with such, "
            "or look at the answers."
        )
    return _open(answers, near_tie)


def _open(answers: GreedyAnswers, near_tie: float) -> tuple[str, str]:
    """What leaves it open, else PASS with what that can carry."""
    lead, shift, limit = answers.lead or 0.0, answers.shift, SHIFT_SHARE * near_tie
    if lead > FAR * near_tie:
        return INCONCLUSIVE, (
            f"An answer parts where the two prefer their tokens by {digits(lead)} nats together, which no rounding "
            "explains: look at the answers, or give more parity.prompts."
        )
    if shift is not None and shift > limit:
        return INCONCLUSIVE, (
            f"Log-probabilities of equal tokens differ by {digits(shift)} nats on average (limit {digits(limit)}): the "
            "weights or their precision are not the same, or the servers state them by other rules."
        )
    most = float(beta_quantile(_CONFIDENCE, answers.parted + 1, answers.held - answers.parted))
    if answers.parted == answers.held or most > MOST_APART:
        return INCONCLUSIVE, (
            f"Of {counted(answers.held, 'different answer')} that the control repeats {answers.parted} part at no "
            f"known near tie, so up to {percent(most if answers.parted < answers.held else 1.0)} may be others, and "
            f"{percent(MOST_APART)} is allowed: give more parity.prompts, or such as differ."
        )
    known = "No log-probabilities were reported: equal words are all that is known."
    if shift is not None:
        known = f"Log-probabilities of equal tokens differ by {digits(shift)} nats on average."
    ties = f"Where others part, the two prefer their tokens by {digits(lead)} nats at most. " if answers.departs else ""
    return PASS, f"{ties}{known} Up to {percent(most)} of all prompts may get another answer unseen."


def _least(count: int, of: int, alpha: float) -> float:
    """The one-sided lower limit of a share at level `alpha`, by Clopper and Pearson."""
    return float(beta_quantile(alpha, count, of - count + 1)) if count else 0.0


def judge_asked(
    arm: str,
    documents: Sequence[tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]],
    *,
    near_tie: float,
    alpha: float,
) -> list[GreedyParity]:
    """Judge what the control and the arm answered before the load and after it, over the trials."""
    found = []
    for when in (BEFORE, AFTER):
        twice: list[tuple[Twice, Twice]] = []
        for control, own in documents:
            base, its = answers_in(control or {}, when), answers_in(own or {}, when)
            if base is not None and its is not None and len(base[0]) == len(its[0]):
                twice.append((base, its))
        if not twice and when == AFTER:
            continue
        answers = greedy_answers([base for base, _ in twice], [its for _, its in twice], near_tie=near_tie)
        found.append(judge_greedy(arm, answers, when=when, near_tie=near_tie, alpha=alpha / _ANALYSES))
    return found


def greedy_gate(arm: str, found: Sequence[GreedyParity], *, lost: str = "") -> Gate:
    """Return the gate `parity` of an external arm. `lost` names missing records, which leave a PASS open."""
    order = (FAIL, INCONCLUSIVE, PASS)
    parities = sorted(found, key=lambda item: order.index(item.verdict))
    verdict = parities[0].verdict if parities else INCONCLUSIVE
    reasons = [item.reason for item in parities if item.verdict == verdict or verdict == PASS]
    if lost and verdict == PASS:
        verdict, reasons = INCONCLUSIVE, []
    answered = [item.answers for item in found if item.answers.answered]
    worst = max((item.apart if item.log_probs else item.answered - item.same for item in answered), default=None)
    return Gate(
        arm=arm,
        gate="parity",
        kind="parity",
        value=None if worst is None else float(worst),
        limit=None if worst is None else 0.0,
        unit="count",
        verdict=verdict,
        reason=" ".join([*([lost] if lost else []), *reasons]) or "It was not asked.",
        unseen=verdict == INCONCLUSIVE,
    )
