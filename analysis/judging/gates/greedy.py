"""Greedy parity: an external arm gives the control's answers, word for word (`parity.served`).

Both are asked twice, as servers with batches do not repeat themselves to the bit: rounding chooses where two tokens are
nearly tied. An answer that a server does not repeat counts against no arm. Two servers of one model that round
differently part at a few percent of the tokens, and words alone do not tell that from a small fault. So only departures
that no rounding explains are FAIL, a PASS needs equal words (`parity.max_different` allows some to differ), and
anything else is INCONCLUSIVE. Decision 0019 says why the limits are what they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import median
from typing import Any, Final

from scipy.special import betaincinv

from tailgate.analysis.judging.gates import FAIL, INCONCLUSIVE, ORDER, PASS, Gate
from tailgate.analysis.records.asked_answers import AFTER, BEFORE, GreedyAnswer, Twice, answers_in
from tailgate.analysis.records.plain_values import mapping, number
from tailgate.analysis.run.run import Run
from tailgate.analysis.wording import counted, digits, percent

CONFIDENCE: Final = 0.95
MOST_HIDDEN: Final = 0.1  # of all prompts, that may get another answer beyond the allowed share without being seen
# Departures per token. Equal weights of vLLM in bfloat16, eager against compiled, with nearly flat logits: 0.029.
BEYOND_ROUNDING: Final = 0.25
_LEAST_REPEATED: Final = 0.75
_MEASUREMENTS: Final = 2  # before and after the load, each with its part of alpha

# The control's two answers to a prompt, and the arm's two.
Four = tuple[GreedyAnswer, GreedyAnswer, GreedyAnswer, GreedyAnswer]


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyParity:
    """What follows from the answers before or after the load.

    `different` is the share of the control's repeated answers that the arm does not give; None where there is none.
    """

    verdict: str
    reason: str
    different: float | None = None


def greedy_gate(run: Run, arm: str) -> Gate:
    """Return the gate of the external arm. It is open where a trial that asked it lost an answer, unless the others
    fail."""
    account, control = run.account(arm), run.account(run.control)
    allowed = number(mapping(run.records.experiment.get("parity")).get("max_different")) or 0.0
    documents = [(control.asked.get(trial), account.asked.get(trial)) for trial in account.greedy_trials]
    lost = [f"trial {trial}" for trial, pair in zip(account.greedy_trials, documents, strict=True) if None in pair]
    found = judge_greedy_trials(arm, documents, allowed=allowed, alpha=run.limits.alpha)
    return gate_of(arm, found, allowed=allowed, lost=lost)


def gate_of(arm: str, found: Sequence[GreedyParity], *, allowed: float, lost: Sequence[str] = ()) -> Gate:
    """Return the gate by what was found before and after the load; `lost` are the trials whose answers are missing."""
    # Of equal verdicts the later one counts: it is of a server that has been under load.
    worst = min(reversed(found), key=lambda item: ORDER.index(item.verdict))
    verdict, reason = worst.verdict, worst.reason
    if lost and verdict != FAIL:
        verdict, reason = INCONCLUSIVE, f"The answers of {', '.join(lost)} are not there."
    different = max((item.different for item in found if item.different is not None), default=None)
    return Gate(
        arm=arm,
        gate="parity",
        kind="parity",
        value=None if different is None else 100.0 * different,
        limit=None if different is None else 100.0 * allowed,
        unit="pct",
        verdict=verdict,
        reason=reason,
        unseen=verdict == INCONCLUSIVE,
    )


def judge_greedy_trials(
    arm: str,
    documents: Sequence[tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]],
    *,
    allowed: float,
    alpha: float,
) -> list[GreedyParity]:
    """Judge before the load and after it, over the trials: of each what the control and the arm answered."""
    found = []
    for when in (BEFORE, AFTER):
        twice: list[tuple[Twice, Twice]] = []
        for control, own in documents:
            base, its = answers_in(control or {}, when), answers_in(own or {}, when)
            if base is not None and its is not None and len(base[0]) == len(its[0]):
                twice.append((base, its))
        if twice or when == BEFORE:
            found.append(judge_greedy(arm, twice, when=when, allowed=allowed, alpha=alpha / _MEASUREMENTS))
    return found


def judge_greedy(
    arm: str, answers: Sequence[tuple[Twice, Twice]], *, when: str, allowed: float, alpha: float
) -> GreedyParity:
    """Judge what the control and the arm answered in each trial. Equal arms FAIL with a chance of at most `alpha`, as
    long as rounding alone parts them at fewer than `BEYOND_ROUNDING` of the tokens."""
    fours: list[Four] = [four for control, own in answers for four in zip(*control, *own, strict=True)]
    whole = [four for four in fours if not any(map(_failure, four))]
    if not whole:
        failure = next(filter(None, (_failure(answer) for four in fours for answer in four)), "nothing was recorded")
        reason = f"No prompt {when} the load was answered by both {arm} and the control: {failure}."
        return GreedyParity(verdict=INCONCLUSIVE, reason=reason)
    equal = sum(control.text == own.text for control, _, own, _ in whole)
    seen = f"{equal} of {len(whole)} greedy answers of {arm} {when} the load are the control's"
    if why := _useless(arm, whole):
        return GreedyParity(verdict=INCONCLUSIVE, reason=f"{seen}: {why}.")
    different, of = _different(whole)
    share = different / of if of else None
    if why := _beyond_rounding(whole, alpha):
        return GreedyParity(verdict=FAIL, reason=f"{seen}: {why}.", different=share)
    hidden = float(betaincinv(different + 1, of - different, CONFIDENCE)) if different < of else 1.0
    by = f"by {counted(of, 'different answer')} that the control repeats"
    may = (
        f"up to {percent(hidden)} of all prompts may get another answer unseen, limit {percent(allowed + MOST_HIDDEN)}"
    )
    verdict, why = INCONCLUSIVE, f"{by}, {may}: give more parity.prompts, or such as differ"
    if different > allowed * of:
        why = (
            f"{different} of {counted(of, 'different answer')} that the control repeats are not the arm's, and "
            f"parity.max_different allows {percent(allowed)}. Text alone cannot tell rounding from a fault: "
            "serve both in float32, lower parity.tokens, or raise parity.max_different to what equal servers show"
        )
    elif hidden <= allowed + MOST_HIDDEN:
        verdict, why = PASS, may
    return GreedyParity(verdict=verdict, reason=f"{seen}: {why}.", different=share)


def _useless(arm: str, whole: Sequence[Four]) -> str:
    """Return why the answers carry nothing: the two were not asked alike, or one does not repeat itself."""
    if any(four[0].digest != four[2].digest for four in whole):
        return (
            "the two got different prompts (chat or text, with or without a tokenizer): give both the same, or set "
            "parity.served = false"
        )
    for name, first in (("the control", 0), (arm, 2)):
        repeated = sum(four[first].text == four[first + 1].text for four in whole)
        if repeated < _LEAST_REPEATED * len(whole):
            return (
                f"{name} repeats only {repeated} of {len(whole)} answers: it ignores temperature = 0, or rounds "
                "differently in each batch"
            )
    return ""


def _beyond_rounding(whole: Sequence[Four], alpha: float) -> str:
    """Return why answers that both repeat depart at more tokens than rounding explains; empty where they do not."""
    both = [(four[0], four[2]) for four in whole if four[0].text == four[1].text and four[2].text == four[3].text]
    places = [(first_difference(control, own), _asked(control, own)) for control, own in both]
    parted = [place for place, _ in places if place is not None]
    tokens = sum(of if place is None else place + 1 for place, of in places)
    # Clopper and Pearson's lower limit of the share of tokens
    least = float(betaincinv(len(parted), tokens - len(parted) + 1, alpha)) if parted else 0.0
    if least <= BEYOND_ROUNDING:
        return ""
    return (
        f"repeated answers differ at {len(parted)} of {tokens} tokens, half of them by token "
        f"{digits(median(parted) + 1)}, more than rounding explains ({BEYOND_ROUNDING:g} a token)"
    )


def _different(whole: Sequence[Four]) -> tuple[int, int]:
    """Return how many of the different answers that the control repeats the arm does not give both times, of how many.

    Equal answers to several prompts count once.
    """
    given: dict[str, bool] = {}
    for control, again, *own in whole:
        if control.text == again.text:
            given[control.text] = given.get(control.text, True) and all(item.text == control.text for item in own)
    return list(given.values()).count(False), len(given)


def first_difference(one: GreedyAnswer, other: GreedyAnswer) -> int | None:
    """Return the index of the token at which two texts part, None where they do not.

    Texts have no tokens: where the characters part is taken as a share of all tokens that were asked for.
    """
    pairs = enumerate(zip_longest(one.text, other.text))
    place = next((place for place, (own, its) in pairs if own != its), None)
    of = _asked(one, other)
    return None if place is None else min(of - 1, int(place / max(1, len(one.text)) * of))


def _asked(one: GreedyAnswer, other: GreedyAnswer) -> int:
    return max(one.asked, one.pieces, other.pieces, 1)


def _failure(answer: GreedyAnswer) -> str:
    return answer.error or ("" if answer.text else "an answer is empty")
