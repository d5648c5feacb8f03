"""Parity: the arm computes what the control does ([parity])."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tailgate.analysis.judging.gates import FAIL, INCONCLUSIVE, ORDER, PASS, Gate
from tailgate.analysis.judging.gates.greedy import greedy_gate
from tailgate.analysis.records.plain_values import mapping, number, rows_of
from tailgate.analysis.run.run import Run


def parity_gates(run: Run, arm: str) -> list[Gate]:
    """Judge parity if it was measured or required, answers must be equal or are missing, or quantisation differs.

    Answers in lower precision alone judge nothing.
    """
    account, settings = run.account(arm), mapping(run.records.experiment.get("parity"))
    if account.greedy_trials:
        return [greedy_gate(run, arm)]
    required = settings.get("full") is True
    telling = any(row.get("error") or _must_be_equal(row) for row in account.answers)
    # Where whole servers are compared, nothing is said of what they compute.
    whole = run.records.experiment.get("compare_models") is True
    difference = "" if whole and not required else run.quantisation_difference(arm)
    if not (account.parity or required or telling or difference):
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
    exact = [row for row in answers if _must_be_equal(row, quantised=bool(quantisation_difference))]
    findings: list[tuple[str, str]] = []
    if measured:
        known = str(measured.get("verdict"))
        known = known if known in ORDER else INCONCLUSIVE
        reasons = [str(row.get("reason")) for row in rows_of(measured.get("findings")) if row.get("verdict") == known]
        why = (reasons or ["no reason is recorded."])[0]
        findings.append((known, f"Parity before the traffic is {known}: {why}"))
    elif required:
        findings.append((INCONCLUSIVE, "The experiment asks for parity before the traffic, and it was not measured."))
    elif quantisation_difference and not exact:
        reason = f"Its quantisation is {quantisation_difference}, and the effect on answers was not measured"
        findings.append((INCONCLUSIVE, f"{reason}: set parity.full = true."))
    if answers:
        findings.append(judge_answers(arm, answers, quantised=bool(quantisation_difference)))
    verdict, reason = min(
        findings, key=lambda finding: ORDER.index(finding[0]), default=(INCONCLUSIVE, "Nothing was measured of it.")
    )
    value, limit, unit = None, None, "count"
    if lowest := _lowest_cosine(answers):
        value, limit, unit = *lowest, ""
    elif of := sum(row["of"] for row in exact):
        value, limit = float(of - sum(row["same"] for row in exact)), 0.0
    return Gate(
        arm=arm, gate="parity", kind="parity", value=value, limit=limit, unit=unit, verdict=verdict, reason=reason
    )


def judge_answers(arm: str, rows: Sequence[Mapping[str, Any]], *, quantised: bool = False) -> tuple[str, str]:
    """Return (verdict, reason) of the answers that the arm's replicas gave after the traffic.

    In float32 they must be equal, and vectors near the control's; in lower precision rounding may turn a token and all
    that follow it, so they only show that a replica answers.
    """
    same, of = (sum(row[key] for row in rows) for key in ("same", "of"))
    seen = f"{same} of {of} greedy answers of {arm} after the traffic equal the control's"
    must = ", and in float32 all must be: `tailgate parity` names the first token that differs"
    if lowest := _lowest_cosine(rows):
        seen = f"The lowest cosine of a vector of {arm} after the traffic with the control's is {lowest[0]:.6f}"
        must = f", limit {lowest[1]:g}"
    if any(row["same"] < row["of"] for row in rows if _must_be_equal(row, quantised=quantised)):
        return FAIL, f"{seen}{must}."
    if silent := next((row for row in rows if row.get("error")), None):
        fault = f"{silent.get('replica') or arm} did not answer after the traffic: {silent['error']}."
        return INCONCLUSIVE, "Answers are asked for after the traffic." if silent.get("later") else fault
    if not of:
        return INCONCLUSIVE, f"No replica of {arm} was asked after the traffic."
    return PASS, f"{seen}{must if lowest else ''}."


def _lowest_cosine(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
    """Return the lowest cosine of a vector with the control's, and its limit; None for tokens or without answers."""
    known = [(number(row.get("cosine")), number(row.get("min_cosine"))) for row in rows]
    return min(((cosine, limit) for cosine, limit in known if cosine is not None and limit is not None), default=None)


def _must_be_equal(row: Mapping[str, Any], *, quantised: bool = False) -> bool:
    return "cosine" in row or (row.get("dtype") == "float32" and not quantised)
