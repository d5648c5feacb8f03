"""What all reports say of an arm beside the control: latencies by quantile and phase, goodput and throughput."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from analysis.report.reading import arm_names
from analysis.report.values import (
    DASH,
    at,
    figure,
    interval,
    is_number,
    percent,
    quantity,
    ratio,
    rows,
    text,
    verdict,
)
from analysis.settings.metrics import METRIC_NAMES

Row = Mapping[str, Any]

PHASES = (
    ("steady", "Steady", "past the cold start, while neither arm compiled"),
    ("cold", "Cold", "first traffic after ready"),
    ("all", "All traffic", "what users saw"),
)
RATE_NAMES = {"goodput": "goodput", "requests": "requests completed", "output tokens": "output tokens"}


def gates(row: Row) -> bool:
    """Whether a gate rests on the comparison; of a summary that does not say, whether it is steady."""
    found = row.get("gate")
    return found if isinstance(found, bool) else row.get("phase") == "steady"


def comparisons(summary: Row) -> list[Row]:
    """Comparisons arm by arm in the order of `arm_names`, each arm's in the summary's order."""
    place = {name: position for position, name in enumerate(arm_names(summary))}
    return sorted(rows(summary, "comparisons"), key=lambda row: place.get(str(row.get("arm")), len(place)))


def shown_comparisons(summary: Row) -> list[Row]:
    """Those on which gates rest, each with the same figure over all traffic."""
    found = comparisons(summary)
    asked = {_figure(row) for row in found if gates(row)}
    return [row for row in found if gates(row) or (row.get("phase") == "all" and _figure(row) in asked)]


def _figure(row: Row) -> tuple[object, object, object]:
    return row.get("arm"), row.get("metric"), row.get("quantile")


def ratio_of(summary: Row, arm: object, metric: str) -> float | None:
    """The ratio of p99 to the control's over all traffic: what belongs beside an arm's overall quantile."""
    for row in rows(summary, "comparisons"):
        if _figure(row) == (arm, metric, 0.99) and row.get("phase") == "all":
            return row["ratio"] if is_number(row.get("ratio")) else None
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One ratio, ready to print. `tone` is slower or faster where the whole interval says so; a verdict only gates."""

    ratio: str
    limits: str
    gate: bool = False
    verdict: str = DASH
    tone: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The ratios of one arm in one phase, a line for each metric and a cell for each of `heads`."""

    arm: str
    phase: str
    title: str
    note: str
    heads: tuple[str, ...]
    lines: tuple[tuple[str, tuple[Cell, ...]], ...]


def grids(summary: Row) -> list[Grid]:
    """The grids of every arm, phase by phase; a phase or a metric of which nothing is known is left out."""
    found = comparisons(summary)
    quantiles = sorted({float(row["quantile"]) for row in found if is_number(row.get("quantile"))})
    heads = tuple(f"p{100.0 * quantile:.10g}" for quantile in quantiles)
    made = []
    for arm in arm_names(summary):
        for phase, title, note in PHASES:
            own = {
                (row.get("metric"), float(row["quantile"])): row
                for row in found
                if row.get("arm") == arm and row.get("phase") == phase and is_number(row.get("quantile"))
            }
            lines = []
            for metric, name in METRIC_NAMES.items():
                cells = tuple(_cell(own.get((metric, quantile), {})) for quantile in quantiles)
                if any(cell.ratio != DASH for cell in cells):
                    lines.append((name, cells))
            if lines:
                made.append(Grid(arm=arm, phase=phase, title=title, note=note, heads=heads, lines=tuple(lines)))
    return made


def _cell(row: Row) -> Cell:
    low, high = row.get("low"), row.get("high")
    tone = "slower" if is_number(low) and low > 1 else "faster" if is_number(high) and high < 1 else ""
    return Cell(
        ratio=ratio(row.get("ratio")),
        limits=interval(low, high),
        gate=bool(row) and gates(row),
        verdict=verdict(row.get("verdict")),
        tone=tone,
        reason=text(row.get("reason")),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RateRow:
    """One rate of one arm beside the control's, ready to print."""

    arm: str
    name: str
    value: str
    control: str
    shares: str
    ratio: str
    limits: str
    gate: bool
    least: str


def rates(summary: Row) -> list[RateRow]:
    """Goodput and throughput at the same offered load; empty where they were not compared."""
    found = []
    for row in rows(summary, "rates"):
        own, theirs = row.get("share_pct"), row.get("control_share_pct")
        shares = f"{percent(own)} / {percent(theirs)}" if is_number(own) and is_number(theirs) else DASH
        found.append(
            RateRow(
                arm=text(row.get("arm")),
                name=RATE_NAMES.get(str(row.get("rate")), text(row.get("rate"))),
                value=quantity(row.get("value"), "rps"),
                control=quantity(row.get("control_value"), "rps"),
                shares=shares,
                ratio=quantity(row.get("ratio"), "ratio"),
                limits=_limits(row.get("low"), row.get("high")),
                gate=row.get("gate") is True,
                least=quantity(row.get("min_ratio"), "ratio"),
            )
        )
    return found


def _limits(low: object, high: object) -> str:
    """One digit more than a latency's: rates of the same load differ by little."""
    if not is_number(low) or not is_number(high):
        return DASH
    return f"[{low:.3f}, {high:.3f}]"


def load_ratios(summary: Row) -> dict[str, str]:
    """By arm, the load it holds over the control's: "×1.25 [1.1, 1.6]"; empty where no search was made."""
    return {
        text(row.get("arm")): f"{ratio(row.get('ratio'))} [{figure(row.get('low'))}, {figure(row.get('high'))}]"
        for row in rows(summary, "saturation", "ratios")
        if any(is_number(at(row, key)) for key in ("ratio", "low", "high"))
    }
