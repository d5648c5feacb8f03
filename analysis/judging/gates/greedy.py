"""Greedy parity: an external arm gives the control's answers, word for word (`parity.served`).

Both are asked twice, as rounding chooses where two tokens are nearly tied, and an answer that a server does not repeat
counts against no arm. Only departures that no rounding explains are FAIL, a PASS needs equal words
(`parity.max_different` allows some to differ), and anything else is INCONCLUSIVE (decision 0019).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from statistics import median
from typing import Final

from scipy.special import betaincinv

from tailgate.analysis.judging.gates import FAIL, INCONCLUSIVE, PASS, Gate
from tailgate.analysis.records.asked_answers import GreedyAnswer, Twice, answers_in
from tailgate.analysis.records.plain_values import mapping, number
from tailgate.analysis.run.run import Run
from tailgate.analysis.wording import counted, digits, percent

CONFIDENCE: Final = 0.95
MOST_HIDDEN: Final = 0.1  # of all prompts, that may get another answer beyond the allowed share without being seen
# Departures per token. Equal weights of vLLM in bfloat16, eager against compiled, with nearly flat logits: 0.029.
BEYOND_ROUNDING: Final = 0.25
_LEAST_REPEATED: Final = 0.75
_MORE: Final = " Raise parity.prompts."

# The control's two answers to a prompt, and the arm's two.
Four = tuple[GreedyAnswer, GreedyAnswer, GreedyAnswer, GreedyAnswer]


def greedy_gate(run: Run, arm: str) -> Gate:
    """Return the gate of the external arm."""
    account, control = run.account(arm), run.account(run.control)
    allowed = number(mapping(run.records.experiment.get("parity")).get("max_different")) or 0.0
    asked = {
        trial: (answers_in(control.asked.get(trial, {})), answers_in(account.asked.get(trial, {})))
        for trial in account.greedy_trials
    }
    return judge_greedy(arm, asked, allowed=allowed, alpha=run.limits.alpha)


def judge_greedy(
    arm: str, asked: Mapping[int, tuple[Twice | None, Twice | None]], *, allowed: float, alpha: float
) -> Gate:
    """Judge what the control and the arm answered in each trial; a trial that lost an answer leaves all but FAIL open.

    The gate's value is the share of the control's repeated answers that the arm does not give, None without any.
    """
    fours: list[Four] = []
    lost: list[str] = []
    for trial, (control, own) in asked.items():
        if control is None or own is None or len(control[0]) != len(own[0]):
            lost.append(f"trial {trial}")
        else:
            fours += zip(*control, *own, strict=True)
    verdict, reason, shares = _judged(arm, fours, allowed, alpha)
    if lost and verdict != FAIL:
        verdict, reason = INCONCLUSIVE, f"The answers of {', '.join(lost)} are not there."
    needs = "raise parity.prompts" if reason.endswith(_MORE) else "its reason says what it needs"
    return Gate(
        arm=arm,
        gate="parity",
        kind="parity",
        value=None if shares is None else 100.0 * shares[0],
        limit=None if shares is None else 100.0 * (allowed + MOST_HIDDEN),
        interval=(None, None) if shares is None else (100.0 * shares[1], 100.0 * shares[2]),
        unit="pct",
        verdict=verdict,
        reason=reason,
        unseen=needs if verdict == INCONCLUSIVE else "",
    )


def _judged(
    arm: str, fours: Sequence[Four], allowed: float, alpha: float
) -> tuple[str, str, tuple[float, float, float] | None]:
    """Return verdict, reason and the share of different answers with its limits."""
    whole = [four for four in fours if not any(map(_failure, four))]
    if not whole:
        failure = next(filter(None, (_failure(answer) for four in fours for answer in four)), "nothing was recorded")
        return INCONCLUSIVE, f"No prompt was answered by both {arm} and the control: {failure}.", None
    equal = sum(control.text == own.text for control, _, own, _ in whole)
    seen = f"{equal} of {len(whole)} greedy answers of {arm} are the control's"
    if why := _useless(arm, whole):
        return INCONCLUSIVE, f"{seen}: {why}.", None
    different, of = _different(whole)
    low = float(betaincinv(different, of - different + 1, 1.0 - CONFIDENCE)) if different else 0.0
    hidden = float(betaincinv(different + 1, of - different, CONFIDENCE)) if different < of else 1.0
    share = (different / of, low, hidden) if of else None
    if why := _beyond_rounding(whole, alpha):
        return FAIL, f"{seen}: {why}.", share
    if different > allowed * of:
        why = (
            f"{different} of {counted(of, 'different answer')} that the control repeats are not the arm's, and "
            f"parity.max_different allows {percent(allowed)}. Text alone cannot tell rounding from a fault: "
            "serve both in float32, lower parity.tokens, or raise parity.max_different to what equal servers show"
        )
        return INCONCLUSIVE, f"{seen}: {why}.", share
    limit = f"a PASS needs at most {percent(allowed + MOST_HIDDEN)}"
    seen += f"; by {counted(of, 'distinct answer')}, up to {percent(hidden)} of other prompts could differ ({limit})."
    return (PASS, seen, share) if hidden <= allowed + MOST_HIDDEN else (INCONCLUSIVE, f"{seen}{_MORE}", share)


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
