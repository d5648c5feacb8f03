"""Whether an external arm gives the control's greedy answers, with the control's own second answers as the yardstick.

Servers with batches do not repeat themselves to the bit: where two tokens are nearly tied, rounding chooses. So each
arm is asked twice, and four answers to a prompt (two of the control, two of the arm) are looked at together. Were the
arms equal, the four would be exchangeable: that each arm repeats itself and differs from the other is then as likely as
each of the two other ways to make pairs of four. So of all prompts that show two such pairs, a third would show them by
arm; FAIL rests on more. It takes no model of the noise, and servers that sample, whose answers repeat nowhere, do not
fail by it. Decision 0019 says why the limits are what they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from analysis.judging.gates import FAIL, INCONCLUSIVE, PASS, Gate
from analysis.records.asked_answers import AFTER, BEFORE, Twice, answers_in
from analysis.run.greedy_answers import CONFIDENCE, GreedyAnswers, greedy_answers
from analysis.statistics.distributions import beta_quantile, binomial_sf
from analysis.wording import counted, digits, percent

MOST_APART: Final = 0.1  # of the answers, may part from the control's at no near tie
# Two servers of one model in bfloat16 preferred their own tokens by more together in 2 of 300 answers.
NEAR_TIE: Final = 1.0  # nats, where the experiment does not say
FAR: Final = 3.0  # times that, which no rounding explains: a single such answer leaves parity open
# What log-probabilities of equal tokens may differ by on average, of `near_tie`. The same two: 0.029 nats.
SHIFT_SHARE: Final = 0.1
# Departures per token, where no log-probability is known. The same two, of which logits are nearly flat: 0.029.
BEYOND_ROUNDING: Final = 0.25
_TIMES_CONTROL: Final = 1.5
_MOST_SAMPLED: Final = 0.05
_LOOKS: Final = 2  # before and after the load, each with its part of alpha


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyParity:
    """What was answered `when`, before or after the load, and what follows from it."""

    when: str
    answers: GreedyAnswers
    verdict: str
    reason: str


def judge_greedy(arm: str, answers: GreedyAnswers, *, when: str, near_tie: float, alpha: float) -> GreedyParity:
    """What follows from the answers, with a false FAIL in `alpha` of equal arms at most."""
    verdict, why = _finding(arm, answers, near_tie=near_tie, alpha=alpha)
    reason = f"{_seen(arm, answers, when)}{why}" if answers.answered else why
    return GreedyParity(when=when, answers=answers, verdict=verdict, reason=reason)


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
        if not twice and when == AFTER:
            continue
        answers = greedy_answers([base for base, _ in twice], [its for _, its in twice], near_tie=near_tie)
        found.append(judge_greedy(arm, answers, when=when, near_tie=near_tie, alpha=alpha / _LOOKS))
    return found


def greedy_gate(arm: str, found: Sequence[GreedyParity], *, lost: str = "") -> Gate:
    """The gate `parity` of an external arm. `lost` says what records are not there, which leaves it open."""
    order = (FAIL, INCONCLUSIVE, PASS)
    parities = sorted(found, key=lambda item: order.index(item.verdict))
    verdict = parities[0].verdict if parities else INCONCLUSIVE
    reasons = [item.reason for item in parities if item.verdict == verdict or verdict == PASS]
    if lost and verdict == PASS:
        verdict, reasons = INCONCLUSIVE, []
    worst = max((_departures(item.answers) for item in found if item.answers.answered), default=None)
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


def _departures(answers: GreedyAnswers) -> int:
    """Answers that depart from the control's, but for near ties where these are known."""
    return answers.apart if answers.told else answers.answered - answers.same


def _seen(arm: str, answers: GreedyAnswers, when: str) -> str:
    share = ""
    if answers.low is not None and answers.high is not None:
        share = f" ({percent(answers.low)} to {percent(answers.high)})"
    return (
        f"{answers.same} of {answers.answered} greedy answers of {arm} {when} the load are the control's{share}; the "
        f"control's own second answers: {answers.control_same}. "
    )


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
    limit = shift_limit(answers, near_tie)
    if why := _surely_other(answers, limit=limit, alpha=alpha):
        return FAIL, why
    return _open(arm, answers, near_tie=near_tie, limit=limit)


def shift_limit(answers: GreedyAnswers, near_tie: float) -> float:
    """What log-probabilities of equal tokens may differ by on average, in nats."""
    own = answers.control_shift.mean if answers.control_shift is not None else 0.0
    return max(SHIFT_SHARE * near_tie, _TIMES_CONTROL * own)


def _surely_other(answers: GreedyAnswers, *, limit: float, alpha: float) -> str:
    """Why the arm surely computes something else; empty where that is not sure."""
    pairs = answers.repeated + answers.swapped
    chance = float(binomial_sf(answers.repeated - 1, pairs, 1 / 3)) if pairs else 1.0
    shift = answers.shift
    if answers.told:
        if chance <= alpha and _least(answers.repeated, answers.answered, alpha) > MOST_APART:
            return (
                f"{counted(answers.repeated, 'answer')} that both repeat part where the two prefer their tokens by up "
                f"to {digits(answers.lead or 0.0)} nats together, which is no near tie, and 1 in "
                f"{1 / MOST_APART:.0f} is allowed{_first(answers)}."
            )
        if answers.apart and shift is not None and shift.low is not None and shift.low > limit:
            return (
                f"Log-probabilities of equal tokens differ by {digits(shift.mean)} nats on average (limit "
                f"{digits(limit)}), and {counted(answers.apart, 'answer')} part at no near tie{_first(answers)}."
            )
        return ""
    departures = len(answers.departs)
    if chance <= alpha and _least(departures, answers.tokens, alpha) > BEYOND_ROUNDING:
        return (
            f"They part at {departures} of the {answers.tokens} tokens compared, more than rounding explains "
            f"({BEYOND_ROUNDING:g} a token){_first(answers)}."
        )
    return ""


def _least(count: int, of: int, alpha: float) -> float:
    """The one-sided lower limit of a share at level `alpha`, by Clopper and Pearson."""
    return float(beta_quantile(alpha, count, of - count + 1)) if count else 0.0


def _most(count: int, of: int) -> float:
    """The one-sided upper limit of a share (95 %)."""
    return float(beta_quantile(CONFIDENCE, count + 1, of - count)) if count < of else 1.0


def _first(answers: GreedyAnswers) -> str:
    """Where answers part for the first time, as the middle of them do."""
    if not answers.departs:
        return ""
    return f"; half of those that differ do so by token {answers.departs[(len(answers.departs) - 1) // 2] + 1}"


def _open(arm: str, answers: GreedyAnswers, *, near_tie: float, limit: float) -> tuple[str, str]:
    """What leaves it open, else PASS with what that can carry."""
    shift = answers.shift
    others = answers.answered - answers.same
    if 2 * answers.control_agrees < answers.answered:
        return INCONCLUSIVE, (
            "The control does not repeat itself, so that nothing can be blamed on the arm: it ignores temperature = 0, "
            "or rounds otherwise in each batch."
        )
    if 2 * answers.own_agrees < answers.answered:
        return INCONCLUSIVE, (
            f"{arm} does not repeat itself ({answers.own_same} of {answers.answered}): it ignores temperature = 0, or "
            "rounds otherwise in each batch."
        )
    if not answers.told and others:
        return INCONCLUSIVE, (
            "Without log-probabilities from both, near ties cannot be told from another result: serve them with such, "
            "or look at the answers."
        )
    if answers.lead is not None and answers.lead > FAR * near_tie:
        return INCONCLUSIVE, (
            f"An answer parts where the two prefer their tokens by {digits(answers.lead)} nats together, which no "
            f"rounding explains. {answers.apart} at no near tie are too few to tell how many there are: look at them, "
            "or give more parity.prompts."
        )
    if shift is not None and (shift.high is None or shift.high > limit):
        return INCONCLUSIVE, (
            f"Log-probabilities of equal tokens differ by {digits(shift.mean)} nats on average (limit "
            f"{digits(limit)}): the weights or their precision are not the same, or the servers state them by other "
            "rules."
        )
    most = _most(answers.parted, answers.held)
    if most > MOST_APART:
        left = answers.answered - answers.control_agrees
        also = f"; {left} more it does not repeat" if left else ""
        return INCONCLUSIVE, (
            f"Of {counted(answers.held, 'different answer')} that the control repeats {answers.parted} part at no near "
            f"tie, or nobody knows{also}. So up to {percent(most)} may be others, and {percent(MOST_APART)} is "
            "allowed: give more parity.prompts, or such as differ."
        )
    return PASS, _carries(answers)


def _carries(answers: GreedyAnswers) -> str:
    """What a PASS says, and what it does not."""
    parts = []
    if answers.departs:
        parts.append(f"Where others part, the two prefer their tokens by {digits(answers.lead or 0.0)} nats at most.")
    if answers.shift is not None:
        parts.append(f"Log-probabilities of equal tokens differ by {digits(answers.shift.mean)} nats on average.")
    else:
        parts.append("No log-probabilities were told: equal words are all that is known.")
    parts.append(f"Up to {percent(_most(answers.parted, answers.held))} of all prompts may get another answer unseen.")
    return " ".join(parts)
