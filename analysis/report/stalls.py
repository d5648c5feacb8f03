"""What the reports say of compiles beyond their events: causes of long requests, and stalls that clients saw."""

from __future__ import annotations

from collections.abc import Mapping

from analysis.report.arms import arms_of
from analysis.report.tables import Figure, Shown, Table, figures_of
from analysis.report.values import (
    DASH,
    Row,
    at,
    count,
    is_number,
    rows,
    seconds,
    text,
)
from analysis.run.attribution import CAUSES

_MOST_STALLS = 20
_OWN = ("part", "unknown")
_NAMES = {"part": "of some requests, while others were answered", "unknown": "unexplained"}


def causes(summary: Row) -> list[Figure]:
    """Requests and seconds by cause, a value for every arm in the order of `arms_of`; empty without telemetry."""
    arms = [at(arm, "compile") for arm in arms_of(summary)]
    if not any(at(arm, "causes") for arm in arms):
        return []
    shown: list[Shown] = [
        (cause.capitalize(), name, show, ("causes", cause, key))
        for cause in reversed(CAUSES)
        for name, show, key in (
            ("requests", count, "requests"),
            ("held up by compiles", seconds, "seconds"),
            ("took much too long", count, "excursions"),
            ("beyond what their length explains", seconds, "excess_s"),
        )
        if not (cause in CAUSES[:2] and key == "seconds")
    ]
    return figures_of(arms, shown)


def counts(summary: Row) -> list[Figure]:
    """The stalls of every arm by cause, a value for every arm."""
    arms = [at(arm, "client_stalls") for arm in arms_of(summary)]
    if not any(isinstance(arm, Mapping) for arm in arms):
        return []
    shown: tuple[Shown, ...] = (
        ("Stalls", "unexplained", count, ("unknown",)),
        ("Stalls", "of the whole host", count, ("host",)),
        ("Stalls", "long prompts, as long elsewhere", count, ("work",)),
        ("Stalls", "of some requests, while others were answered", count, ("part",)),
        ("Stalls", "would show from", seconds, ("detectable_s",)),
    )
    return [row for row in figures_of(arms, shown) if row.known]


def unexplained_stalls(summary: Row) -> list[tuple[object, Row]]:
    """The stalls that are not the host's nor their prompts', and that no compile event explains, each with the name of
    its arm."""
    return [
        (arm.get("name"), stall)
        for arm in arms_of(summary)
        for stall in rows(arm, "client_stalls", "stalls")
        if stall.get("cause") in _OWN and not stall.get("explained")
    ]


def longest_stalls(summary: Row) -> Table:
    """The longest unexplained stalls."""
    own = sorted(
        unexplained_stalls(summary),
        key=lambda item: -(item[1]["seconds"] if is_number(item[1].get("seconds")) else 0.0),
    )
    return Table(
        kinds={"Arm": "arm", "Cause": "words"},
        rows=[
            {
                "Arm": text(name),
                "Trial": text(stall.get("trial")),
                "At": seconds(stall.get("offset_s")),
                "Took": seconds(stall.get("seconds")),
                "Cause": _NAMES.get(str(stall.get("cause")), DASH),
                "Requests in flight": count(stall.get("requests")),
            }
            for name, stall in own[:_MOST_STALLS]
        ],
    )
