"""Whether both arms were sent the same requests at the same instants: what pairs and lags show."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.judging.validity import ESTIMATES, Check
from analysis.run.pairs import Copies

_MISSING_SLACK = 2
_MISSING_SHARE = 0.001


def check_copies(copies: Copies, *, allowed_ms: float) -> Check:
    """Every request of the arm has one copy on the control, due at the same instant and equal in what it asks."""
    found = []
    if copies.lonely > max(_MISSING_SLACK, int(_MISSING_SHARE * (copies.pairs + copies.lonely))):
        found.append(f"{_count(copies.lonely, 'request')} went to one of {copies.arm} and {copies.control} alone")
    if copies.repeated:
        found.append(f"{_count(copies.repeated, 'row')} are a second copy on the same arm")
    if copies.unpaired:
        found.append(f"{_count(copies.unpaired, 'row')} name no pair while others do")
    if copies.other_trial:
        found.append(f"{_count(copies.other_trial, 'pair')} lie in two trials")
    if copies.other_instant:
        found.append(
            f"{_count(copies.other_instant, 'pair')} of {copies.pairs} were scheduled up to "
            f"{copies.farthest_ms:.4g} ms apart, limit {allowed_ms:.3g} ms"
        )
    unequal = {what: count for what, count in copies.unequal.items() if count}
    found += [f"{_count(count, 'pair')} of {copies.pairs} differ in {what}" for what, count in unequal.items()]
    return Check(
        check="pairs",
        ok=not found,
        value=copies.farthest_ms,
        limit=allowed_ms,
        arm=copies.arm,
        reason=("; ".join(found) + ": they are not copies of the same requests.")
        if found
        else f"{copies.pairs} requests of {copies.arm} have copies on {copies.control}, due at the same instants.",
        affects=(*ESTIMATES, "error"),
        remedy="Send each planned request to every arm at once, and record pair_id and scheduled_ns as they were."
        if found
        else "",
    )


def check_lag_apart(arm: str, control: str, lags: Sequence[tuple[str, float, float]]) -> Check:
    """The load generator was as late with the arm's requests as with the control's.

    `lags` lists (what, ms that the arm's were later, ms that matter): a lag counts as latency, and is none of the
    servers'.
    """
    found = [
        f"{abs(apart):.3g} ms {'later' if apart > 0 else 'earlier'} {what} (limit {most:.3g} ms)"
        for what, apart, most in lags
        if abs(apart) > most
    ]
    worst = max((abs(apart) for _, apart, _ in lags), default=None)
    return Check(
        check="lag apart",
        ok=not found,
        value=worst,
        limit=min((most for _, _, most in lags), default=None),
        arm=arm,
        reason=f"Counted from their schedule, requests of {arm} were sent {' and '.join(found)} than {control}'s."
        if found
        else f"Requests of {arm} and of {control} were sent equally soon after their scheduled times.",
        affects=ESTIMATES,
        remedy="Give the load generator its own cores or more workers, and look for what delays one arm's connections."
        if found
        else "",
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
