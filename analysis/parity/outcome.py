"""The outcome of parity: requirements, arms and all together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from analysis.judging.gates import FAIL, INCONCLUSIVE, PASS
from analysis.judging.verdict import combined


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One requirement, judged. `low` and `high` are the interval of `value` where it is an estimate."""

    name: str
    verdict: str
    reason: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    limit: float | None = None

    @classmethod
    def none_of(cls, name: str, faults: int, *, verdict: str, fault: str, fine: str) -> Finding:
        """Pass where there are no faults; else the `verdict`, with the `fault` as the reason."""
        reason, verdict = (fault, verdict) if faults else (fine, PASS)
        return cls(name=name, verdict=verdict, value=float(faults), limit=0.0, reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmParity:
    """One arm, judged. `figures` are plain numbers for the report."""

    name: str
    verdict: str
    findings: tuple[Finding, ...]
    figures: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, findings: Sequence[Finding], figures: Mapping[str, Any] | None = None) -> ArmParity:
        """Combine the verdicts of all findings."""
        verdict = combined([item.verdict for item in findings])
        return cls(name=name, verdict=verdict, findings=tuple(findings), figures=figures or {})

    @property
    def reasons(self) -> tuple[str, ...]:
        """The reasons of what did not pass, failures first."""
        ordered = sorted(self.findings, key=lambda item: (FAIL, INCONCLUSIVE, PASS).index(item.verdict))
        return tuple(item.reason for item in ordered if item.verdict != PASS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """The outcome of the control against the reference, of every other arm, and of all arms together."""

    verdict: str
    control: ArmParity
    arms: tuple[ArmParity, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON. A number that is not finite becomes null."""
        rows = [asdict(arm) | {"reasons": arm.reasons} for arm in self.arms]
        return {key: _plain(value) for key, value in (asdict(self) | {"arms": rows}).items()}


def concluded(control: ArmParity, arms: Sequence[ArmParity], *, refused: Mapping[str, str]) -> Parity:
    """Conclude from what each arm computes. Arms that `refused` a request fail, whatever the control is.

    A control that did not pass is no yardstick: every FAIL against it becomes INCONCLUSIVE.
    """
    judged = list(arms) if control.verdict == PASS else [_doubted(arm, control) for arm in arms]
    for name, reason in refused.items():
        finding = Finding(name="refused", verdict=FAIL, reason=f"{name} refuses what it is asked: {reason}.")
        judged.append(ArmParity.of(name, [finding]))
    return Parity(verdict=combined([arm.verdict for arm in judged]), control=control, arms=tuple(judged))


def _doubted(arm: ArmParity, control: ArmParity) -> ArmParity:
    doubt = Finding(name="control", verdict=INCONCLUSIVE, reason=" ".join(control.reasons))
    opened = (replace(item, verdict=INCONCLUSIVE) for item in arm.findings if item.verdict == FAIL)
    kept = (item for item in arm.findings if item.verdict != FAIL)
    return replace(arm, verdict=INCONCLUSIVE, findings=(doubt, *opened, *kept))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
