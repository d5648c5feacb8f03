"""The brief of a judged run: verdict, gates, checks and remedies, ready to print. Every report shows this."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tailgate.analysis.judging.gates import FAIL, ORDER
from tailgate.analysis.report.values import (
    DASH,
    count,
    interval,
    milliseconds,
    percent,
    quantity,
    rate,
    seconds,
    span,
    text,
)
from tailgate.analysis.settings.metrics import quantile_label
from tailgate.analysis.summary.model import Arm, Check, Frontier, Gate, Summary
from tailgate.analysis.wording import counted, enough

MORE_IS_BETTER = ("goodput", "parity")
_COUNTED = ("recompiles", "longest compile stall", "requests hit")  # gates that stand for an arm at a glance


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmBrief:
    """One arm: its verdict, its figures at a glance, and its gates, failed ones first."""

    row: Arm
    index: int
    name: str
    verdict: str  # empty of the control, and of a search without gates
    figures: Mapping[str, tuple[str, str]]  # at a glance, by name: a value, and its interval or nothing
    gates: tuple[Gate, ...]

    def of(self, verdict: str) -> tuple[Gate, ...]:
        """Return its gates with this verdict."""
        return tuple(gate for gate in self.gates if gate.verdict == verdict)


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
    checks: tuple[Check, ...]  # failed ones first
    remedies: tuple[tuple[str, str], ...]  # an arm that failed, what to do about it
    decider: str  # what would decide the open gates; empty where none is open
    answer: tuple[str, ...]  # of a search, which policy to ship
    typical: str  # what a ratio is of: a block or, of arms that ran separately, a trial

    @property
    def definition(self) -> str:
        """What the figures at a glance are of."""
        return (
            f"Ratios (×) are of a typical {self.typical}; latencies in ms or s are of the whole run. Both leave out "
            "the cold start and requests that compiles delayed. Other figures cover all traffic."
        )

    @property
    def treatments(self) -> tuple[ArmBrief, ...]:
        return tuple(arm for arm in self.arms if not arm.row.control)

    @property
    def next_name(self) -> str:
        """What introduces the command: of `tailgate doctor` also the failed check that asks for it."""
        asks = [check.title for check in self.failed_checks if f"`{self.next}`" in check.remedy]
        return f"Next, since the check {asks[0]} failed" if asks else "Next"

    @property
    def first_step(self) -> str:
        """What to do first; empty where there is a command, and where all passed."""
        return "" if self.next else first_sentence(self.remedies[0][1]) if self.remedies else self.decider

    @property
    def figure_names(self) -> list[str]:
        """The figures at a glance that some arm has, in order."""
        return list(dict.fromkeys(name for arm in self.arms for name in arm.figures))

    @property
    def failed_checks(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if not check.ok)


def brief_of(summary: Summary) -> Brief:
    """Make the brief of a summary."""
    title = _title(summary)
    return Brief(
        name=summary.name,
        run_id=summary.run_id,
        title=title or summary.overall,
        verdict="" if title else summary.overall,
        headline=text(summary.headline),
        notes=tuple(_notes(summary)),
        next=_command(summary),
        arms=tuple(_arm(summary, arm, index) for index, arm in enumerate(summary.arms)),
        checks=tuple(sorted(summary.validity, key=lambda row: row.ok)),
        remedies=_remedies(summary),
        decider=summary.advice.text if _is_open(summary) else "",
        answer=tuple(summary.frontier.answer) if summary.frontier else (),
        typical="trial" if summary.design.design == "separate" else "block",
    )


_OUTCOMES = {"rollback": "rolled back", "hold": "held"}


def _title(summary: Summary) -> str:
    """Return the title of a search without verdicts; empty otherwise, and if an arm is FAIL."""
    return "Which policy to ship" if summary.is_ungated and summary.overall != FAIL else ""


def _notes(summary: Summary) -> Iterable[tuple[str, str]]:
    """Yield what was joined, and how interim analyses, a ramp and its weights went."""
    if summary.joined is not None and len(summary.joined.runs) > 1:
        names = ", ".join(run.name for run in summary.joined.runs)
        runs = f"{counted(len(summary.joined.runs), 'run', count)} ({names})"
        counts = {"trial": summary.design.trials, "machine": summary.joined.machines}
        counts |= {"accepted difference": found} if (found := len(summary.joined.differences)) else {}
        rest = ", ".join(counted(number, noun, count) for noun, number in counts.items())
        yield "Judged together", f"{runs}, {rest}"
    if summary.design.pressure:
        yield "Under pressure", summary.design.pressure
    if (ended := summary.interim) is not None:
        how = f"every {seconds(summary.design.block_s)}; the error rate is controlled across all of them"
        yield "Interim analyses", "; ".join(filter(None, (how, ended)))
    if (ramp := summary.ramp) is not None:
        back = "" if ramp.rollback_s is None else f"; rolled back within {seconds(ramp.rollback_s)}"
        yield (
            "Ramp",
            f"{ramp.candidate} was {_OUTCOMES.get(ramp.outcome, ramp.outcome)}: {ramp.reason}; "
            f"{counted(ramp.exposed, 'request', count)} exposed, {count(ramp.hurt)} failed or delayed{back}",
        )
    for row in summary.weights:
        if row.action == "set by hand":
            yield "Weights", f"set by hand after {span(row.offset_s)}: {text(row.weights)} ({row.reason})"


def _arm(summary: Summary, arm: Arm, index: int) -> ArmBrief:
    gates = [gate for gate in summary.gates if gate.arm == arm.name]
    gates.sort(key=lambda gate: ORDER.index(gate.verdict))
    figures = [
        *_held(summary.frontier, arm.name),
        *(_of_control(arm, summary) if arm.control else _of_gates(gates)),
    ]
    judged = not arm.control and not _title(summary)
    return ArmBrief(
        row=arm,
        index=index,
        name=arm.name,
        verdict=(gates[0].verdict if gates else "INCONCLUSIVE") if judged else "",
        figures={name: (value, note) for name, value, note in figures if value != DASH or note},
        gates=tuple(gates),
    )


def _digits(gate: Gate) -> int:
    """Return the digits that show on which side of its limit the gate's figures lie."""
    figures = (gate.value, *(() if gate.kind == "slo" else (gate.low, gate.high)))
    return enough(gate.limit or 0.0, figures, lambda value, most: quantity(value, gate.unit, most))


def value_of(gate: Gate) -> str:
    return quantity(gate.value, gate.unit, _digits(gate))


def limit_of(gate: Gate) -> str:
    return quantity(gate.limit, gate.unit, _digits(gate))


def bounds_of(gate: Gate) -> str:
    """Show the interval of the gate's value; of an SLO, of the share of requests that misses it."""
    if gate.kind != "slo":
        return interval(gate.low, gate.high, gate.unit, _digits(gate))
    bounds = interval(gate.low, gate.high, "pct")
    return bounds if bounds == DASH else f"{bounds} miss"


def sentence_of(gate: Gate) -> str:
    """Return the failed check's caveat, else the first sentence of the reason."""
    return gate.caveat or ("Open: " if gate.verdict == "INCONCLUSIVE" else "") + first_sentence(gate.reason)


def first_sentence(words: str) -> str:
    """Return the first sentence of several."""
    end = re.search(r"[.!?](?= [A-Z])", words)
    return words[: end.end()] if end else words


def _of_gates(gates: Sequence[Gate]) -> Iterable[tuple[str, str, str]]:
    """Yield an arm's figures at a glance: its ratios and its counts of compiles."""
    for kind in ("noninferiority", "goodput"):
        for gate in (gate for gate in gates if gate.kind == kind):
            bounds = gate.lacks or bounds_of(gate).removeprefix(DASH)
            yield gate.title.removeprefix("non-inferiority "), value_of(gate), bounds
    by_name = {gate.gate: value_of(gate) for gate in gates}
    for name in _COUNTED:
        if name in by_name:
            yield name, by_name[name], ""


def _of_control(arm: Arm, summary: Summary) -> Iterable[tuple[str, str, str]]:
    """Yield the control's values to which the ratios and counts of the other arms compare."""
    for metric, quantile in dict.fromkeys((row.metric, row.quantile) for row in summary.comparisons if row.gate):
        key = f"p{100.0 * quantile:.10g}_ms".replace(".", "_")
        value = getattr(arm.steady.get(metric), key, None)
        yield quantile_label(metric, quantile), milliseconds(value), ""
    yield "recompiles", count(arm.compile.recompiles), ""
    yield "longest compile stall", seconds(arm.compile.longest_stall_s), ""
    yield "requests hit", percent(arm.compile.requests_hit_pct), ""


def _held(frontier: Frontier | None, arm: str) -> Iterable[tuple[str, str, str]]:
    """Yield the load that an arm holds in a search. Its latencies are those of overload, and describe no arm."""
    for row in frontier.arms if frontier else ():
        if row.arm == arm:
            yield "surely holds", rate(row.low_rps), ""
            yield "as seen", rate(row.seen_rps), ""
            yield "start", seconds(row.start_s), ""


def _remedies(summary: Summary) -> tuple[tuple[str, str], ...]:
    """Return each arm that failed with its remedies; what explains other failures comes first."""
    lines: dict[str, list[str]] = {}
    for row in summary.advice.remedies:
        lines.setdefault(row.arm, []).append(row.text)
    return tuple((arm, " ".join(own)) for arm, own in lines.items())


def _is_open(summary: Summary) -> bool:
    """Return whether an open gate can still change the verdict on an arm."""
    failed = {gate.arm for gate in summary.gates if gate.verdict == "FAIL"}
    undecided = {gate.arm for gate in summary.gates if gate.verdict == "INCONCLUSIVE"}
    return summary.overall == "INCONCLUSIVE" or not undecided <= failed


def _command(summary: Summary) -> str:
    """Return the command to run next: that of a failed gate's remedy, else of the first thing that keeps gates open."""
    texts, is_open = [row.text for row in summary.advice.remedies], _is_open(summary)
    needed, once = summary.advice.needed_s, summary.interim is None
    if is_open:
        texts.append(first_sentence(summary.advice.text))
    # Separate arms take several runs, and the experiment of a ramp gives its candidate no share of a run's traffic.
    if is_open and needed is not None and summary.design.design != "separate" and summary.ramp is None:
        trials, option = (summary.design.trials or 1, "--duration") if once else (1, "--until-decided --at-most")
        texts.append(f"`tailgate run experiment.toml {option} {math.ceil(needed / trials / 60)}m`")  # an estimate
    found = re.search(r"`(tailgate [^`]+)`", "\n".join(texts))
    return found[1] if found else ""
