"""Small charts of judged figures over many runs, as coordinates that a template draws: no script is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.report.values import Row, is_number, moment, quantity, rows, text

WIDTH, HEIGHT = 340.0, 150.0
LEFT, RIGHT, TOP, BOTTOM = 8.0, 84.0, 14.0, 24.0
_CLEAR = 12.0  # between two labels, from base line to base line


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One run: where it stands, and what a pointer on it reads."""

    x: float
    y: float
    low: float | None  # ends of its whisker
    high: float | None
    candidate: bool
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """Words at the right of the chart."""

    y: float
    text: str
    kind: str  # value | limit


@dataclass(frozen=True, slots=True, kw_only=True)
class TrendChart:
    """The course of one figure of one arm."""

    arm: str
    name: str
    verdict: str
    words: str  # the whole chart in a sentence
    marks: Sequence[Mark]
    path: str
    limit_y: float | None
    worse: tuple[float, float] | None  # top and height of the part of the chart that is beyond the limit
    labels: Sequence[Label]
    first: str  # the day of the first run, and of the last
    last: str

    width = WIDTH
    height = HEIGHT
    left = LEFT
    right = WIDTH - RIGHT
    base = HEIGHT - BOTTOM


def trend_charts(document: Row) -> list[TrendChart]:
    """A chart for each series of the comparison, in its order."""
    verdicts = {(row.get("arm"), row.get("figure")): row.get("verdict") for row in rows(document, "figures")}
    charts = []
    for series in rows(document, "trends"):
        chart = _chart(series, verdicts.get((series.get("arm"), series.get("figure"))), document)
        if chart is not None:
            charts.append(chart)
    return charts


def _chart(series: Row, verdict: object, document: Mapping[str, Any]) -> TrendChart | None:
    points = [point for point in rows(series, "points") if is_number(point.get("value"))]
    if not points:
        return None
    unit, limit = series.get("unit"), series.get("limit")
    ends = [value for point in points for key in ("value", "low", "high") if is_number(value := point.get(key))]
    ends += [limit] if is_number(limit) else []
    low, high = min(ends), max(ends)
    pad = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
    low, high = low - pad, high + pad

    def y(value: float) -> float:
        return round(TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM), 1)

    inner = WIDTH - LEFT - RIGHT - 16.0
    step = inner / max(1, len(points) - 1)
    newest = document.get("candidate", {}).get("run_id")
    marks = [
        Mark(
            x=round(LEFT + 8.0 + (index * step if len(points) > 1 else inner), 1),
            y=y(point["value"]),
            low=y(point["low"]) if is_number(point.get("low")) else None,
            high=y(point["high"]) if is_number(point.get("high")) else None,
            candidate=point.get("run_id") == newest and index == len(points) - 1,
            title=f"{text(point.get('run_id'))}: {quantity(point.get('value'), unit)}",
        )
        for index, point in enumerate(points)
    ]
    labels = [Label(y=marks[-1].y, text=quantity(points[-1]["value"], unit), kind="value")]
    limit_y = y(limit) if is_number(limit) else None
    if limit_y is not None:
        labels.append(Label(y=limit_y, text=f"limit {quantity(limit, unit)}", kind="limit"))
    below = HEIGHT - BOTTOM
    worse = None
    if limit_y is not None:
        worse = (TOP, limit_y - TOP) if series.get("less_is_better") is not False else (limit_y, below - limit_y)
    name = text(series.get("label"))
    return TrendChart(
        arm=text(series.get("arm")),
        name=name,
        verdict=verdict if isinstance(verdict, str) else "",
        words=f"{name} over {len(points)} runs, from {quantity(points[0]['value'], unit)} to "
        f"{quantity(points[-1]['value'], unit)}",
        marks=marks,
        path=" ".join(f"{'M' if not index else 'L'}{mark.x} {mark.y}" for index, mark in enumerate(marks)),
        limit_y=limit_y,
        worse=worse,
        labels=_apart(labels),
        first=_day(points[0]),
        last=_day(points[-1]) if len(points) > 1 else "",
    )


def _apart(labels: Sequence[Label]) -> list[Label]:
    """The labels, moved so that none lies on another."""
    ordered = sorted(labels, key=lambda label: label.y)
    placed: list[Label] = []
    for label in ordered:
        least = placed[-1].y + _CLEAR if placed else label.y
        placed.append(Label(y=round(max(label.y, least), 1), text=label.text, kind=label.kind))
    over = placed[-1].y - (HEIGHT - BOTTOM + 4.0)
    return [Label(y=round(label.y - max(0.0, over), 1), text=label.text, kind=label.kind) for label in placed]


def _day(point: Row) -> str:
    return moment(point.get("created"))[:10]
