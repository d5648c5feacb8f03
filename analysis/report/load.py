"""What load an arm holds, by the steps of a search."""

from __future__ import annotations

from collections.abc import Mapping

from analysis.report.comparing import load_ratios
from analysis.report.tables import Table
from analysis.report.values import DASH, Row, at, count, figure, interval, is_number, percent, rate, rows, text

HELD = {"held": "held", "missed": "missed", "undecided": "too few"}


def knees(summary: Row) -> Table:
    """The bracket of each arm, the control first; empty where no search was made."""
    against = load_ratios(summary)
    return Table(
        kinds={"Arm": "arm"},
        rows=[
            {
                "Arm": text(row.get("arm")),
                "Highest held": rate(row.get("passed_rps")),
                "Lowest missed": rate(row.get("failed_rps")),
                "95 % of the knee": interval(row.get("low_rps"), row.get("high_rps"), figure),
                "Goodput there": rate(row.get("goodput_rps")),
                "Most goodput": rate(row.get("highest_rps")),
                "Over the control's": against.get(text(row.get("arm")), DASH),
                "Trials": count(row.get("trials")),
            }
            for row in rows(summary, "saturation", "brackets")
        ],
    )


def steps(summary: Row) -> Table:
    """Every step of the search in order of trial, rate and arm."""
    shown = []
    for row in rows(summary, "saturation", "steps"):
        requests, good = row.get("requests"), row.get("good")
        share = 100.0 * good / requests if is_number(requests) and is_number(good) and requests else None
        shown.append(
            {
                "Arm": text(row.get("arm")),
                "Trial": count(row.get("trial")),
                "Rate": rate(row.get("rate")),
                "Requests": count(requests),
                "Goodput": rate(row.get("goodput_rps")),
                "Good": percent(share),
                "Step": HELD.get(str(row.get("held")), DASH),
                "Why": text(row.get("reason")),
            }
        )
    return Table(rows=shown, kinds={"Arm": "arm", "Step": "words", "Why": "reason"})


def objectives(summary: Row) -> str:
    """What a step must keep to count as held, in words."""
    search = at(summary, "saturation")
    parts = [text(key) for key in at(search, "objectives") or []]
    limits, share = at(search, "goodput_limits"), at(search, "attainment_pct")
    if is_number(share) and isinstance(limits, Mapping):
        named = ", ".join(f"{name} ≤ {figure(limit)} ms" for name, limit in limits.items())
        parts.append(f"{percent(share)} of the requests with {named}")
    return "; ".join(parts) or DASH
