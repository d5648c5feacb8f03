"""What load an arm holds, by the steps of a search, and what external arms report of theirs."""

from __future__ import annotations

from analysis.report.comparing import load_ratios
from analysis.report.tables import Table
from analysis.report.values import DASH, count, figure, interval, percent, rate, text
from analysis.summary.model import Spike, Summary
from analysis.wording import counted

HELD = {"held": "held", "missed": "missed", "undecided": "too few"}


def knees(summary: Summary) -> Table:
    """The bracket of each arm, the control first; empty where no search was made."""
    against = load_ratios(summary)
    return Table(
        kinds={"Arm": "arm"},
        rows=[
            {
                "Arm": text(row.arm),
                "Highest held": rate(row.passed_rps),
                "Lowest missed": rate(row.failed_rps),
                "95 % of the knee": interval(row.low_rps, row.high_rps, figure),
                "Goodput there": rate(row.goodput_rps),
                "Most goodput": rate(row.highest_rps),
                "Over the control's": against.get(text(row.arm), DASH),
                "Trials": count(row.trials),
            }
            for row in (summary.saturation.brackets if summary.saturation else ())
        ],
    )


def steps(summary: Summary) -> Table:
    """Every step of the search in order of trial, rate and arm."""
    return Table(
        kinds={"Arm": "arm", "Step": "words", "Why": "reason"},
        rows=[
            {
                "Arm": text(row.arm),
                "Trial": count(row.trial),
                "Rate": rate(row.rate),
                "Requests": count(row.requests),
                "Goodput": rate(row.goodput_rps),
                "Good": percent(100.0 * row.good / row.requests if row.requests else None),
                "Step": HELD[row.held],
                "Why": text(row.reason),
            }
            for row in (summary.saturation.steps if summary.saturation else ())
        ],
    )


def objectives(summary: Summary) -> str:
    """What a step must keep to count as held, in words."""
    search = summary.saturation
    if search is None:
        return DASH
    parts = list(map(text, search.objectives))
    if search.attainment_pct is not None:
        named = ", ".join(f"{name} ≤ {figure(limit)} ms" for name, limit in search.goodput_limits.items())
        parts.append(f"{percent(search.attainment_pct)} of the requests with {named}")
    return "; ".join(parts) or DASH


def server_load(summary: Summary) -> Table:
    """The most of each external arm, and what came of its pages; empty where none shows its load."""
    return Table(
        kinds={"Arm": "arm", "First failure": "reason"},
        rows=[
            {
                "Arm": text(row.arm),
                "Most running": count(row.most_running),
                "Most waiting": count(row.most_waiting),
                "Cache at most": percent(row.most_cache_pct),
                "Preemptions": count(row.preemptions),
                "Pages read": count(row.answered),
                "Failed": count(row.failed),
                "Late": count(row.late),
                "First failure": text(row.why),
            }
            for row in (summary.server_load.arms if summary.server_load else ())
        ],
    )


def meanwhile(spike: Spike) -> str:
    """What a server reported during the spike: "31 waiting, cache 99.5 %, 3 preemptions"."""
    state = spike.server
    if state is None:
        return DASH
    parts = [
        "" if state.running is None else f"{count(state.running)} running",
        "" if state.waiting is None else f"{count(state.waiting)} waiting",
        "" if state.cache_pct is None else f"cache {percent(state.cache_pct)}",
        "" if state.preemptions is None else counted(state.preemptions, "preemption", count),
    ]
    return ", ".join(filter(None, parts)) or DASH
