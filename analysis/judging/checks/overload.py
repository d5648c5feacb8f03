"""Whether the arms could serve what they were offered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from analysis.judging.overload import Load
from analysis.judging.validity import OVERLOAD, Check
from analysis.wording import counted, digits, listed

_BELOW = 0.8  # of what the arms answered: a rate at which a queue stays short


def check_overload(loads: Mapping[str, Sequence[Load | None]], control: str) -> list[Check]:
    """Each arm could serve what it was offered, or the control could: then what the arm cannot is its own.

    `loads` holds the load of each arm by trial, None where it is unknown. An arm and the control are overloaded
    together in a trial if both are, and in a run if they are in half of the trials with known loads. One check where
    all arms are or none is, else one for each arm that is.
    """
    trials = {arm: _trials(rows, loads[control]) for arm, rows in loads.items()}
    treatments = [arm for arm in loads if arm != control]
    over = [arm for arm in treatments if trials[arm] and 2 * sum(both for _, both in trials[arm]) >= len(trials[arm])]
    if not over:
        reason = "No arm was overloaded together with the control."
        if not any(trials[arm] for arm in treatments):
            reason = "Too few requests to see whether the arms were overloaded."
        return [Check(check=OVERLOAD, ok=True, reason=reason, affects=_AFFECTS)]
    if over == treatments:
        return [_overloaded([control, *over], trials, "Both arms" if len(over) == 1 else "All arms")]
    return [_overloaded([control, arm], trials, f"{control} and {arm}", arm=arm) for arm in over]


# The ratio of two growing queues says nothing of the arms, nor does an objective that a short queue still keeps.
_AFFECTS = ("noninferiority", "slo")


def _trials(own: Sequence[Load | None], control: Sequence[Load | None]) -> list[tuple[Load, bool]]:
    """The arm's load in each trial with both loads known, and whether both arms were overloaded."""
    return [
        (load, load.overloaded and other.overloaded)
        for load, other in zip(own, control, strict=True)
        if load is not None and other is not None
    ]


def _overloaded(
    arms: Sequence[str], trials: Mapping[str, list[tuple[Load, bool]]], who: str, *, arm: str | None = None
) -> Check:
    rows = {name: [load for load, both in trials[name] if both] for name in arms}
    answered = {name: sum(load.answered_rps for load in loads) / len(loads) for name, loads in rows.items()}
    offered = sum(load.offered_rps for loads in rows.values() for load in loads) / sum(map(len, rows.values()))
    reason = (
        f"{who} were overloaded: of {digits(offered)} requests/s, {listed(arms)} answered "
        f"{listed([digits(answered[name]) for name in arms])}{_left(arms, rows)}"
    )
    if len(rows[arms[-1]]) < len(trials[arms[-1]]):
        reason += f"; in {len(rows[arms[-1]])} of {counted(len(trials[arms[-1]]), 'trial')}"
    safe = digits(_BELOW * min(answered.values()), 2)
    return Check(
        check=OVERLOAD,
        ok=False,
        arm=arm,
        value=min(answered.values()),
        limit=offered,
        reason=f"{reason}.",
        affects=_AFFECTS,
        remedy=f"Lower the rate to {safe} requests/s or less, or search for what the arms hold "
        '(traffic.arrivals = "saturation").',
    )


def _left(arms: Sequence[str], rows: Mapping[str, Sequence[Load]]) -> str:
    waiting, shed = ([max(getattr(load, name) for load in rows[arm]) for arm in arms] for name in ("waiting", "shed"))
    rest = ""
    if any(waiting):
        rest += f"; {listed([f'{count:,}' for count in waiting])} waited when the traffic ended"
    if any(shed):
        rest += f"; {listed([f'{count:,}' for count in shed])} were turned away or timed out"
    return rest
