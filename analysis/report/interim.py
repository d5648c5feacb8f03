"""How a verdict formed, and what became of a ramp."""

from __future__ import annotations

from analysis.report.tables import Table
from analysis.report.values import count, quantity, seconds, span, text
from analysis.summary.model import Summary, WeightChange
from analysis.wording import counted

_OUTCOMES = {"promoted": "promoted", "rollback": "rolled back", "hold": "held"}


def words(summary: Summary) -> list[tuple[str, str]]:
    """(what, in words) of interim analyses, of a ramp, and of weights that were set by hand; empty for other runs."""
    lines = []
    if (sequential := summary.sequential) is not None:
        how = "after every block; each verdict errs as often over all analyses as it would in one"
        lines.append(("Interim analyses", f"{how}; {text(sequential.ended)}" if sequential.ended else how))
    if (ramp := summary.ramp) is not None:
        outcome = _OUTCOMES.get(ramp.outcome, text(ramp.outcome))
        reached = max((_share(row, ramp.candidate) or 0.0 for row in summary.weights), default=None)
        parts = [
            f"{text(ramp.candidate)} was {outcome} at {quantity(reached, 'pct')}: {text(ramp.reason)}",
            f"{counted(ramp.exposed, 'request', count)} exposed, {count(ramp.hurt)} hurt",
        ]
        if ramp.rollback_s is not None:
            parts.append(f"rolled back within {seconds(ramp.rollback_s)}")
        lines.append(("Ramp", "; ".join(parts)))
    if by_hand := [row for row in summary.weights if row.action == "set by hand"]:
        lines.append(("Weights", "; ".join(map(_by_hand, by_hand))))
    return lines


def _share(row: WeightChange, candidate: str) -> float | None:
    """The candidate's share of the traffic in percent after a change of weights; None where no arm had any."""
    total = sum(row.weights.values())
    return 100.0 * row.weights.get(candidate, 0.0) / total if total else None


def _by_hand(row: WeightChange) -> str:
    shares = [f"{text(arm)}={value:g}" for arm, value in row.weights.items()]
    copies = [f"copies of {value:g} % to {text(arm)}" for arm, value in row.shadows_pct.items()]
    return f"set by hand after {span(row.offset_s)}: {', '.join([*shares, *copies])} ({text(row.reason)})"


def ramp_steps(summary: Summary) -> Table:
    """What share of the traffic the candidate had from when on, and why; empty where there was no ramp."""
    candidate = "" if summary.ramp is None else summary.ramp.candidate
    return Table(
        kinds={"Did": "words", "Why": "reason"},
        rows=[
            {
                "At": span(row.offset_s),
                "Did": text(row.action),
                "Share": quantity(_share(row, candidate), "pct"),
                "Why": text(row.reason),
            }
            for row in (summary.weights if candidate else ())
        ],
    )
