"""What delayed requests beyond single compiles: causes of long requests, and stalls that clients saw."""

from __future__ import annotations

from functools import partial

from analysis.report.tables import Figure, Shown, Table, figures_of
from analysis.report.values import count, seconds, text
from analysis.run.attribution import CAUSES
from analysis.summary.model import Arm, Stall, Summary

_MOST_STALLS = 20
_NAMES = {"part": "of some requests, while others were answered", "unknown": "unexplained"}


def causes(summary: Summary) -> list[Figure]:
    """Requests and seconds by cause, a value for every arm in order; empty without telemetry."""
    arms = summary.arms
    if not any(arm.compile.causes for arm in arms):
        return []
    shown: list[Shown] = [
        (cause.capitalize(), name, show, partial(_of_cause, cause=cause, key=key))
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


def _of_cause(arm: Arm, cause: str, key: str) -> object:
    return getattr((arm.compile.causes or {}).get(cause), key, None)


def counts(summary: Summary) -> list[Figure]:
    """The stalls of every arm by cause, a value for every arm."""
    shown: tuple[Shown, ...] = (
        ("Stalls", "unexplained", count, lambda arm: arm.client_stalls.unknown),
        ("Stalls", "of the whole host", count, lambda arm: arm.client_stalls.host),
        ("Stalls", "long prompts, as long elsewhere", count, lambda arm: arm.client_stalls.work),
        ("Stalls", "of some requests, while others were answered", count, lambda arm: arm.client_stalls.part),
        ("Stalls", "would show from", seconds, lambda arm: arm.client_stalls.detectable_s),
    )
    return [row for row in figures_of(summary.arms, shown) if row.known]


def unexplained_stalls(summary: Summary) -> list[tuple[str, Stall]]:
    """The stalls that are not the host's nor their prompts', and that no compile event explains, each with the name of
    its arm."""
    return [
        (arm.name, stall)
        for arm in summary.arms
        for stall in arm.client_stalls.stalls
        if stall.cause in _NAMES and not stall.explained
    ]


def longest_stalls(summary: Summary) -> Table:
    """The longest unexplained stalls."""
    return Table(
        kinds={"Arm": "arm", "Cause": "words"},
        rows=[
            {
                "Arm": text(name),
                "Trial": count(stall.trial),
                "At": seconds(stall.offset_s),
                "Took": seconds(stall.seconds),
                "Cause": _NAMES[stall.cause],
                "Requests in flight": count(stall.requests),
            }
            for name, stall in sorted(unexplained_stalls(summary), key=lambda item: -item[1].seconds)[:_MOST_STALLS]
        ],
    )
