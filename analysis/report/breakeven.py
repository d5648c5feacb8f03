"""What all reports say of when an arm pays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from analysis.report.values import DASH, at, byte_size, figure, is_number, rows, seconds, span, text

NEVER = "never"
RANGES = (
    "In brackets stand the far ends of both arms' intervals. Replicas are taken to add up, and the arm pays for its "
    "whole start, as the control is there already."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Payoff:
    """One arm, ready to print; ranges read "as seen (low to high)"."""

    arm: str
    holds: str
    needs: str
    start: str
    warmup: str
    compiling: str
    memory: str
    cost: str
    saves: str
    hours: str
    requests: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Payoffs:
    """The arms with the control first, what the rollout is, and the name of the figure that depends on it."""

    about: str
    saves: str
    arms: tuple[Payoff, ...]

    @property
    def figures(self) -> list[tuple[str, ...]]:
        """One row a figure: its name, then its value for each arm."""
        names = (
            *("replica holds, requests/s", "GPUs", "start", "of it warm-up", "compiling"),
            *("device memory of a replica", "start costs, GPU-seconds", self.saves, "pays after", "or after requests"),
        )
        values = [
            (
                *(row.holds, row.needs, row.start, row.warmup, row.compiling),
                *(row.memory, row.cost, row.saves, row.hours, row.requests),
            )
            for row in self.arms
        ]
        return list(zip(names, *values, strict=True))


def payoffs(summary: Mapping[str, Any]) -> Payoffs:
    """The break-even of each arm; no arms where the summary has none."""
    found = at(summary, "break_even")
    load, each = at(found, "load_rps"), at(found, "gpus_per_replica")
    given = is_number(load)
    one = "1 GPU" if each == 1 else f"{figure(each)} GPUs"
    return Payoffs(
        about=f"{figure(load)} requests/s, {one} a replica" if given else f"any load, {one} a replica",
        saves="GPUs saved" if given else "GPU-seconds saved a request",
        arms=tuple(_payoff(row) for row in rows(found, "arms")),
    )


def _payoff(row: Mapping[str, Any]) -> Payoff:
    control = row.get("control") is True
    return Payoff(
        arm=text(row.get("arm")),
        holds=_range(row.get("rps"), figure),
        needs=_range(row.get("gpus"), figure),
        start=seconds(at(row, "start", "serving_s")),
        warmup=seconds(at(row, "start", "warmup_s")),
        compiling=seconds(at(row, "start", "compile_s")),
        memory=byte_size(at(row, "start", "memory_bytes")),
        cost=_range(row.get("start_gpu_s"), figure),
        saves=DASH if control else _range(row.get("saved"), figure),
        hours=DASH if control else _range(row.get("hours"), _hours),
        requests=DASH if control else _range(row.get("requests"), figure),
        reason=text(row.get("reason")),
    )


def _hours(value: object) -> str:
    return span(value * 3600.0) if is_number(value) else DASH


def _range(found: object, shown: Callable[[object], str]) -> str:
    """A value as seen with its limits; what is open is an en dash."""
    low, seen, high = (
        NEVER if value == NEVER else shown(value) for value in (at(found, key) for key in ("low", "seen", "high"))
    )
    if low == seen == high:
        return seen
    return f"{seen} ({low} to {high})"
