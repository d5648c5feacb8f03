"""What the reports say of compiles beyond their events: causes of long requests, and stalls seen from outside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from analysis.report.reading import Figure, arms_of
from analysis.report.values import (
    DASH,
    at,
    count,
    figure,
    is_number,
    milliseconds,
    percent,
    probability,
    rows,
    seconds,
    text,
)

Row = Mapping[str, Any]
MOST_STALLS = 20
CAUSES = ("recompiled", "queued behind a compile", "slowed by one", "in the backlog of one", "other")
NAMES = {
    "compile": "compile",
    "host": "the host: every server stood still",
    "work": "the prompt: it takes as long elsewhere",
    "part": "of some requests, while others were answered",
    "unknown": "unexplained",
}


def causes(summary: Row) -> list[Figure]:
    """Requests and seconds by cause, and p99 without compiles with its interval, a value for every arm in the order of
    `arms_of`; empty where no arm has telemetry."""
    arms = [at(arm, "compile") for arm in arms_of(summary)]
    if not any(at(arm, "causes") for arm in arms):
        return []
    shown = [
        Figure(group=cause.capitalize(), name=name, values=tuple(show(at(arm, "causes", cause, key)) for arm in arms))
        for cause in CAUSES
        for name, show, key in (
            ("requests", count, "requests"),
            ("held up by compiles", seconds, "seconds"),
            ("then in their backlog", seconds, "backlog_s"),
            ("took much too long", count, "excursions"),
            ("beyond what their length explains", seconds, "excess_s"),
        )
        if not (cause == "other" and key in ("seconds", "backlog_s"))
        and not (cause == "in the backlog of one" and key == "seconds")
        and any(at(arm, "causes", cause, key) is not None for arm in arms)
    ]
    if any(at(arm, "backlog") for arm in arms):
        shown.append(
            Figure(
                group="Steady traffic",
                name="in a backlog of compiles",
                values=tuple(
                    _of(at(arm, "backlog", "steady_behind"), at(arm, "backlog", "steady_requests")) for arm in arms
                ),
            )
        )
    for metric, name in (("ttft", "TTFT"), ("e2e", "E2E")):
        for label, key, ends, show in (
            (f"p99 {name}, for these requests", f"p99_{metric}_ms_without", ("", "_least", "_most"), milliseconds),
            (f"p99 {name}, 95 % limits", f"p99_{metric}_ms_without", ("", "_low", "_high"), milliseconds),
            (
                f"share of p99 {name} explained, 95 % limits",
                f"p99_{metric}_explained",
                ("_pct", "_low_pct", "_high_pct"),
                percent,
            ),
        ):
            values = tuple(_limits(arm, key, ends, show) for arm in arms)
            shown.append(Figure(group="Without compiles", name=label, values=values))
    if any(at(arm, "without_withdrawn") for arm in arms):
        reasons = tuple(text(at(arm, "without_withdrawn")) for arm in arms)
        shown.append(Figure(group="Without compiles", name="not known, since", values=reasons))
    return shown


def _of(part: object, whole: object) -> str:
    return f"{count(part)} of {count(whole)}" if is_number(part) else DASH


def _limits(arm: object, key: str, ends: tuple[str, str, str], show: Callable[[object], str]) -> str:
    value, low, high = (at(arm, f"{key}{end}") for end in ends)
    if not is_number(low) and not is_number(high):
        return show(value)
    return f"{show(value)} [{show(low)}, {show(high)}]"


def outside(summary: Row) -> list[Figure]:
    """What shows of every arm without its telemetry, and how far the two agree; empty for older summaries."""
    arms = [at(arm, "blackbox") for arm in arms_of(summary)]
    if not any(isinstance(arm, Mapping) for arm in arms):
        return []
    shown: tuple[tuple[str, str, Callable[[object], str], tuple[str, ...]], ...] = (
        ("Stalls", "called compiles", count, ("compiles",)),
        ("Stalls", "unexplained", count, ("unexplained",)),
        ("Stalls", "of the whole host", count, ("host",)),
        ("Stalls", "long prompts, as long elsewhere", count, ("work",)),
        ("Stalls", "of some requests, while others were answered", count, ("part",)),
        ("Stalls", "p that first-seen shapes began them by chance", probability, ("p_value",)),
        ("Stalls", "would show from", seconds, ("detectable_s",)),
        ("First-seen shapes, no stall", "wait longer by", milliseconds, ("first_seen", "excess_ms")),
        ("First-seen shapes, no stall", "p", probability, ("first_seen", "p_value")),
        ("Beside telemetry", "compiles by telemetry", count, ("agreement", "telemetry")),
        ("Beside telemetry", "seen as a stall", count, ("agreement", "seen")),
        ("Beside telemetry", "called a compile", count, ("agreement", "called")),
        ("Beside telemetry", "missed", count, ("agreement", "missed")),
        ("Beside telemetry", "called without one", count, ("agreement", "extra")),
        ("Beside telemetry", "onset off by, median", milliseconds, ("agreement", "onset_error_ms")),
    )
    figures = [
        Figure(group=group, name=name, values=tuple(show(at(arm, *path)) for arm in arms))
        for group, name, show, path in shown
    ]
    return [row for row in figures if any(value != DASH for value in row.values)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StallLine:
    """One stall, ready to print."""

    arm: object
    trial: str
    begin: str
    took: str
    cause: str
    shape: str
    requests: str


def stalls(summary: Row) -> list[StallLine]:
    """The longest stalls that are the arm's own, of arms without telemetry: the others' compiles are listed anyway."""
    found = [
        (arm.get("name"), stall)
        for arm in arms_of(summary)
        if isinstance(at(arm, "external"), Mapping)
        for stall in rows(arm, "blackbox", "stalls")
        if stall.get("cause") in ("compile", "part", "unknown")
    ]
    found.sort(key=lambda item: -(item[1]["seconds"] if is_number(item[1].get("seconds")) else 0.0))
    return [
        StallLine(
            arm=name,
            trial=text(stall.get("trial")),
            begin=seconds(stall.get("offset_s")),
            took=seconds(stall.get("seconds")),
            cause=NAMES.get(str(stall.get("cause")), DASH),
            shape=figure(stall.get("shape")),
            requests=count(stall.get("requests")),
        )
        for name, stall in found[:MOST_STALLS]
    ]
