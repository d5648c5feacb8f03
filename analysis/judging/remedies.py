"""What to do about each gate that failed, as far as the records tell its cause; the cause of others first.

Nothing is guessed: where the records name no cause, the remedy is the command that shows one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.checks.complete import into_compile
from analysis.judging.gates import FAIL, Gate
from analysis.records.plain_values import mapping, number
from analysis.records.schemas import EVENT_KINDS
from analysis.run.compile_events import RECOMPILE_KINDS, CompileEvent
from analysis.run.run import Run
from analysis.settings.metrics import gate_label
from analysis.wording import counted

_MOST_STEPS = 3  # that are named
_LONGEST_GUARD = 90  # characters
_STEP = re.compile(r"(?:capture )?(prefill|extend|decode|encode) batch (\d+) × length (\d+)(?:, context (\d+))?")
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
    """Of each arm that failed, in the order of its gates' arms: what explains other failures comes before them."""
    found = []
    for arm in dict.fromkeys(gate.arm for gate in gates if gate.verdict == FAIL):
        failed = [gate for gate in gates if gate.arm == arm and gate.verdict == FAIL]
        for belongs, told in _CAUSES:
            if own := [gate for gate in failed if belongs(gate)]:
                text = " ".join(told(evidence, arm, own))
                found.append(Remedy(arm=arm, gates=tuple(gate.gate for gate in own), text=text))
    return tuple(found)


# --- Compiles ---------------------------------------------------------------------------------------------------------


def _of_compiles(evidence: Evidence, arm: str, gates: Sequence[Gate]) -> Iterator[str]:
    run = evidence.run
    serving = run.serving_events(arm)
    events = [event for event in serving if event.kind in RECOMPILE_KINDS]
    if run.account(arm).external:
        where = f"; its log tells of {counted(len(events), 'compile')}" if events else ""
        yield f"Have its server warm up the lengths of this traffic before it is measured{where}."
        return
    if not events:
        kinds = Counter(EVENT_KINDS.get(event.kind, event.kind) for event in serving if event.stalls)
        named = ", ".join(f"{kind} ({count})" for kind, count in kinds.most_common())
        yield f"Nothing was recompiled; what held requests up was: {named}." if named else "Nothing was recompiled."
        yield f"{_inspect(arm, [])} shows which steps are not ready."
        return
    steps = Counter(shape for event in events if (shape := _shape(event)))
    warmed = _warmed(run, arm)
    cold = [] if warmed is None else [step for step in steps if step not in warmed]
    compiled_cold = sum(steps[step] for step in cold)
    if cold:
        starts = "its start" if len(run.trials_of(arm)) == 1 else "each of its starts"
        yield f"{_share(compiled_cold, len(events))} that {starts} had not warmed up."
    elif warmed is not None and steps and sum(steps.values()) == len(events):
        yield "Its warm-up had run each step that it compiled for while serving."
    if guard := _guard(events):
        yield f"First failed guard: {guard}."
    if hits := sum(event.kind == "limit_hit" for event in events):
        yield f"The recompile limit was hit {counted(hits, 'time')} (compile.recompile_limit)."
    if choices := _choices(mapping(run.account(arm).config), cold=bool(cold)):
        yield f"{choices}."
    yield f"Try without traffic: {_inspect(arm, list(cold or steps))}."


def _share(cold: int, compiles: int) -> str:
    if compiles == 1:
        return "Its compile while serving was for a step"
    which = f"All {compiles}" if cold == compiles else f"{cold} of {compiles}"
    return f"{which} compiles while serving were for steps"


def _choices(config: Mapping[str, Any], *, cold: bool) -> str:
    """What the arm's configuration leaves to try; empty where it leaves nothing that is known."""
    policy, kind = mapping(config.get("compile")), mapping(config.get("shapes")).get("kind")
    choices = []
    if cold and policy.get("warmup") in ("minimal", "lengths"):
        choices.append(f'warm up every planned step (compile.warmup = "shapes", not "{policy["warmup"]}")')
    if policy.get("mark_dynamic") is True:
        bounds = [key for key in ("batch_bounds", "length_bounds", "context_bounds") if policy.get(key)]
        if cold and bounds:
            choices.append(f"hold its bounds ({', '.join(bounds)}) against these steps")
    elif kind == "exact":
        choices.append("plan its shapes (preset compiled-bucketed)")
        choices.append("mark what varies, with bounds (preset compiled-dynamic)")
    text = " or ".join(filter(None, (", ".join(choices[:-1]), *choices[-1:])))
    return text[:1].upper() + text[1:]


def _warmed(run: Run, arm: str) -> set[str] | None:
    """The steps that every start of the arm warmed up; None where some start does not say."""
    starts = [
        {step for item in mapping(start.get("items_ns")) if (step := _plain(str(item)))}
        for start in run.account(arm).startups
    ]
    return set.intersection(*starts) if starts and all(starts) else None


def _shape(event: CompileEvent) -> str:
    return _plain(str(event.row.get("shape") or ""))


def _plain(text: str) -> str:
    """The step that the text names, whether it ran or was captured; empty where it names none."""
    named = _STEP.match(text)
    return named[0].removeprefix("capture ") if named else ""


def _guard(events: Sequence[CompileEvent]) -> str:
    """The guard that the first recompile with a reason names first; empty without one."""
    reasons = (str(event.row.get("reason") or "").strip() for event in events if event.kind == "recompile")
    reason = next(filter(None, reasons), "")
    first = " ".join(_GUARD.sub("", reason.partition("\n")[0]).split()).rstrip(".")
    return first if len(first) <= _LONGEST_GUARD else f"{first[:_LONGEST_GUARD]}…"


def _listed(steps: Sequence[str]) -> str:
    more = f" and {len(steps) - _MOST_STEPS} more" if len(steps) > _MOST_STEPS else ""
    return ", ".join(_step(step) for step in steps[:_MOST_STEPS]) + more


def _step(shape: str) -> str:
    """The step as `tailgate inspect --shapes` reads it: "extend 2x1024@2048"."""
    named = _STEP.match(shape)
    if named is None:
        return shape
    kind, rows, length, context = named.groups()
    size = rows if kind == "decode" else f"{rows}x{length}"
    return f"{kind} {size}@{context}" if kind in ("decode", "extend") and context else f"{kind} {size}"


def _inspect(arm: str, steps: Sequence[str]) -> str:
    named = ", ".join(_step(step) for step in steps[:_MOST_STEPS])
    return f"`tailgate inspect experiment.toml --arm {arm}" + (f' --shapes "{named}"`' if named else "`")


def _of_eager_steps(evidence: Evidence, arm: str, gates: Sequence[Gate]) -> Iterator[str]:
    events = [event for event in evidence.run.serving_events(arm) if event.kind == "eager_fallback"]
    if steps := list(dict.fromkeys(shape for event in events if (shape := _shape(event)))):
        yield f"It fell back to eager for {_listed(steps)}: plan and warm up these steps, or widen the arm's bounds."
    yield f"{_inspect(arm, steps)} shows which steps run eagerly."


def _of_refused(evidence: Evidence, arm: str, gates: Sequence[Gate]) -> Iterator[str]:
    yield "Widen the arm's bounds or ladders to the shapes of this traffic, or admit less (engine.max_prompt_tokens)."
    yield f"{_inspect(arm, [])} lists the shapes that it serves."


# --- Errors -----------------------------------------------------------------------------------------------------------


def _of_deaths(evidence: Evidence, arm: str, gates: Sequence[Gate]) -> Iterator[str]:
    row = next(iter(evidence.run.account(arm).deaths), {})
    compiling = into_compile(row.get("compiling"))
    how = f"exit code {row.get('exit_code')}" + (f", {compiling}" if compiling else "")
    name = row.get("replica") or arm
    yield f"{name} died first ({how}): its last lines are under logs/ in the trial's folder."


def _of_errors(evidence: Evidence, arm: str, gates: Sequence[Gate]) -> Iterator[str]:
    run, requests = evidence.run, evidence.run.requests
    failed = run.of_arm(arm) & ~requests.broken & requests.failed
    count, shed = int(failed.sum()), int((failed & requests.shed).sum())
    behind = int((failed & run.attribution.hit).sum())
    if behind:
        which = f"{behind} of {counted(count, 'failed request')}"
        if behind == count:
            which = "The failed request" if count == 1 else f"All {count} failed requests"
        yield f"{which} had waited for a compile: mend the compiles first."
    if 2 * behind < count:
        if 2 * shed > count:
            yield f"{shed} of the {count} that failed found no room or no time (RESOURCE_EXHAUSTED, DEADLINE_EXCEEDED):"
            yield "lower the rate, or add replicas or slots."
        else:
            yield "The column `error` of the requests says what each met (`tailgate export`), the arm's logs say why."


# --- Latency ----------------------------------------------------------------------------------------------------------


def _of_latency(evidence: Evidence, arm: str, gates: Sequence[Gate]) -> Iterator[str]:
    control = evidence.run.control
    failed = {gate.gate for gate in evidence.slo if gate.verdict == FAIL}
    both = [gate_label(gate.gate) for gate in gates if gate.gate in failed]
    if both:
        yield f"{control} misses {', '.join(both)} too: look at the objective and the load first."
    if len(both) == len(gates):
        return
    if mapping(evidence.run.account(arm).config.get("compile")).get("enabled") is not False:
        yield f"`tailgate inspect experiment.toml --arm {arm}` shows graph breaks and steps that are not compiled."
    yield "`tailgate frontier` on the experiment finds which load it holds."


def _of_cold(evidence: Evidence, arm: str, gates: Sequence[Gate]) -> Iterator[str]:
    yield (
        "Its first traffic after ready misses the objective: have it do more before it is ready (compile.warmup), or "
        "start with compiled code (`tailgate precompile`)."
    )


# --- Others -----------------------------------------------------------------------------------------------------------


def _of_memory(evidence: Evidence, arm: str, gates: Sequence[Gate]) -> Iterator[str]:
    config = evidence.run.account(arm).config
    policy = mapping(config.get("compile"))
    graphs = policy.get("capture") is True or policy.get("mode") in ("reduce-overhead", "max-autotune")
    less = "fewer planned shapes (shorter ladders) hold less in CUDA graphs, " if graphs else ""
    slots = number(mapping(config.get("engine")).get("slots"))
    here = f", here {slots:.0f}" if slots is not None else ""
    yield f"To hold less: {less}fewer slots (engine.slots{here}) hold a smaller cache."


def _of_parity(evidence: Evidence, arm: str, gates: Sequence[Gate]) -> Iterator[str]:
    if evidence.run.account(arm).external:
        yield "Compare its weights, precision and sampling with the control's."
    else:
        yield "`tailgate parity experiment.toml` measures it without traffic and names what departs."


def _of_ramp(evidence: Evidence, arm: str, gates: Sequence[Gate]) -> Iterator[str]:
    yield "The section on the ramp says at which share of the users it ended and why."


_Cause = tuple[Callable[[Gate], bool], Callable[[Evidence, str, Sequence[Gate]], Iterator[str]]]
_CAUSES: tuple[_Cause, ...] = (
    (lambda gate: gate.kind == "parity", _of_parity),
    (lambda gate: gate.kind == "recompile" and gate.gate != "eager steps", _of_compiles),
    (lambda gate: gate.gate == "eager steps", _of_eager_steps),
    (lambda gate: gate.gate == "refused", _of_refused),
    (lambda gate: gate.gate == "deaths", _of_deaths),
    (lambda gate: gate.kind == "error" and gate.gate not in ("refused", "deaths"), _of_errors),
    (lambda gate: gate.kind in ("noninferiority", "goodput", "slo"), _of_latency),
    (lambda gate: gate.kind == "cold", _of_cold),
    (lambda gate: gate.kind == "memory", _of_memory),
    (lambda gate: gate.kind == "ramp", _of_ramp),
)
