"""Greedy parity: an external arm gives the control's answers, but for near ties (`parity.served`).

Both are asked twice, as servers with batches do not repeat themselves to the bit: rounding chooses where two tokens are
nearly tied. Only answers that both repeat count against the arm. Where equal arms repeat themselves on three quarters
of the prompts or more, both repeat and yet differ on an eighth of the other half at most, 6 %, and FAIL takes surely
more than 10 %. Decision 0019 says why the limits are what they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Final, Literal

import numpy as np

from analysis.judging.gates import FAIL, INCONCLUSIVE, PASS, Gate
from analysis.records.asked_answers import AFTER, BEFORE, AskedAnswer, Twice, answers_in
from analysis.records.plain_values import mapping, number
from analysis.run.run import Run
from analysis.statistics.distributions import beta_quantile
from analysis.wording import counted, digits, percent

CONFIDENCE: Final = 0.95
MOST_APART: Final = 0.1  # of the answers, may part from the control's at no near tie
# Two servers of one model in bfloat16 preferred their own tokens by more together in 2 of 300 answers.
NEAR_TIE: Final = 1.0  # nats, where the experiment does not say
FAR: Final = 3.0  # times that, which no rounding explains: a single such answer leaves parity open
# What log-probabilities of equal tokens may differ by on average, of `near_tie`. The same two: 0.029 nats.
SHIFT_SHARE: Final = 0.1
# Departures per token, where no log-probability is known. The same two, of which logits are nearly flat: 0.029.
BEYOND_ROUNDING: Final = 0.25
_LEAST_REPEATED: Final = 0.75
_MOST_SAMPLED: Final = 0.05
_TIMES_ASKED: Final = 2  # before and after the load, each with its part of alpha
_CERTAIN: Final = -1e-6  # a server all of whose tokens are this likely states what is left after it chose
_ORDER = (FAIL, INCONCLUSIVE, PASS)


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
    lead: float = 0.0
    shifts: tuple[float, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether the two say the same, but for near ties."""
        return self.kind in ("equal", "tie")


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyParity:
    """What follows from the answers before or after the load. `departures` depart from the control's at no near tie;
    None without an answer."""

    verdict: str
    reason: str
    departures: int | None = None


def greedy_gate(run: Run, arm: str) -> Gate:
    """The gate of the external arm. It is open where a trial that asked it lost an answer, unless the others fail."""
    account, control = run.account(arm), run.account(run.control)
    near_tie = number(mapping(run.records.experiment.get("parity")).get("near_tie")) or NEAR_TIE
    documents = [(control.asked.get(trial), account.asked.get(trial)) for trial in account.asked_in]
    lost = [f"trial {trial}" for trial, pair in zip(account.asked_in, documents, strict=True) if None in pair]
    found = judge_asked(arm, documents, near_tie=near_tie, alpha=run.limits.alpha)
    return gate_of(arm, found, lost=lost)


def gate_of(arm: str, found: Sequence[GreedyParity], *, lost: Sequence[str] = ()) -> Gate:
    """The gate by what was found before and after the load; `lost` are the trials whose answers are missing."""
    # Of equal verdicts the later one counts: it is of a server that has been under load.
    worst = min(reversed(found), key=lambda item: _ORDER.index(item.verdict))
    verdict, reason = worst.verdict, worst.reason
    if lost and verdict != FAIL:
        verdict, reason = INCONCLUSIVE, f"The answers of {', '.join(lost)} are not there."
    departures = max((item.departures for item in found if item.departures is not None), default=None)
    return Gate(
        arm=arm,
        gate="parity",
        kind="parity",
        value=None if departures is None else float(departures),
        limit=None if departures is None else 0.0,
        unit="count",
        verdict=verdict,
        reason=reason,
        unseen=verdict == INCONCLUSIVE,
    )


def judge_asked(
    arm: str,
    documents: Sequence[tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]],
    *,
    near_tie: float,
    alpha: float,
) -> list[GreedyParity]:
    """Before the load and after it, over the trials: of each what the control and the arm answered."""
    found = []
    for when in (BEFORE, AFTER):
        twice: list[tuple[Twice, Twice]] = []
        for control, own in documents:
            base, its = answers_in(control or {}, when), answers_in(own or {}, when)
            if base is not None and its is not None and len(base[0]) == len(its[0]):
                twice.append((base, its))
        if twice or when == BEFORE:
            found.append(judge_greedy(arm, twice, when=when, near_tie=near_tie, alpha=alpha / _TIMES_ASKED))
    return found


def judge_greedy(
    arm: str, asked: Sequence[tuple[Twice, Twice]], *, when: str, near_tie: float, alpha: float
) -> GreedyParity:
    """Judge what the control and the arm answered in each trial, with a false FAIL of at most `alpha` of equal arms.

    Log-probabilities count where both report them for every answer, and not as of a server that is certain of every
    token.
    """
    fours = [four for control, own in asked for four in zip(*control, *own, strict=True)]
    whole: list[tuple[AskedAnswer, ...]] = [four for four in fours if not any(map(_failure, four))]
    if not whole:
        failure = next(filter(None, (_failure(answer) for four in fours for answer in four)), "nothing was recorded")
        reason = f"No prompt {when} the load was answered by both {arm} and the control: {failure}."
        return GreedyParity(verdict=INCONCLUSIVE, reason=reason)
    log_probs = all(_reports([answer for four in whole for answer in four[of : of + 2]]) for of in (0, 2))
    if not log_probs:
        whole = [tuple(replace(item, tokens=(), log_probs=(), likeliest=()) for item in four) for four in whole]

    def between(one: int, other: int) -> list[Difference]:
        return [difference(four[one], four[other], near_tie=near_tie) for four in whole]

    across = [between(0, 2), between(1, 3), between(0, 3), between(1, 2)]
    repeated = [[item.agrees for item in between(one, one + 1)] for one in (0, 2)]
    both = zip(across[0], *repeated, strict=True)
    differ = sum(item.at is not None for item in across[0])
    departures = sum(item.kind == "apart" and base and own for item, base, own in both) if log_probs else differ
    verdict, why = (
        _useless(arm, whole, repeated, near_tie)
        or _surely_apart(departures, len(whole), across[0], log_probs, alpha)
        or _open(whole, repeated[0], across, near_tie)
    )
    seen = f"{len(whole) - differ} of {len(whole)} greedy answers of {arm} {when} the load are the control's"
    return GreedyParity(verdict=verdict, reason=f"{seen}: {why}.", departures=departures)


def _useless(
    arm: str, whole: Sequence[tuple[AskedAnswer, ...]], repeated: Sequence[Sequence[bool]], near_tie: float
) -> tuple[str, str] | None:
    """(verdict, why) where the two were not asked alike, or one of them is not greedy."""
    if any(four[0].digest != four[2].digest for four in whole):
        return INCONCLUSIVE, (
            "the two were asked in other words (chat or text, with or without a tokenizer), so ask both alike, or set "
            "parity.served = false"
        )
    sampled = max(_sampled(answers, near_tie) for answers in zip(*whole, strict=True))
    if sampled > _MOST_SAMPLED:
        share = percent(sampled)
        return INCONCLUSIVE, f"one of the two is not greedy, since {share} of its tokens are not the likeliest"
    for name, agrees in zip(("the control", arm), map(sum, repeated), strict=True):
        if agrees < _LEAST_REPEATED * len(whole):
            return INCONCLUSIVE, (
                f"{name} does not repeat itself ({agrees} of {len(whole)}), since it ignores temperature = 0 or "
                "rounds otherwise in each batch"
            )
    return None


def _surely_apart(
    departures: int, answered: int, firsts: Sequence[Difference], log_probs: bool, alpha: float
) -> tuple[str, str] | None:
    """(verdict, why) where too many answers depart, or near ties are not known."""
    if log_probs and _least(departures, answered, alpha) > MOST_APART:
        far = digits(max(item.lead for item in firsts))
        return FAIL, (
            f"{counted(departures, 'answer')} that both repeat part at no near tie (by up to {far} nats), and "
            f"{percent(MOST_APART)} is allowed"
        )
    if log_probs or not departures:
        return None
    tokens = sum(item.of for item in firsts)
    if _least(departures, tokens, alpha) > BEYOND_ROUNDING:
        return FAIL, (
            f"they part at {departures} of the {tokens} tokens compared, more than rounding explains "
            f"({BEYOND_ROUNDING:g} a token)"
        )
    return INCONCLUSIVE, "without log-probabilities from both, near ties look like another result"


def _least(count: int, of: int, alpha: float) -> float:
    """The one-sided lower limit of a share at level `alpha`, by Clopper and Pearson."""
    return float(beta_quantile(alpha, count, of - count + 1)) if count else 0.0


def _open(
    whole: Sequence[tuple[AskedAnswer, ...]],
    control_repeats: Sequence[bool],
    across: Sequence[Sequence[Difference]],
    near_tie: float,
) -> tuple[str, str]:
    """What leaves it open, else PASS with what that can carry."""
    lead = max(item.lead for item in across[0])
    if lead > FAR * near_tie:
        return INCONCLUSIVE, (
            f"an answer parts where the two prefer their tokens by {digits(lead)} nats together, which no rounding "
            "explains: more parity.prompts decide"
        )
    shifts = [float(np.mean(item.shifts)) for item in across[0] if item.shifts]
    if shifts and np.mean(shifts) > SHIFT_SHARE * near_tie:
        return INCONCLUSIVE, (
            f"log-probabilities of equal tokens differ by {digits(float(np.mean(shifts)))} nats on average (limit "
            f"{digits(SHIFT_SHARE * near_tie)}): the weights, their precision or the servers' rules differ"
        )
    # Of the different answers that the control repeats, those from which none of the arm parts but at near ties.
    agrees: dict[tuple[str, ...], bool] = {}
    for four, repeats, *row in zip(whole, control_repeats, *across, strict=True):
        if repeats:
            words = four[0].tokens or (four[0].text,)
            agrees[words] = agrees.get(words, True) and all(item.agrees for item in row)
    held, parted = len(agrees), list(agrees.values()).count(False)
    most = float(beta_quantile(CONFIDENCE, parted + 1, held - parted)) if parted < held else 1.0
    why = f"up to {percent(most)} of all prompts may get another answer unseen, limit {percent(MOST_APART)}"
    if most > MOST_APART:
        seen = f"by {counted(held, 'different answer')} that the control repeats"
        return INCONCLUSIVE, f"{seen}, {why}: give more parity.prompts, or such as differ"
    return PASS, why


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
