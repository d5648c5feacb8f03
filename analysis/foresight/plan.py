"""What a run must decide, what each of its gates needs for that, and the plan that joins them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from analysis.judging.checks.statistics import TAIL_REQUESTS
from analysis.judging.planner import LONGEST_S, POWER, least_length_s
from analysis.records.tables import RecordError
from analysis.settings.gate_limits import GateLimits
from analysis.statistics.compare import TRIALS_FOR_T_TEST

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What the run is to decide. None takes the pilot's own setting, or the default of [gates].

    `ratio` is the true ratio to plan for: 1 is an arm as fast as the control. With `duration_s` (all trials together)
    the margins that such a run can decide are named as well.
    """

    margin: float | None = None
    power: float = POWER
    ratio: float = 1.0
    alpha: float | None = None
    duration_s: float | None = None

    def __post_init__(self) -> None:
        for flag, value, low, high, remedy in (
            ("--power", self.power, 0.5, 0.999, "a share from 0.5 to 0.999"),
            ("--ratio", self.ratio, 0.01, 100.0, "a ratio from 0.01 to 100, such as 1 for no difference"),
            ("--margin", self.margin, 1e-4, 10.0, "a share above 0, from 0.0001 to 10, such as 0.1 for 10 %"),
            ("--alpha", self.alpha, 0.0001, 0.5, "a probability from 0.0001 to 0.5"),
            ("--duration", self.duration_s, 1e-3, LONGEST_S, f"seconds above 0, at most {LONGEST_S:g}"),
        ):
            if value is not None and not low <= value <= high:
                raise RecordError(f"{flag} is {value:g}: give {remedy}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What one gate needs: seconds over all trials, None where no length of up to a week is enough.

    `needed_s` is for the true ratio that was planned for, `as_seen_s` for what the pilot saw. `margin` is the smallest
    that a run of the goal's duration passes. Rows that do not `gate` are for information.
    """

    arm: str
    what: str
    gate: bool = True
    seen: float | None = None
    spread: float | None = None
    needed_s: float | None = None
    as_seen_s: float | None = None
    margin: float | None = None
    note: str = ""

    @property
    def name(self) -> str:
        """The gate, of its arm where the plan knows arms."""
        return f"{self.arm} {self.what}".lstrip()


def limits_for(limits: GateLimits, goal: Goal) -> GateLimits:
    """`limits` with the goal's margin and alpha."""
    if goal.margin is not None:
        limits = replace(limits, margin=goal.margin, margins={})
    return limits if goal.alpha is None else replace(limits, alpha=goal.alpha)


def least_length(limits: GateLimits, *, rate: float, block_s: float) -> tuple[float | None, str]:
    """Seconds for enough blocks and enough requests beyond the quantile, None where none come; and what they are."""
    quantile = f"p{100 * limits.quantile:.10g}"
    note = f"{limits.min_blocks} blocks of {block_s:g} s, {TAIL_REQUESTS} requests beyond {quantile}"
    return (least_length_s(limits, rate=rate, block_s=block_s) if rate > 0 else None), note


def joined_plan(
    rows: Sequence[Need],
    goal: Goal,
    limits: GateLimits,
    *,
    source: Mapping[str, Any],
    trials: int,
    block_s: float,
    trial_s: float | None = None,
    failed: Sequence[str] = (),
    mend: Sequence[str] = (),
    assumed: Sequence[str] = (),
) -> dict[str, Any]:
    """The plan as plain values: what its `rows` need together, and what stands in the way."""
    gating = [row for row in rows if row.gate]
    # What else is open on an arm that has failed decides nothing more.
    gating = [row for row in gating if row.arm not in failed] or gating
    stuck = [row for row in gating if row.needed_s is None]
    longest = max(gating, key=lambda row: row.needed_s or 0.0)
    needed_s = None if stuck else longest.needed_s
    if needed_s is not None and trial_s is not None:
        # Trials are the unit: more of them, as long as they were.
        trials = max(trials, math.ceil(needed_s / trial_s - 0.01))
    elif needed_s is not None:
        trial_s = math.ceil(needed_s / trials / block_s - 1e-9) * block_s
    notes = list(assumed)
    if failed:
        notes.append(f"{', '.join(failed)} failed in the pilot: no length clears that, and its rows do not count.")
    compared = sum(row.spread is not None for row in gating)
    if compared > 1:
        notes.append(
            f"The power is that of each gate by itself; all {compared} comparisons pass together with at least "
            f"{100 * max(0.0, 1 - compared * (1 - goal.power)):.0f} %, and more where they move together."
        )
    if trials < TRIALS_FOR_T_TEST:
        notes.append(
            "Blocks of one start say nothing of how starts differ: from "
            f"{TRIALS_FOR_T_TEST} trials on, trials are the unit."
        )
    return {
        "schema": SCHEMA,
        "source": dict(source),
        "wanted": {
            "margin": limits.margin,
            "power": goal.power,
            "alpha": limits.alpha,
            "ratio": goal.ratio,
            "duration_s": goal.duration_s,
        },
        "needed_s": needed_s,
        "decided_by": longest.name if needed_s is not None else None,
        "out_of_reach": [row.name for row in stuck],
        "trials": trials,
        "trial_s": None if needed_s is None else trial_s,
        "rows": [asdict(row) for row in rows],
        "mend_first": list(mend),
        "assumed": notes,
    }
