"""Whether both arms were sent the same requests at the same instants: what pairs and lags show."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.judging.validity import ESTIMATES, Check
from analysis.run.pairs import Copies
from analysis.wording import counted

_MISSING_SLACK = 2
_MISSING_SHARE = 0.001


def check_copies(copies: Copies, *, allowed_ms: float) -> Check:
    """Every request of the arm has one copy on the control, due at the same instant and equal in content."""
    faults = []
    if copies.lonely > max(_MISSING_SLACK, int(_MISSING_SHARE * (copies.pairs + copies.lonely))):
        faults.append(f"{counted(copies.lonely, 'request')} went to one of {copies.arm} and {copies.control} alone")
    if copies.repeated:
        faults.append(f"{counted(copies.repeated, 'row')} are a second copy on the same arm")
    if copies.unpaired:
        faults.append(f"{counted(copies.unpaired, 'row')} name{'s' if copies.unpaired == 1 else ''} no pair")
    if copies.other_trial:
        faults.append(f"{counted(copies.other_trial, 'pair')} lie in two trials")
    if copies.other_instant:
        faults.append(
            f"{counted(copies.other_instant, 'pair')} of {copies.pairs} were scheduled up to "
            f"{copies.farthest_ms:.4g} ms apart, limit {allowed_ms:.3g} ms"
        )
    for what, count in copies.unequal.items():
        if count:
            faults.append(f"{counted(count, 'pair')} of {copies.pairs} differ in {what}")
    return Check(
        check="pairs",
        ok=not faults,
        value=copies.farthest_ms,
        limit=allowed_ms,
        arm=copies.arm,
        reason=f"{'; '.join(faults)}: they are not copies of the same requests."
        if faults
        else f"{copies.pairs} requests of {copies.arm} have copies on {copies.control}, due at the same instants.",
        affects=(*ESTIMATES, "error"),
        remedy="Send each planned request to every arm at once, and record pair_id and scheduled_ns as they were.",
    )


def check_lag_apart(arm: str, control: str, lags: Sequence[tuple[str, float, float]]) -> Check:
    """The load generator was as late with the arm's requests as with the control's.

    `lags` lists (what, ms that the arm's were later, ms that matter): a lag counts as latency, and is none of the
    servers'.
    """
    faults = [
        f"{abs(apart):.3g} ms {'later' if apart > 0 else 'earlier'} {what} (limit {most:.3g} ms)"
        for what, apart, most in lags
        if abs(apart) > most
    ]
    return Check(
        check="lag apart",
        ok=not faults,
        value=max((abs(apart) for _, apart, _ in lags), default=None),
        limit=min((most for _, _, most in lags), default=None),
        arm=arm,
        reason=f"Counted from their schedule, requests of {arm} were sent {' and '.join(faults)} than {control}'s."
        if faults
        else f"Requests of {arm} and of {control} were sent equally soon after their scheduled times.",
        affects=ESTIMATES,
        remedy="Give the load generator its own cores or more workers, and look for what delays one arm's connections.",
    )
