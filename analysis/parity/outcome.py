"""The outcome of parity: what each arm was held to, and all arms together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Self

from pydantic import BaseModel
from pydantic.dataclasses import dataclass

from tailgate.analysis.judging.gates import FAIL, INCONCLUSIVE, PASS
from tailgate.analysis.judging.verdict import combined
from tailgate.analysis.wording import digits, enough


@dataclass(frozen=True, slots=True)
class Finding:
    """One distance and its limit, judged. `low` and `high` are the interval of `value` where it is an estimate."""

    name: str
    verdict: str
    reason: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    limit: float | None = None


def held_to(limit: float, value: float, name: str, what: str, *, where: str = "", beyond: str = FAIL) -> Finding:
    """Judge the distance `value` by its `limit`: `beyond` is the verdict of a greater one, and of no number."""
    reason = f"{what} is {digits(value, enough(limit, [value]))}, limit {limit:g}{f': {where}' if where else ''}."
    return Finding(name=name, verdict=PASS if value <= limit else beyond, reason=reason, value=value, limit=limit)


def estimated(
    limit: float, value: float, ends: tuple[float | None, float | None], name: str, what: str, *, remedy: str
) -> Finding:
    """Judge the estimate `value` by its interval: open where the limit lies in it, and without one."""
    low, high = ends
    verdict, around, most = INCONCLUSIVE, "no interval", 3
    if low is not None and high is not None:
        verdict = PASS if high <= limit else FAIL if low > limit else INCONCLUSIVE
        most = enough(limit, (value, low, high))
        around = f"{digits(low, most)} to {digits(high, most)}"
    rest = f": {remedy}." if verdict == INCONCLUSIVE else "."
    reason = f"{what} is {digits(value, most)} ({around}), limit {limit:g}{rest}"
    return Finding(name=name, verdict=verdict, reason=reason, value=value, low=low, high=high, limit=limit)


class ArmParity(BaseModel, frozen=True):
    """One arm and everything that it was held to. The reasons are of what did not pass, failures first."""

    name: str
    verdict: str
    reasons: list[str]
    findings: tuple[Finding, ...]

    @classmethod
    def of(cls, name: str, findings: Sequence[Finding]) -> Self:
        """FAIL if any finding is, else INCONCLUSIVE if any is."""
        reasons = [item.reason for verdict in (FAIL, INCONCLUSIVE) for item in findings if item.verdict == verdict]
        verdict = combined([item.verdict for item in findings])
        return cls(name=name, verdict=verdict, reasons=reasons, findings=tuple(findings))


class Parity(BaseModel, frozen=True):
    """The outcome of the control against the reference, and of every other arm. JSON of it has null for a number that
    is not finite."""

    verdict: str
    control: ArmParity
    arms: tuple[ArmParity, ...]


def concluded(
    control: str,
    checked: Sequence[Finding],
    found: Mapping[str, Sequence[Finding]],
    *,
    refused: Mapping[str, str] | None = None,
) -> Parity:
    """Conclude from the findings on the control and on each arm. Arms that `refused` a request fail, each for a reason.

    A control that did not pass is no yardstick: every FAIL against it becomes INCONCLUSIVE.
    """
    base, judged = ArmParity.of(control, checked), dict(found)
    if base.verdict != PASS:
        doubt = Finding("control", INCONCLUSIVE, " ".join(base.reasons))
        for name, own in found.items():
            doubted = [replace(item, verdict=INCONCLUSIVE) if item.verdict == FAIL else item for item in own]
            judged[name] = [doubt, *doubted]
    for name, reason in (refused or {}).items():
        judged[name] = [Finding("refused", FAIL, f"{name} refuses what it is asked: {reason}.")]
    arms = tuple(ArmParity.of(name, own) for name, own in judged.items())
    return Parity(verdict=combined([arm.verdict for arm in arms]), control=base, arms=arms)
