"""What to do about the gates that failed: one remedy for each cause that the records tell, the cause of others first.

Nothing is guessed: where the records name no cause, the remedy is the command that shows one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.checks.complete import into_compile
from analysis.judging.gates import FAIL, Gate
from analysis.records.plain_values import mapping
from analysis.records.schemas import EVENT_KINDS
from analysis.run.compile_events import RECOMPILE_KINDS, CompileEvent
from analysis.run.run import Run
from analysis.settings.metrics import gate_label
from analysis.wording import counted

_MOST_STEPS = 3  # that are named
_LONGEST_GUARD = 90  # characters
_STEP = re.compile(r"(?:capture )?((prefill|extend|decode|encode) batch (\d+) × length (\d+)(?:, context (\d+))?)")
_GUARD = re.compile(r"^\d+/\d+: ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """What to do about `gates` of `arm`, which failed for one cause."""

    arm: str
    gates: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a remedy rests on."""

    run: Run
    slo: Sequence[Gate]  # the control's


def remedies(evidence: Evidence, gates: Sequence[Gate]) -> tuple[Remedy, ...]:
    """The remedies of each arm that failed, in the order of its gates' arms."""
    found = []
    for arm in dict.fromkeys(gate.arm for gate in gates if gate.verdict == FAIL):
        failed = [gate for gate in gates if gate.arm == arm and gate.verdict == FAIL]
        for belongs, remedy in _CAUSES:
            if own := [gate for gate in failed if belongs(gate)]:
                found.append(Remedy(arm=arm, gates=tuple(gate.gate for gate in own), text=remedy(evidence, arm, own)))
    return tuple(found)


# --- Compiles ---------------------------------------------------------------------------------------------------------


def _of_compiles(evidence: Evidence, arm: str, gates: Sequence[Gate]) -> str:
    run = evidence.run
    if run.account(arm).external:
        return "Have its server warm up the lengths of this traffic before it is measured."
    serving = run.serving_events(arm)
    events = [event for event in serving if event.kind in RECOMPILE_KINDS]
    if not events:
        kinds = Counter(EVENT_KINDS.get(event.kind, event.kind) for event in serving if event.stalls)
        named = ", ".join(f"{kind} ({count})" for kind, count in kinds.most_common()) or "nothing that is recorded"
        return f"What delayed requests was {named}: {_inspect(arm, [])} shows which steps are not ready."
    steps = Counter(step for event in events if (step := _step_of(event)))
    warmed = _warmed(run, arm)
    cold = [] if warmed is None else [step for step in steps if step not in warmed]
    seen = []
    if cold:
        count = sum(steps[step] for step in cold)
        which = f"All {count}" if count == len(events) else f"{count} of {len(events)}"
        seen.append(f"{which} compiles while serving were for steps that its start had not warmed up")
    elif warmed is not None and steps and sum(steps.values()) == len(events):
        seen.append("Its warm-up had run each step that it compiled for while serving")
    if guard := _guard(events):
        seen.append(f"{'first' if seen else 'First'} failed guard ({guard})")
    choices = _choices(mapping(run.account(arm).config), cold=bool(cold))
    without_traffic = f"try without traffic: {_inspect(arm, list(cold or steps))}"
    return f"{'; '.join(seen) or 'It compiled while serving'}: {'; '.join([*choices, without_traffic])}."


def _choices(config: Mapping[str, Any], *, cold: bool) -> list[str]:
    """What the arm's configuration leaves to try."""
    policy, kind = mapping(config.get("compile")), mapping(config.get("shapes")).get("kind")
    choices = []
    if cold and policy.get("warmup") in ("minimal", "lengths"):
        choices.append('warm up every planned step (compile.warmup = "shapes")')
    if kind == "exact" and policy.get("mark_dynamic") is not True:
        choices.append("plan its shapes (preset compiled-bucketed or compiled-dynamic)")
    return choices


def _warmed(run: Run, arm: str) -> set[str] | None:
    """The steps that every start of the arm warmed up; None where some start does not say."""
    starts = [
        {step for item in mapping(start.get("items_ns")) if (step := _plain(str(item)))}
        for start in run.account(arm).startups
    ]
    return set.intersection(*starts) if starts and all(starts) else None


def _step_of(event: CompileEvent) -> str:
    return _plain(str(event.row.get("shape") or ""))


def _plain(text: str) -> str:
    """The step that the text names, whether it ran or was captured; empty where it names none."""
    named = _STEP.match(text)
    return named[1] if named else ""


def _guard(events: Sequence[CompileEvent]) -> str:
    """The guard that the first recompile with a reason names first; empty without one."""
    reasons = (str(event.row.get("reason") or "").strip() for event in events if event.kind == "recompile")
    first = " ".join(_GUARD.sub("", next(filter(None, reasons), "").partition("\n")[0]).split()).rstrip(".")
    return first if len(first) <= _LONGEST_GUARD else f"{first[:_LONGEST_GUARD]}…"


def _short(step: str) -> str:
    """The step as `tailgate inspect --shapes` reads it: "extend 2x1024@2048"."""
    named = _STEP.match(step)
    if named is None:
        return step
    _, kind, rows, length, context = named.groups()
    size = rows if kind == "decode" else f"{rows}x{length}"
    return f"{kind} {size}@{context}" if kind in ("decode", "extend") and context else f"{kind} {size}"


def _inspect(arm: str, steps: Sequence[str]) -> str:
    named = ", ".join(_short(step) for step in steps[:_MOST_STEPS])
    return f"`tailgate inspect experiment.toml --arm {arm}" + (f' --shapes "{named}"`' if named else "`")


def _of_eager_steps(evidence: Evidence, arm: str, gates: Sequence[Gate]) -> str:
    events = [event for event in evidence.run.serving_events(arm) if event.kind == "eager_fallback"]
    steps = list(dict.fromkeys(step for event in events if (step := _step_of(event))))
    return f"Plan and warm up the steps that {_inspect(arm, steps)} shows to run eagerly, or widen the arm's bounds."


def _of_refused(evidence: Evidence, arm: str, gates: Sequence[Gate]) -> str:
    return (
        "Widen the arm's bounds or ladders to the shapes of this traffic, or admit less (engine.max_prompt_tokens): "
        f"{_inspect(arm, [])} lists the shapes that it serves."
    )


# --- Errors, latency and others ---------------------------------------------------------------------------------------


def _of_deaths(evidence: Evidence, arm: str, gates: Sequence[Gate]) -> str:
    row = next(iter(evidence.run.account(arm).deaths), {})
    compiling = into_compile(row.get("compiling"))
    how = f"exit code {row.get('exit_code')}" + (f", {compiling}" if compiling else "")
    return f"{row.get('replica') or arm} died first ({how}): its last lines are under logs/ in the trial's folder."


def _of_errors(evidence: Evidence, arm: str, gates: Sequence[Gate]) -> str:
    run, requests = evidence.run, evidence.run.requests
    failed = run.of_arm(arm) & ~requests.broken & requests.failed
    count, shed = int(failed.sum()), int((failed & requests.shed).sum())
    behind = int((failed & run.attribution.hit).sum())
    if 2 * behind >= count > 0:
        return f"{behind} of {counted(count, 'failed request')} had been delayed by a compile: fix the compiles first."
    if 2 * shed > count:
        return (
            f"{shed} of the {count} that failed found no slot in time (RESOURCE_EXHAUSTED, DEADLINE_EXCEEDED): lower "
            "the rate, or add replicas or slots."
        )
    return "The column `error` of the requests says what each met, the arm's logs say why."


def _of_latency(evidence: Evidence, arm: str, gates: Sequence[Gate]) -> str:
    failed = {gate.gate for gate in evidence.slo if gate.verdict == FAIL}
    if both := [gate_label(gate.gate) for gate in gates if gate.gate in failed]:
        return f"{evidence.run.control} misses {', '.join(both)} too: look at the objective and the load first."
    frontier = "`tailgate frontier` on the experiment finds which load it holds"
    if mapping(evidence.run.account(arm).config.get("compile")).get("enabled") is False:
        return f"{frontier}."
    return f"{_inspect(arm, [])} shows graph breaks and steps that are not compiled; {frontier}."


def _of_memory(evidence: Evidence, arm: str, gates: Sequence[Gate]) -> str:
    return "To hold less, take fewer slots (engine.slots) or fewer planned shapes, which hold CUDA graphs."


def _of_parity(evidence: Evidence, arm: str, gates: Sequence[Gate]) -> str:
    if evidence.run.account(arm).external:
        return "Compare its weights, precision and sampling with the control's."
    return "`tailgate parity experiment.toml` measures it without traffic and names the first token that differs."


_COLD = "Have it do more before it is ready (compile.warmup), or start with compiled code (`tailgate precompile`)."
_RAMP = "The section on the ramp says at which share of the users it ended and why."

_Cause = tuple[Callable[[Gate], bool], Callable[[Evidence, str, Sequence[Gate]], str]]
_CAUSES: tuple[_Cause, ...] = (
    (lambda gate: gate.kind == "parity", _of_parity),
    (lambda gate: gate.kind == "recompile" and gate.gate != "eager steps", _of_compiles),
    (lambda gate: gate.gate == "eager steps", _of_eager_steps),
    (lambda gate: gate.gate == "refused", _of_refused),
    (lambda gate: gate.gate == "deaths", _of_deaths),
    (lambda gate: gate.kind == "error" and gate.gate not in ("refused", "deaths"), _of_errors),
    (lambda gate: gate.kind in ("noninferiority", "goodput", "slo"), _of_latency),
    (lambda gate: gate.kind == "cold", lambda *_: _COLD),
    (lambda gate: gate.kind == "memory", _of_memory),
    (lambda gate: gate.kind == "ramp", lambda *_: _RAMP),
)
