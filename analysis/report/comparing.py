"""An arm against the control: ratios of latencies by quantile and phase."""

from __future__ import annotations

from dataclasses import dataclass

from analysis.report.values import DASH, interval, ratio
from analysis.summary.model import Comparison, Summary

PHASES = (
    ("steady", "Steady", "ratio of a typical block, without the cold start and what compiles delayed"),
    ("cold", "Cold", "quotient of the quantiles of the first traffic after ready"),
    ("all", "All traffic", "quotient of the whole-run quantiles, compiles included"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One ratio, ready to print. `tone` is slower or faster where the whole interval says so."""

    ratio: str = DASH
    limits: str = DASH
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


def grids(summary: Summary) -> list[Grid]:
    """The grids of every arm, phase by phase; a phase or a metric of which nothing is known is left out."""
    found: dict[tuple[str, ...], Comparison] = {
        (row.arm, row.phase, row.metric, f"{row.quantile}"): row for row in summary.comparisons
    }
    quantiles = sorted({row.quantile for row in summary.comparisons})
    heads = tuple(f"p{100.0 * quantile:.10g}" for quantile in quantiles)
    made = []
    for arm in (arm.name for arm in summary.arms):
        for phase, title, note in PHASES:
            lines = []
            for metric, name in summary.metric_names.items():
                cells = tuple(_cell(found.get((arm, phase, metric, f"{quantile}"))) for quantile in quantiles)
                if any(cell.ratio != DASH for cell in cells):
                    lines.append((name, cells))
            if lines:
                made.append(Grid(arm=arm, phase=phase, title=title, note=note, heads=heads, lines=tuple(lines)))
    return made


def _cell(row: Comparison | None) -> Cell:
    if row is None:
        return Cell()
    slower, faster = row.low is not None and row.low > 1, row.high is not None and row.high < 1
    return Cell(
        ratio=ratio(row.ratio),
        limits=interval(row.low, row.high),
        gate=row.gate,
        verdict=row.verdict or DASH,
        tone="slower" if slower else "faster" if faster else "",
        reason=row.reason,
    )
