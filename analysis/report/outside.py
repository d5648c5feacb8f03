"""What the reports say of compiles beyond their events: causes of long requests, and stalls seen from outside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from analysis.report.reading import arms_of, metric_names
from analysis.report.tables import Figure, Shown, Table, figures_of
from analysis.report.values import (
    DASH,
    Row,
    at,
    count,
    figure,
    interval,
    is_number,
    milliseconds,
    percent,
    probability,
    rows,
    seconds,
    text,
)
from analysis.run.spikes import CAUSES

MOST_STALLS = 20
_OWN = ("compile", "part", "unknown")
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
    shown: list[Shown] = [
        (cause.capitalize(), name, show, ("causes", cause, key))
        for cause in reversed(CAUSES)
        for name, show, key in (
            ("requests", count, "requests"),
            ("held up by compiles", seconds, "seconds"),
            ("then in their backlog", seconds, "backlog_s"),
            ("took much too long", count, "excursions"),
            ("beyond what their length explains", seconds, "excess_s"),
        )
        if not (cause == "other" and key in ("seconds", "backlog_s"))
        and not (cause == "in the backlog of one" and key == "seconds")
    ]
    if any(at(arm, "backlog") for arm in arms):
        shown.append(("Steady traffic", "in a backlog of compiles", _behind, ("backlog",)))
    known = metric_names(summary)
    for metric, name in ((metric, known[metric]) for metric in ("ttft", "e2e") if metric in known):
        without, explained = f"p99_{metric}_ms_without", f"p99_{metric}_explained"
        for label, keys, show in (
            (f"p99 {name}, for these requests", [without, f"{without}_least", f"{without}_most"], milliseconds),
            (f"p99 {name}, 95 % limits", [without, f"{without}_low", f"{without}_high"], milliseconds),
            (
                f"share of p99 {name} explained, 95 % limits",
                [f"{explained}_pct", f"{explained}_low_pct", f"{explained}_high_pct"],
                percent,
            ),
        ):
            shown.append(("Without compiles", label, partial(_limits, keys=keys, show=show), ()))
    if any(at(arm, "without_withdrawn") for arm in arms):
        shown.append(("Without compiles", "not known, since", text, ("without_withdrawn",)))
    return figures_of(arms, shown)


def _behind(backlog: object) -> str:
    part = at(backlog, "steady_behind")
    return f"{count(part)} of {count(at(backlog, 'steady_requests'))}" if is_number(part) else DASH


def _limits(compiles: object, *, keys: Sequence[str], show: Callable[[object], str]) -> str:
    value, low, high = (at(compiles, key) for key in keys)
    limits = interval(low, high, show)
    return show(value) if limits == DASH else f"{show(value)} {limits}"


def outside(summary: Row) -> list[Figure]:
    """What shows of every arm without its telemetry, and how far the two agree."""
    arms = [at(arm, "blackbox") for arm in arms_of(summary)]
    if not any(isinstance(arm, Mapping) for arm in arms):
        return []
    shown: tuple[Shown, ...] = (
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
    return [row for row in figures_of(arms, shown) if row.known]


def own_stalls(summary: Row) -> list[tuple[object, Row]]:
    """The arm's own stalls, each with the arm's name; of an arm with telemetry, whose compiles are listed anyway, those
    that no compile event explains."""
    return [
        (arm.get("name"), stall)
        for arm in arms_of(summary)
        for stall in rows(arm, "blackbox", "stalls")
        if stall.get("cause") in _OWN and (isinstance(at(arm, "external"), Mapping) or stall.get("explained") is False)
    ]


def stalls(summary: Row) -> Table:
    """The longest of them."""
    own = sorted(
        own_stalls(summary), key=lambda item: -(item[1]["seconds"] if is_number(item[1].get("seconds")) else 0.0)
    )
    return Table(
        kinds={"Arm": "arm", "Cause": "words"},
        rows=[
            {
                "Arm": text(name),
                "Trial": text(stall.get("trial")),
                "At": seconds(stall.get("offset_s")),
                "Took": seconds(stall.get("seconds")),
                "Cause": NAMES.get(str(stall.get("cause")), DASH),
                "First-seen length": figure(stall.get("shape")),
                "Requests in flight": count(stall.get("requests")),
            }
            for name, stall in own[:MOST_STALLS]
        ],
    )
