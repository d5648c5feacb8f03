"""What all reports say of an arm beside the control: latencies by quantile and phase."""

from __future__ import annotations

from dataclasses import dataclass

from analysis.report.arms import arm_names, metric_names
from analysis.report.values import (
    DASH,
    Row,
    interval,
    is_number,
    ratio,
    rows,
    text,
    verdict,
)

PHASES = (
    ("steady", "Steady", "ratio of a typical block, without the cold start and what compiles delayed"),
    ("cold", "Cold", "quotient of the quantiles of the first traffic after ready"),
    ("all", "All traffic", "quotient of the whole-run quantiles, compiles included"),
)


def gates(row: Row) -> bool:
    """Whether a gate rests on the comparison."""
    return row.get("gate") is True


def comparisons(summary: Row) -> list[Row]:
    """Comparisons arm by arm in the order of `arm_names`, each arm's in the summary's order."""
    place = {name: position for position, name in enumerate(arm_names(summary))}
    return sorted(rows(summary, "comparisons"), key=lambda row: place.get(str(row.get("arm")), len(place)))


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
    compared = comparisons(summary)
    quantiles = sorted({float(row["quantile"]) for row in compared if is_number(row.get("quantile"))})
    heads = tuple(f"p{100.0 * quantile:.10g}" for quantile in quantiles)
    made = []
    for arm in arm_names(summary):
        for phase, title, note in PHASES:
            own = {
                (row.get("metric"), float(row["quantile"])): row
                for row in compared
                if row.get("arm") == arm and row.get("phase") == phase and is_number(row.get("quantile"))
            }
            lines = []
            for metric, name in metric_names(summary).items():
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
