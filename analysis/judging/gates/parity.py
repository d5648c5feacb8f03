"""Parity: the arm computes what the control does ([parity]).

A managed arm is measured before the traffic (`parity.full`) and answers prompts after it. An external arm is asked for
greedy answers, twice, as the control is: servers with batches do not repeat themselves to the bit, since rounding
chooses where two tokens are nearly tied. Only answers that both repeat count against the arm. Where equal arms repeat
themselves on three quarters of the prompts or more, both repeat and yet differ on an eighth of the other half at most,
6 %, and FAIL takes surely more than 10 %. Decision 0019 says why the limits are what they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from analysis.judging.gates import FAIL, INCONCLUSIVE, PASS, Gate
from analysis.records.asked_answers import AFTER, BEFORE, Twice, answers_in
from analysis.records.plain_values import mapping, number, rows_of
from analysis.run.greedy_answers import CONFIDENCE, GreedyAnswers, greedy_answers
from analysis.run.run import Run
from analysis.statistics.distributions import beta_quantile
from analysis.wording import counted, digits, percent

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
_ORDER = (FAIL, INCONCLUSIVE, PASS)


def parity_gates(run: Run, arm: str) -> list[Gate]:
    """One gate where parity was measured or is required, where answers must be equal or are absent, or where the
    weights are quantised differently from the control's. Answers in lower precision alone judge nothing."""
    account, settings = run.account(arm), mapping(run.records.experiment.get("parity"))
    if asked := account.asked_in:
        names = (arm, run.control)
        lost = [trial for trial in asked if not all(trial in run.account(name).asked for name in names)]
        said = f"The answers of {', '.join(f'trial {trial}' for trial in lost)} are not there." if lost else ""
        return [greedy_gate(arm, greedy_parities(run, arm), lost=said)]
    required = settings.get("full") is True
    exact = any(row.get("error") or row.get("dtype") == "float32" or "cosine" in row for row in account.answers)
    # Where whole servers are compared, nothing is said of what they compute.
    whole = run.records.experiment.get("compare_models") is True
    apart = "" if whole and not required else run.weights_apart(arm)
    if not (account.parity or required or exact or apart):
        return []
    return [parity_gate(arm, account.parity, account.answers, required=required, weights_apart=apart)]


# --- Arms that tailgate starts ----------------------------------------------------------------------------------------


def parity_gate(
    arm: str,
    measured: Mapping[str, Any],
    answers: Sequence[Mapping[str, Any]],
    *,
    required: bool,
    weights_apart: str = "",
) -> Gate:
    """The gate by `measured`, the arm's row of `tailgate parity`, and by `answers` of its replicas after the traffic.

    In float32 the answers must be equal; in lower precision rounding may turn a token and all that follow it, so they
    only show that a replica answers. Vectors are held to their cosine with the control's. An arm whose weights are held
    otherwise than the control's, as `weights_apart` says, has parity by its measured accuracy alone.
    """
    cosine = _lowest_cosine(answers)
    findings: list[tuple[str, str]] = []
    if measured:
        verdict = str(measured.get("verdict"))
        verdict = verdict if verdict in _ORDER else INCONCLUSIVE
        findings.append((verdict, _measured_text(measured, verdict)))
    elif required:
        findings.append((INCONCLUSIVE, "The experiment asks for parity before the traffic, and it was not measured."))
    elif weights_apart and cosine is None:
        accuracy = "and what that costs in accuracy was not measured: set parity.full = true"
        findings.append((INCONCLUSIVE, f"Its weights are held as {weights_apart}, {accuracy}."))
    if answers:
        findings.append(judge_answers(arm, answers, weights_apart=bool(weights_apart)))
    if not findings:
        findings.append((INCONCLUSIVE, "Nothing was measured of it."))
    findings.sort(key=lambda finding: _ORDER.index(finding[0]))
    verdict = findings[0][0]
    reason = next((text for own, text in findings if own == verdict and text), "It computes what the control does.")
    same, of = _same_answers(answers)
    exact = bool(of) and _is_exact(answers) and not weights_apart and cosine is None
    return Gate(
        arm=arm,
        gate="parity",
        kind="parity",
        value=cosine if cosine is not None else float(of - same) if exact else None,
        limit=float(answers[0].get("min_cosine") or 0.0) if cosine is not None else 0.0 if exact else None,
        unit="count" if cosine is None else "",
        verdict=verdict,
        reason=reason,
    )


def _measured_text(measured: Mapping[str, Any], verdict: str) -> str:
    """What was measured, in a sentence: the first reason, or the accuracy of quantised weights; empty for others."""
    reasons = measured.get("reasons")
    if verdict != PASS:
        why = str(reasons[0]) if isinstance(reasons, list) and reasons else "no reason is recorded."
        return f"Parity before the traffic is {verdict}: {why}"
    accuracy = (row for row in rows_of(measured.get("findings")) if row.get("name") == "kl")
    return next((str(row.get("reason")) for row in accuracy), "")


def judge_answers(arm: str, rows: Sequence[Mapping[str, Any]], *, weights_apart: bool = False) -> tuple[str, str]:
    """(verdict, reason) of the answers that the arm's replicas gave after the traffic."""
    silent = [row for row in rows if row.get("error")]
    differ = [row for row in rows if row.get("departs") is not None]
    same, of = _same_answers(rows)
    cosine = _lowest_cosine(rows)
    seen = f"{same} of {of} greedy answers of {arm} after the traffic are the control's"
    if _is_exact(rows) and differ and not weights_apart and cosine is None:
        return FAIL, f"{seen}, first other at {_departure(differ[0])}: in float32 they must be equal."
    if silent:
        who = silent[0].get("replica", arm)
        return INCONCLUSIVE, f"{who} did not answer after the traffic: {silent[0].get('error')}."
    if not of:
        return INCONCLUSIVE, f"No replica of {arm} was asked after the traffic."
    if cosine is not None:
        limit = float(rows[0].get("min_cosine") or 0.0)
        seen = f"The lowest cosine of a vector of {arm} after the traffic with the control's is {cosine:.6f}"
        return (PASS if cosine >= limit else FAIL), f"{seen}, limit {limit:g}."
    allowing = "other weights allow" if weights_apart else "lower precision allows"
    return PASS, f"{seen}{f', which {allowing}' if differ else ''}."


def _lowest_cosine(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """The lowest cosine of a vector with the control's; None where tokens were asked for, or nothing came."""
    known = [float(row["cosine"]) for row in rows if isinstance(row.get("cosine"), (int, float))]
    return min(known, default=None)


def _same_answers(rows: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """(those that are the control's, all)."""
    return sum(int(row.get("same") or 0) for row in rows), sum(int(row.get("of") or 0) for row in rows)


def _is_exact(rows: Sequence[Mapping[str, Any]]) -> bool:
    return all(row.get("dtype") == "float32" for row in rows)


def _departure(row: Mapping[str, Any]) -> str:
    departs, prompts = row.get("departs"), row.get("prompts")
    try:
        question, token = departs  # type: ignore[misc]
        return f"token {token + 1} after a prompt of {counted(prompts[question], 'token')}"  # type: ignore[index]
    except (TypeError, ValueError, IndexError):
        return "an unknown place"


# --- External arms ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyParity:
    """What was answered `when`, before or after the load, and what follows from it."""

    when: str
    answers: GreedyAnswers
    verdict: str
    reason: str


def greedy_parities(run: Run, arm: str) -> list[GreedyParity]:
    """What the external arm answered before the load and after it; empty where it was not asked."""
    account, control = run.account(arm), run.account(run.control)
    if not account.asked_in or arm == run.control:
        return []
    near_tie = number(mapping(run.records.experiment.get("parity")).get("near_tie")) or NEAR_TIE
    documents = [(control.asked.get(trial), account.asked.get(trial)) for trial in account.asked_in]
    return judge_asked(arm, documents, near_tie=near_tie, alpha=run.limits.alpha)


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
        found.append(judge_greedy(arm, answers, when=when, near_tie=near_tie, alpha=alpha / _TIMES_ASKED))
    return found


def greedy_gate(arm: str, found: Sequence[GreedyParity], *, lost: str = "") -> Gate:
    """The gate `parity` of an external arm. `lost` says which records are missing, which leaves it open."""
    # Of equal verdicts the later one counts: it is of a server that has been under load.
    worst = min(reversed(found), key=lambda item: _ORDER.index(item.verdict), default=None)
    verdict, reason = (worst.verdict, worst.reason) if worst else (INCONCLUSIVE, "It was not asked.")
    if lost and verdict != FAIL:
        verdict, reason = INCONCLUSIVE, lost
    departures = max((_departures(item.answers) for item in found if item.answers.answered), default=None)
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


def _departures(answers: GreedyAnswers) -> int:
    """Answers that depart from the control's, but for near ties where these are known."""
    return answers.apart if answers.log_probs else answers.answered - answers.same


def judge_greedy(arm: str, answers: GreedyAnswers, *, when: str, near_tie: float, alpha: float) -> GreedyParity:
    """Judge the answers, with a false FAIL of at most `alpha` of equal arms."""
    verdict, why = _finding(arm, answers, near_tie=near_tie, alpha=alpha)
    reason = f"{why[0].upper()}{why[1:]}."
    if answers.answered:
        share = f" ({percent(answers.low or 0.0)} to {percent(answers.high or 0.0)})"
        seen = f"{answers.same} of {answers.answered} greedy answers of {arm} {when} the load are the control's{share}"
        reason = f"{seen}: {why}."
    return GreedyParity(when=when, answers=answers, verdict=verdict, reason=reason)


def _finding(arm: str, answers: GreedyAnswers, *, near_tie: float, alpha: float) -> tuple[str, str]:
    """(verdict, why): first what makes the answers useless, then what is surely wrong, then what is open."""
    if not answers.answered:
        return INCONCLUSIVE, f"no prompt was answered by both ({answers.failure or 'nothing was recorded'})"
    if not answers.same_prompts:
        return INCONCLUSIVE, (
            "the two were asked in other words (chat or text, with or without a tokenizer), so ask both alike, or set "
            "parity.served = false"
        )
    if answers.sampled > _MOST_SAMPLED:
        return INCONCLUSIVE, (
            f"one of the two is not greedy, since {percent(answers.sampled)} of its tokens are not the likeliest: it "
            "ignores temperature = 0"
        )
    for name, agrees in (("the control", answers.control_agrees), (arm, answers.own_agrees)):
        if agrees < _LEAST_REPEATED * answers.answered:
            return INCONCLUSIVE, (
                f"{name} does not repeat itself ({agrees} of {answers.answered}), since it ignores temperature = 0 or "
                "rounds otherwise in each batch"
            )
    first = ""
    if answers.departs:
        middle = answers.departs[(len(answers.departs) - 1) // 2] + 1
        first = f"; half of those that differ do so by token {middle}"
    if _least(answers.apart, answers.answered, alpha) > MOST_APART:
        return FAIL, (
            f"{counted(answers.apart, 'answer')} that both repeat part where the two prefer their tokens by up to "
            f"{digits(answers.lead or 0.0)} nats together, which is no near tie, and {percent(MOST_APART)} is "
            f"allowed{first}"
        )
    if not answers.log_probs and answers.departs:
        if _least(len(answers.departs), answers.tokens, alpha) > BEYOND_ROUNDING:
            return FAIL, (
                f"they part at {len(answers.departs)} of the {answers.tokens} tokens compared, more than rounding "
                f"explains ({BEYOND_ROUNDING:g} a token){first}"
            )
        return INCONCLUSIVE, (
            "without log-probabilities from both, near ties look like another result: serve them with such"
        )
    return _open(answers, near_tie)


def _least(count: int, of: int, alpha: float) -> float:
    """The one-sided lower limit of a share at level `alpha`, by Clopper and Pearson."""
    return float(beta_quantile(alpha, count, of - count + 1)) if count else 0.0


def _open(answers: GreedyAnswers, near_tie: float) -> tuple[str, str]:
    """What leaves it open, else PASS with what that can carry."""
    lead, shift, limit = answers.lead or 0.0, answers.shift, SHIFT_SHARE * near_tie
    if lead > FAR * near_tie:
        return INCONCLUSIVE, (
            f"an answer parts where the two prefer their tokens by {digits(lead)} nats together, which no rounding "
            f"explains, and {answers.apart} at no near tie are too few: give more parity.prompts"
        )
    if shift is not None and shift > limit:
        return INCONCLUSIVE, (
            f"log-probabilities of equal tokens differ by {digits(shift)} nats on average (limit {digits(limit)}): the "
            "weights or their precision differ, or the servers state them by other rules"
        )
    most = 1.0
    if answers.parted < answers.held:
        most = float(beta_quantile(CONFIDENCE, answers.parted + 1, answers.held - answers.parted))
    if most > MOST_APART:
        return INCONCLUSIVE, (
            f"{answers.parted} of {counted(answers.held, 'different answer')} that the control repeats part at no "
            f"known near tie, so up to {percent(most)} may be others, and {percent(MOST_APART)} is allowed: give more "
            "parity.prompts, or such as differ"
        )
    return PASS, f"up to {percent(most)} of all prompts may get another answer unseen, limit {percent(MOST_APART)}"
