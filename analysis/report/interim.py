"""How a verdict formed, and what became of a ramp, for every report: the same words and rows."""

from __future__ import annotations

from functools import partial

from analysis.report.tables import Table
from analysis.report.values import (
    DASH,
    Row,
    at,
    count,
    interval,
    is_number,
    label,
    quantity,
    rows,
    seconds,
    span,
    text,
    verdict,
)
from analysis.wording import counted

_KINDS = {"Arm": "arm", "Gate": "words", "Verdict": "words", "Did": "words", "Why": "reason"}
_OUTCOMES = {"promoted": "promoted", "rollback": "rolled back", "hold": "held"}


def words(summary: Row) -> list[tuple[str, str]]:
    """(what, in words) of a run that was looked at while it went on, of a ramp, and of weights that somebody set; empty
    for any other."""
    lines = []
    if at(summary, "sequential", "alpha"):
        ended = text(at(summary, "sequential", "ended"))
        how = "analysed after every block; each verdict errs as often over all analyses as it would in one"
        lines.append(("Interim analyses", how if ended == DASH else f"{how}; {ended}"))
    if (outcome := at(summary, "ramp", "outcome")) is not None:
        told = _OUTCOMES.get(str(outcome), text(outcome))
        exposed, hurt = at(summary, "ramp", "exposed"), at(summary, "ramp", "hurt")
        parts = [f"{text(at(summary, 'ramp', 'candidate'))} was {told}: {text(at(summary, 'ramp', 'reason'))}"]
        parts.append(f"{counted(exposed, 'request', count)} exposed, {count(hurt)} hurt")
        if is_number(back := at(summary, "ramp", "rollback_s")):
            parts.append(f"back within {seconds(back)} of what was told")
        lines.append(("Ramp", "; ".join(parts)))
    for part in ("ramp", "weights"):
        by_hand = [row for row in rows(summary, part, "changes") if row.get("action") == "set by hand"]
        if by_hand:
            lines.append(("Weights", "; ".join(map(_by_hand, by_hand))))
    return lines


def _share(row: Row, candidate: object) -> float | None:
    """The candidate's share of the traffic in percent after a change of weights; None where nobody had any."""
    weights = row.get("weights")
    known = {arm: value for arm, value in weights.items() if is_number(value)} if isinstance(weights, dict) else {}
    total = sum(known.values())
    return 100.0 * known.get(candidate, 0) / total if total else None


def _by_hand(row: Row) -> str:
    weights, shadows = row.get("weights"), row.get("shadows_pct")
    shares = [f"{arm}={value}" for arm, value in (weights if isinstance(weights, dict) else {}).items()]
    copies = [
        f"copies of {value:g} % to {arm}"
        for arm, value in (shadows if isinstance(shadows, dict) else {}).items()
        if is_number(value)
    ]
    return f"set by hand after {span(row.get('offset_s'))}: {', '.join([*shares, *copies])} ({text(row.get('reason'))})"


def decisions(summary: Row) -> Table:
    """When the evidence on each gate decided it."""
    body = [
        {
            "Arm": text(row.get("arm")),
            "Gate": label(row.get("gate")),
            "Verdict": verdict(row.get("verdict")),
            "Decided after": span(row["decided_s"]) if is_number(row.get("decided_s")) else "open",
            "Value": quantity(_last(row, "value"), row.get("unit")),
            "At any look": interval(_last(row, "low"), _last(row, "high"), partial(quantity, unit=row.get("unit"))),
            "Limit": quantity(row.get("limit"), row.get("unit")),
        }
        for row in rows(summary, "sequential", "paths")
    ]
    return Table(rows=body, kinds=_KINDS)


def ramp_steps(summary: Row) -> Table:
    """What share of the traffic the candidate had from when on, and why."""
    candidate = at(summary, "ramp", "candidate")
    body = []
    for row in rows(summary, "ramp", "changes"):
        body.append(
            {
                "At": span(row.get("offset_s")),
                "Did": text(row.get("action")),
                "Share": quantity(_share(row, candidate), "pct"),
                "Why": text(row.get("reason")),
            }
        )
    return Table(rows=body, kinds=_KINDS)


def _last(row: Row, name: str) -> object:
    column = row.get(name)
    return column[-1] if isinstance(column, list) and column else None
