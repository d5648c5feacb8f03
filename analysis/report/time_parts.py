"""What the reports say of where the time of requests went: a table, and bars on one scale a quantile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from analysis.report.arms import arms_of
from analysis.report.tables import Table
from analysis.report.values import Row, at, count, is_number, metric_label, milliseconds, rows, text

PARTS = {"queue": "Queue", "prefill": "Prefill", "decode": "Decode", "stall": "Compile stall", "rest": "Rest"}
BAR_WIDTH = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """The time of one arm's requests around one quantile: `segments` are (part, left, width) up to BAR_WIDTH."""

    arm: str
    e2e: str
    requests: str
    segments: tuple[tuple[str, float, float], ...]
    values: tuple[str, ...]  # in the order of PARTS

    @property
    def said(self) -> str:
        """The bar in words."""
        return ", ".join(f"{name.lower()} {value}" for name, value in zip(PARTS.values(), self.values, strict=True))


def bars(summary: Row) -> dict[str, list[Bar]]:
    """The bars by what they are around, the control's first; the longest around a quantile is BAR_WIDTH long."""
    found = list(_known(summary))
    drawn = {}
    for quantile in sorted({row["quantile"] for _, row in found}):
        of_quantile = [(arm, row) for arm, row in found if row["quantile"] == quantile]
        longest = max(_total(row) for _, row in of_quantile)
        scale = BAR_WIDTH / longest if longest > 0 else 0.0
        drawn[metric_label("e2e", quantile)] = [_bar(arm, row, scale) for arm, row in of_quantile]
    return drawn


def table(summary: Row) -> Table:
    """The same in figures; empty where no server reports its times."""
    return Table(
        kinds={"Around": "words", "Arm": "arm"},
        rows=[
            {
                "Around": around,
                "Arm": bar.arm,
                "E2E": bar.e2e,
                **dict(zip(PARTS.values(), bar.values, strict=True)),
                "Requests": bar.requests,
            }
            for around, of_quantile in bars(summary).items()
            for bar in of_quantile
        ],
    )


def _known(summary: Row) -> Iterator[tuple[str, Row]]:
    for arm in arms_of(summary):
        for row in rows(arm, "time_parts"):
            if all(is_number(at(row, key)) for key in ("quantile", *(f"{part}_ms" for part in PARTS))):
                yield text(arm.get("name")), row


def _total(row: Row) -> float:
    return float(sum(row[f"{part}_ms"] for part in PARTS))


def _bar(arm: str, row: Row, scale: float) -> Bar:
    segments, left = [], 0.0
    for part in PARTS:
        width = max(0.0, scale * row[f"{part}_ms"])
        segments.append((part, left, width))
        left += width
    return Bar(
        arm=arm,
        e2e=milliseconds(row.get("e2e_ms")),
        requests=count(row.get("requests")),
        segments=tuple(segments),
        values=tuple(milliseconds(row[f"{part}_ms"]) for part in PARTS),
    )
