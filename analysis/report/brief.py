"""The brief of a judged run: verdict, gates, checks and remedies, ready to print. Every report shows this."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from analysis.report import frontier, interim, joined
from analysis.report.arms import arm_names
from analysis.report.values import DASH, at, count, interval, label, milliseconds, percent, quantity, seconds, text
from analysis.settings.metrics import quantile_label
from analysis.summary.model import Arm, Check, Compiles, Gate, Summary

ORDER = ("FAIL", "INCONCLUSIVE", "PASS")
_MORE_IS_BETTER = ("goodput", "parity")
COUNTED = ("recompiles", "longest stall", "requests hit")  # gates that stand for an arm at a glance
DEFINITION = (
    "Ratios are those of a typical block of steady traffic, without the cold start and what compiles delayed; "
    "all else is of all traffic."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GateLine:
    """One gate: `sentence` is the first of its reason, or what a failed check made of it."""

    row: Gate
    name: str
    value: str
    interval: str
    limit: str
    sentence: str
    rest: str  # the whole reason, where it says more
    reason: str
    remedy: str

    @property
    def verdict(self) -> str:
        return self.row.verdict

    @property
    def shares(self) -> tuple[float | None, float, float | None] | None:
        """Its lower limit, value and upper limit over what is allowed; None where less is worse."""
        row = self.row
        if row.kind in _MORE_IS_BETTER or row.value is None or not row.limit or row.value < 0:
            return None
        low, high = (None, None) if row.kind == "slo" else (row.low, row.high)
        return low and low / row.limit, row.value / row.limit, high and high / row.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure of an arm at a glance."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmBrief:
    """One arm: its verdict, its figures at a glance, and its gates, failed ones first."""

    name: str
    control: bool
    verdict: str  # empty of the control, and of a search without gates
    figures: tuple[Figure, ...]
    gates: tuple[GateLine, ...]
    leaning: str  # what its verdict would be by the values alone, in a sentence; empty where it is decided

    def of(self, verdict: str) -> tuple[GateLine, ...]:
        """Its gates with this verdict."""
        return tuple(gate for gate in self.gates if gate.verdict == verdict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckLine:
    """One check. `state`: "ok", "limits" (it keeps gates open) or "allowed for" (the error bars contain it)."""

    row: Check
    name: str
    state: str
    value: str
    limit: str
    opens: str
    reason: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Brief:
    """What every report says of a run."""

    name: str
    run_id: str
    title: str  # the verdict; of a search without gates, its question
    verdict: str  # empty of a search without gates
    headline: str
    notes: tuple[tuple[str, str], ...]  # what limits the meaning of the verdict: a name, a sentence
    next: str  # the command to run next; empty where there is none
    arms: tuple[ArmBrief, ...]  # the control first
    checks: tuple[CheckLine, ...]  # failed ones first
    remedies: tuple[tuple[str, str], ...]  # an arm that failed, what to do about it
    decider: str  # what would decide the open gates; empty where none is open
    answer: tuple[str, ...]  # of a search, which policy to ship

    @property
    def treatments(self) -> tuple[ArmBrief, ...]:
        return tuple(arm for arm in self.arms if not arm.control)

    @property
    def first_step(self) -> str:
        """What to do first where there is no command, in a sentence; empty where nothing is open."""
        return _first_sentence(self.decider) if self.decider and not self.next else ""

    @property
    def failed_checks(self) -> tuple[CheckLine, ...]:
        return tuple(check for check in self.checks if check.state != "ok")


def brief_of(summary: Summary) -> Brief:
    """The brief of a summary."""
    search = summary.open_parts()
    title = frontier.title(search)
    return Brief(
        name=text(summary.name),
        run_id=text(summary.run_id),
        title=title or summary.overall,
        verdict="" if title else summary.overall,
        headline=text(summary.headline),
        notes=_notes(summary),
        next=_command(summary),
        arms=_arms(summary),
        checks=_checks(summary),
        remedies=_remedies(summary),
        decider=text(summary.advice.text) if _is_open(summary) else "",
        answer=tuple(frontier.answer(search)),
    )


def _notes(summary: Summary) -> tuple[tuple[str, str], ...]:
    """What was joined, how interim analyses and a ramp ended."""
    together = (joined.head(summary), joined.accepted(summary))
    return (
        *((("Judged together", " · ".join(filter(None, together))),) if together[0] else ()),
        *interim.words(summary),
    )


# --- Arms and gates ---------------------------------------------------------------------------------------------------


def _arms(summary: Summary) -> tuple[ArmBrief, ...]:
    rows = {arm.name: arm for arm in summary.arms}
    search = summary.open_parts()
    held, unasked = frontier.held(search), bool(frontier.title(search))
    gated = dict.fromkeys((row.metric, row.quantile) for row in summary.comparisons if row.gate)
    arms = []
    for name in arm_names(summary):
        gates = _gates(summary, name)
        control = name == summary.control
        figures = [
            *(_held(held[name]) if name in held else ()),
            *(_of_control(rows.get(name), gated) if control else _of_gates(gates)),
        ]
        arms.append(
            ArmBrief(
                name=text(name),
                control=control,
                verdict="" if control or unasked else _combined(gates),
                figures=tuple(figure for figure in figures if figure.value != DASH),
                gates=gates,
                leaning="" if control else _leaning(text(name), gates),
            )
        )
    return tuple(arms)


def _combined(gates: Iterable[GateLine]) -> str:
    return next((verdict for verdict in ORDER if any(gate.verdict == verdict for gate in gates)), "INCONCLUSIVE")


def _gates(summary: Summary, arm: str) -> tuple[GateLine, ...]:
    rows = sorted((gate for gate in summary.gates if gate.arm == arm), key=lambda gate: ORDER.index(gate.verdict))
    return tuple(_gate(row, summary) for row in rows)


def _gate(row: Gate, summary: Summary) -> GateLine:
    reason = text(row.reason)
    first = _first_sentence(reason)
    sentence = text(row.caveat) if row.caveat else _ERROR_BARS.sub("", first)
    remedies = [item.text for item in summary.advice.remedies if item.arm == row.arm and row.gate in item.gates]
    return GateLine(
        row=row,
        name=label(row.gate),
        value=quantity(row.value, row.unit),
        interval=_interval(row),
        limit=quantity(row.limit, row.unit),
        sentence=sentence,
        rest="" if reason in (sentence, first) else reason,
        reason=reason,
        remedy=text(remedies[0]) if remedies else "",
    )


def _interval(row: Gate) -> str:
    if row.kind == "slo":
        shown = interval(row.low, row.high, percent)
        return shown if row.low is None and row.high is None else f"{shown} miss"
    return interval(row.low, row.high, lambda value: quantity(value, row.unit))


_ERROR_BARS = re.compile(r" \([^()]*error bars[^()]*\)")  # which the interval shows


def _first_sentence(reason: str) -> str:
    end = re.search(r"[.!?](?= [A-Z])", reason)
    return reason[: end.end()] if end else reason


def _of_gates(gates: Iterable[GateLine]) -> Iterable[Figure]:
    """What stands for an arm at a glance: its ratios, and its counts of compiles."""
    for gate in sorted(gates, key=lambda gate: gate.row.kind != "noninferiority"):
        if gate.row.kind in ("noninferiority", "goodput"):
            yield Figure(
                name=gate.name.removeprefix("non-inferiority "),
                value=gate.value,
                note=gate.interval if gate.interval != DASH else "",
            )
    by_name = {gate.name: gate for gate in gates}
    for name in COUNTED:
        if name in by_name:
            yield Figure(name=name, value=by_name[name].value)


def _of_control(arm: Arm | None, gated: Iterable[tuple[str, float]]) -> Iterable[Figure]:
    """What the ratios and counts of the others are held against."""
    for metric, quantile in gated:
        key = f"p{100.0 * quantile:.10g}_ms".replace(".", "_")
        value = None if arm is None or metric not in arm.steady else getattr(arm.steady[metric], key, None)
        yield Figure(name=quantile_label(metric, quantile), value=milliseconds(value))
    compiles = Compiles() if arm is None else arm.compile
    yield Figure(name="recompiles", value=count(compiles.recompiles))
    yield Figure(name="longest stall", value=seconds(compiles.longest_stall_s))
    yield Figure(name="requests hit", value=percent(compiles.requests_hit_pct))


def _held(held: Mapping[str, Any]) -> Iterable[Figure]:
    """What load an arm holds, of a search."""
    yield Figure(name="surely holds", value=quantity(held.get("low_rps"), "rps"))
    yield Figure(name="as seen", value=quantity(held.get("seen_rps"), "rps"))
    yield Figure(name="start", value=seconds(at(held, "start", "serving_s")))


def _leaning(arm: str, gates: tuple[GateLine, ...]) -> str:
    """What the arm's verdict would be if each open gate held by its value alone."""
    undecided = [gate for gate in gates if gate.verdict == "INCONCLUSIVE"]
    if not undecided or any(gate.verdict == "FAIL" for gate in gates):
        return ""
    unknown = [gate.name for gate in undecided if gate.row.value is None or gate.row.limit is None]
    broken = [gate for gate in undecided if gate.name not in unknown and _is_beyond(gate.row)]
    if broken:
        first = broken[0]
        return f"By its values alone {arm} would FAIL: {first.name} is {first.value}, limit {first.limit}."
    if unknown:
        return f"Nothing was measured for {', '.join(unknown)} of {arm}; its other values are within their limits."
    return f"By its values alone {arm} would PASS; what is open is whether they hold."


def _is_beyond(row: Gate) -> bool:
    value, limit = row.value or 0.0, row.limit or 0.0
    return value < limit if row.kind in _MORE_IS_BETTER and row.unit != "count" else value > limit


# --- Checks and what to do --------------------------------------------------------------------------------------------


def _checks(summary: Summary) -> tuple[CheckLine, ...]:
    return tuple(_check(row, summary) for row in sorted(summary.validity, key=lambda row: row.ok))


def _check(row: Check, summary: Summary) -> CheckLine:
    keeps_open = any(row.check in gate.blocked_by and row.arm in (None, gate.arm) for gate in summary.gates)
    allowed = summary.overall == "PASS" or (row.shift is not None and not keeps_open)
    opens = "" if row.ok or allowed else label(row.gates or row.opens)
    return CheckLine(
        row=row,
        name=row.check if row.arm is None else f"{row.check} ({text(row.arm)})",
        state="ok" if row.ok else "allowed for" if allowed else "limits",
        value=text(row.value),
        limit=text(row.limit),
        opens=("what it may have turned: " if opens and row.shift else "") + opens,
        reason=text(row.reason),
        remedy="" if row.ok or allowed or not row.remedy else text(row.remedy),
    )


def _remedies(summary: Summary) -> tuple[tuple[str, str], ...]:
    """Each arm that failed and what to do about it; what explains other failures comes first."""
    lines: dict[str, list[str]] = {}
    for row in summary.advice.remedies:
        lines.setdefault(text(row.arm), []).append(text(row.text))
    return tuple((arm, " ".join(own)) for arm, own in lines.items())


def _is_open(summary: Summary) -> bool:
    """Whether an open gate can still change the verdict on an arm."""
    failed = {gate.arm for gate in summary.gates if gate.verdict == "FAIL"}
    undecided = [gate.arm for gate in summary.gates if gate.verdict == "INCONCLUSIVE"]
    return summary.overall == "INCONCLUSIVE" or any(arm not in failed for arm in undecided)


def _command(summary: Summary) -> str:
    """The command to run next: a remedy's first, then that of what a failed check or open gates ask for."""
    blocking = {name for gate in summary.gates for name in gate.blocked_by}
    texts = [row.text for row in summary.advice.remedies]
    texts += [row.remedy for row in summary.validity if not row.ok and row.check in blocking]
    for said in (*texts, summary.advice.text if _is_open(summary) else ""):
        if found := re.search(r"`(tailgate [^`]+)`", said):
            return found[1]
    needed, trials = summary.advice.needed_s, summary.design.trials or 1
    if summary.overall == "PASS" or needed is None or not _is_open(summary):
        return ""
    # In whole minutes, since the length is an estimate.
    each = 60 * math.ceil(needed / trials / 60)
    return f"tailgate run experiment.toml --set traffic.duration_s={each}"
