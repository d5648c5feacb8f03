"""What all reports say of when an arm pays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from analysis.report.tables import Figure, Shown, figures_of
from analysis.report.values import DASH, Row, at, byte_size, figure, is_number, rows, seconds, span, text

NEVER = "never"
RANGES = (
    "In brackets stand the far ends of both arms' intervals, each of one arm alone at 95 %: which policy to ship is "
    "said with wider ones, true of all at once. Replicas are taken to add up, and the arm pays for its whole start, as "
    "the control is there already."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Payoffs:
    """What the rollout is, and of each arm its name, its figures and why it pays or does not; the control first."""

    about: str
    arms: tuple[str, ...]
    figures: tuple[Figure, ...]
    reasons: tuple[str, ...]


def payoffs(summary: Row) -> Payoffs:
    """The break-even of each arm, ranges as "seen (low to high)"; no arms where the summary has none."""
    weighed = at(summary, "break_even")
    arms = rows(weighed, "arms")
    load, each = at(weighed, "load_rps"), at(weighed, "gpus_per_replica")
    given = is_number(load)
    one = "1 GPU" if each == 1 else f"{figure(each)} GPUs"
    shown: tuple[Shown, ...] = (
        ("", "replica holds, requests/s", _range, ("rps",)),
        ("", "GPUs", _range, ("gpus",)),
        ("", "start", seconds, ("start", "serving_s")),
        ("", "of it warm-up", seconds, ("start", "warmup_s")),
        ("", "compiling", seconds, ("start", "compile_s")),
        ("", "device memory of a replica", byte_size, ("start", "memory_bytes")),
        ("", "start costs, GPU-seconds", _range, ("start_gpu_s",)),
    )
    priced = is_number(at(weighed, "gpu_hour_price"))
    currency = text(at(weighed, "currency"))
    costs: tuple[Shown, ...] = (
        ("", f"1,000 requests cost, {currency}", _range, ("cost", "per_1000_requests")),
        ("", f"a million tokens cost, {currency}", _range, ("cost", "per_million_tokens")),
    )
    energy: tuple[Shown, ...] = (
        ("", "energy a token, J", figure, ("energy", "per_token_j")),
        ("", "energy a request, J", figure, ("energy", "per_request_j")),
    )
    # The control pays nothing off.
    against: tuple[Shown, ...] = (
        ("", "GPUs saved" if given else "GPU-seconds saved a request", _range, ("saved",)),
        ("", "pays after", lambda value: _range(value, _hours), ("hours",)),
        ("", "or after requests", _range, ("requests",)),
    )
    treatments = [{} if row.get("control") is True else row for row in arms]
    return Payoffs(
        about=f"{figure(load)} requests/s, {one} a replica" if given else f"any load, {one} a replica",
        arms=tuple(text(row.get("arm")) for row in arms),
        figures=(
            *figures_of(arms, shown),
            *(figures_of(arms, costs) if priced else ()),
            *(row for row in figures_of(arms, energy) if row.known),
            *figures_of(treatments, against),
        ),
        reasons=tuple(text(row.get("reason")) for row in arms),
    )


def _hours(value: object) -> str:
    return span(value * 3600.0) if is_number(value) else DASH


def _range(limits: object, show: Callable[[object], str] = figure) -> str:
    """A value as seen with its limits; what is open is an en dash."""
    low, seen, high = (
        NEVER if value == NEVER else show(value) for value in (at(limits, key) for key in ("low", "seen", "high"))
    )
    return seen if low == seen == high else f"{seen} ({low} to {high})"
