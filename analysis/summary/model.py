"""The document summary.json as models, from which its JSON Schema is generated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE"]


class Row(BaseModel):
    """A part of the summary; null stands for what is not known."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class GateRow(Row):
    """One requirement on one arm."""

    arm: str
    gate: str
    kind: Literal["noninferiority", "slo", "cold", "goodput", "recompile", "error", "parity", "memory", "ramp"]
    value: float | None
    limit: float | None
    unit: Annotated[str, Field(description="of value and limit: ratio, ms, s, pct, count, or nothing")]
    low: Annotated[
        float | None,
        Field(description="lower limit of the value; of an SLO, of the percentage that misses it"),
    ] = None
    high: Annotated[float | None, Field(description="upper limit of the same")] = None
    verdict: Verdict
    reason: str
    caveat: Annotated[str, Field(description="the end of the reason, where failed checks changed the verdict")] = ""
    blocked_by: Annotated[list[str], Field(description="failed checks that keep the gate open")] = []
    needed_s: Annotated[float | None, Field(description="run length that would decide it")] = None
    needed_starts: Annotated[int | None, Field(description="trials that takes, where more than the run has")] = None
    decided_s: Annotated[float | None, Field(description="when interim evidence decided it")] = None


class CheckRow(Row):
    """One condition on the run, without which some gates mean nothing."""

    check: str
    ok: bool
    arm: str | None = None
    value: float | None = None
    limit: float | None = None
    reason: str
    opens: Annotated[list[str], Field(description="kinds of gates that it can keep open")] = []
    gates: Annotated[list[str], Field(description="the only gates of these kinds that it concerns")] = []
    shift: Annotated[float | None, Field(description="the most that it can have moved the logarithm of a ratio by")] = (
        None
    )
    remedy: str = ""


class RemedyRow(Row):
    """What to do about gates of an arm that failed."""

    arm: str
    gates: list[str]
    text: str


class AdviceRow(Row):
    """What would decide the open gates, and what to do about the failed ones."""

    needed_s: float | None = None
    text: str = ""
    remedies: list[RemedyRow] = []


class Judged(BaseModel):
    """The part of a summary that decides."""

    model_config = ConfigDict(frozen=True)

    name: str
    run_id: str = ""
    created: str | None = None
    overall: Verdict
    headline: str
    control: str
    arms: list[dict[str, Any]]
    gates: list[GateRow]
    validity: list[CheckRow]
    advice: AdviceRow
    design: dict[str, Any]

    @classmethod
    def of(cls, summary: Mapping[str, Any]) -> Judged:
        return cls.model_validate(summary)
