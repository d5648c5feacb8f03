"""What all reports say of which policy to ship."""

from __future__ import annotations

from analysis.frontier.summary_rows import asks_nothing
from analysis.judging.gates import FAIL
from analysis.report.tables import Table
from analysis.report.values import (
    DASH,
    Row,
    at,
    byte_size,
    count,
    is_number,
    percent,
    rate,
    rows,
    seconds,
    text,
)

_HELD = {"held": "held", "missed": "missed", "undecided": "too few"}


def answer(summary: Row) -> list[str]:
    """The answer, a sentence each; empty where no search was made."""
    sentences = at(summary, "frontier", "answer")
    return [text(line) for line in sentences] if isinstance(sentences, list) else []


def title(summary: Row) -> str:
    """The title of a search without verdicts, in place of one; empty elsewhere, and where an arm is FAIL."""
    unasked = asks_nothing(summary.get("frontier")) and at(summary, "overall") != FAIL
    return "Which policy to ship" if unasked else ""


def latencies(summary: Row) -> str:
    """What the chart of latency against load draws, such as "p99 TTFT"; empty where it has nothing to draw."""
    return str(at(summary, "frontier", "latency", "label") or "")


def holdings(summary: Row) -> Table:
    """What each arm surely holds and surely does not, the control first, and what it costs to start."""
    return Table(
        kinds={"Arm": "arm"},
        rows=[
            {
                "Arm": text(row.get("arm")),
                "Surely holds": rate(row.get("low_rps")),
                "As seen": rate(row.get("seen_rps")),
                "Surely not above": rate(row.get("high_rps")),
                "Start": seconds(at(row, "start", "serving_s")),
                "Device memory": byte_size(at(row, "start", "memory_bytes")),
                "Starts": count(row.get("starts")),
                "Steps": count(row.get("steps")),
            }
            for row in rows(summary, "frontier", "arms")
        ],
    )


def held(summary: Row) -> dict[str, Row]:
    """What each arm of a search holds and its start, by its name. The latencies of a search are those of overload: they
    say nothing of an arm."""
    return {str(row.get("arm")): row for row in rows(summary, "frontier", "arms")}


def steps(summary: Row) -> Table:
    """Every step of the search in order of trial, rate and arm."""
    shown = []
    for row in rows(summary, "frontier", "steps"):
        requests, good = row.get("requests"), row.get("good")
        share = 100.0 * good / requests if is_number(requests) and is_number(good) and requests else None
        shown.append(
            {
                "Arm": text(row.get("arm")),
                "Trial": count(row.get("trial")),
                "Rate": rate(row.get("rate")),
                "Requests": count(requests),
                "Good": percent(share),
                "Step": _HELD.get(str(row.get("held")), DASH),
                "Why": text(row.get("reason")),
            }
        )
    return Table(rows=shown, kinds={"Arm": "arm", "Step": "words", "Why": "reason"})


def objective(summary: Row) -> str:
    """What a step must keep to count as held, in words."""
    return text(at(summary, "frontier", "objective"))
