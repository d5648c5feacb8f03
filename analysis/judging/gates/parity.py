"""Parity: the arm computes what the control does ([parity]).

A managed arm is measured before the traffic (`parity.full`) and answers prompts after it. An external arm is asked for
greedy answers (`tailgate.analysis.judging.gates.greedy`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tailgate.analysis.judging.gates import FAIL, INCONCLUSIVE, ORDER, PASS, Gate
from tailgate.analysis.judging.gates.greedy import greedy_gate
from tailgate.analysis.records.plain_values import mapping, rows_of
from tailgate.analysis.run.run import Run


def parity_gates(run: Run, arm: str) -> list[Gate]:
    """Judge parity if it was measured or required, answers must be equal or are missing, or quantisation differs.

    Answers in lower precision alone judge nothing.
    """
    account, settings = run.account(arm), mapping(run.records.experiment.get("parity"))
    if account.greedy_trials:
        return [greedy_gate(run, arm)]
    required = settings.get("full") is True
    exact = any(row.get("error") or row.get("dtype") == "float32" or "cosine" in row for row in account.answers)
    # Where whole servers are compared, nothing is said of what they compute.
    whole = run.records.experiment.get("compare_models") is True
    difference = "" if whole and not required else run.quantisation_difference(arm)
    if not (account.parity or required or exact or difference):
        return []
    return [parity_gate(arm, account.parity, account.answers, required=required, quantisation_difference=difference)]


def parity_gate(
    arm: str,
    measured: Mapping[str, Any],
    answers: Sequence[Mapping[str, Any]],
    *,
    required: bool,
    quantisation_difference: str = "",
) -> Gate:
    """Judge `measured`, the arm's row of `tailgate parity`, and `answers` of its replicas after the traffic.

    Where quantisation differs from the control's (`quantisation_difference`), measured accuracy alone gives parity.
    """
    cosine = _lowest_cosine(answers)
    findings: list[tuple[str, str]] = []
    if measured:
        findings.append(_of_measured(measured))
    elif required:
        findings.append((INCONCLUSIVE, "The experiment asks for parity before the traffic, and it was not measured."))
    elif quantisation_difference and cosine is None:
        reason = f"Its weights are held as {quantisation_difference}, and what that costs was not measured"
        findings.append((INCONCLUSIVE, f"{reason}: set parity.full = true."))
    if answers:
        findings.append(judge_answers(arm, answers, quantisation_difference=bool(quantisation_difference)))
    verdict, reason = min(
        findings, key=lambda finding: ORDER.index(finding[0]), default=(INCONCLUSIVE, "Nothing was measured of it.")
    )
    value = limit = None
    if cosine is not None:
        value, limit = cosine, float(answers[0].get("min_cosine") or 0.0)
    elif _is_exact(answers) and not quantisation_difference and (of := sum(row["of"] for row in answers)):
        value, limit = float(of - sum(row["same"] for row in answers)), 0.0
    return Gate(
        arm=arm,
        gate="parity",
        kind="parity",
        value=value,
        limit=limit,
        unit="count" if cosine is None else "",
        verdict=verdict,
        reason=reason,
    )


def _of_measured(measured: Mapping[str, Any]) -> tuple[str, str]:
    verdict = str(measured.get("verdict"))
    verdict = verdict if verdict in ORDER else INCONCLUSIVE
    reasons = [str(row.get("reason")) for row in rows_of(measured.get("findings")) if row.get("verdict") == verdict]
    return verdict, f"Parity before the traffic is {verdict}: {(reasons or ['no reason is recorded.'])[0]}"


def judge_answers(
    arm: str, rows: Sequence[Mapping[str, Any]], *, quantisation_difference: bool = False
) -> tuple[str, str]:
    """Return (verdict, reason) of the answers that the arm's replicas gave after the traffic.

    In float32 they must be equal; in lower precision rounding may turn a token and all that follow it, so they only
    show that a replica answers. Vectors are held to their cosine with the control's.
    """
    silent = [row for row in rows if row.get("error")]
    answered = [row for row in rows if not row.get("error")]
    same, of = sum(row["same"] for row in answered), sum(row["of"] for row in answered)
    cosine = _lowest_cosine(rows)
    seen = f"{same} of {of} greedy answers of {arm} after the traffic equal the control's"
    if same < of and _is_exact(rows) and not quantisation_difference and cosine is None:
        return FAIL, f"{seen}, and in float32 all must be: `tailgate parity` names the first token that differs."
    if silent:
        who = silent[0].get("replica") or arm
        return INCONCLUSIVE, f"{who} did not answer after the traffic: {silent[0].get('error')}."
    if not of:
        return INCONCLUSIVE, f"No replica of {arm} was asked after the traffic."
    if cosine is not None:
        limit = float(rows[0].get("min_cosine") or 0.0)
        seen = f"The lowest cosine of a vector of {arm} after the traffic with the control's is {cosine:.6f}"
        return (PASS if cosine >= limit else FAIL), f"{seen}, limit {limit:g}."
    return PASS, f"{seen}."


def _lowest_cosine(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the lowest cosine of a vector with the control's; None for tokens or without answers."""
    known = [float(row["cosine"]) for row in rows if isinstance(row.get("cosine"), (int, float))]
    return min(known, default=None)


def _is_exact(rows: Sequence[Mapping[str, Any]]) -> bool:
    return all(row.get("dtype") == "float32" for row in rows)
