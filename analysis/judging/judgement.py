"""From a run to what follows from it: every comparison, gate and check made, and the verdict on each arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tailgate.analysis.checks.applied import apply_checks
from tailgate.analysis.checks.check import Check
from tailgate.analysis.checks.machines import MachineVerdict, machine_verdict
from tailgate.analysis.checks.table import checks_of_run
from tailgate.analysis.judging.comparisons import Comparisons, comparisons
from tailgate.analysis.judging.gates import Gate
from tailgate.analysis.judging.gates.compiles import (
    CompileFacts,
    compile_facts,
    compile_gates,
    delayed_text,
    eager_gates,
)
from tailgate.analysis.judging.gates.latency import latency_gate, needed_text, with_needed
from tailgate.analysis.judging.gates.memory import Peaks, memory_gates, memory_of
from tailgate.analysis.judging.gates.objectives import death_gates, error_gates, objective_gate, refused_gates
from tailgate.analysis.judging.gates.parity import parity_gates
from tailgate.analysis.judging.load_steps import goodput_gate, holding_of, is_search, steps_of
from tailgate.analysis.judging.ramp import ramp_gate, ramp_of
from tailgate.analysis.judging.verdict import Advice, advise, combined, headline
from tailgate.analysis.run.client_stalls import ArmStalls, client_stalls
from tailgate.analysis.run.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What follows from a run. Mappings are by arm."""

    compared: Comparisons
    facts: Mapping[str, CompileFacts]
    stalls: Mapping[str, ArmStalls]  # of every arm, as clients see them
    memory: Mapping[str, Peaks]
    gates: tuple[Gate, ...]  # of the treatments, after the checks
    checks: tuple[Check, ...]
    machine_verdict: MachineVerdict
    verdicts: Mapping[str, str]  # of the treatments
    overall: str
    headline: str
    advice: Advice


def judge(run: Run, given: Sequence[Check] = (), *, at_end: bool = True) -> Judgement:
    """Judge the run. The same records and seed give an equal judgement.

    `given` checks replace those of the same name, for example to compare two runs. An interim analysis (`at_end` False)
    omits what decides nothing, and memory except a ramp's, whose peak is one observation of a start.
    """
    # A search drives the arms past what they hold, so their latency over the whole run means nothing.
    search = is_search(run)
    compared = Comparisons() if search else comparisons(run, secondary=at_end)
    stalls = client_stalls(run.requests, run.arms, run.unjudged)
    checks, machines = checks_of_run(run, compared, stalls, at_end=at_end)
    checks = [*(check for check in checks if check.check not in {own.check for own in given}), *given]
    facts = {arm: compile_facts(run, arm) for arm in run.arms}
    memory = memory_of(run)
    ramp = ramp_of(run)
    steps = steps_of(run) if search else []
    raw: list[Gate] = []
    for arm in run.treatments:
        if search:
            own, control = (holding_of(name, steps) for name in (arm, run.control))
            raw.append(goodput_gate(own, control, margin=run.limits.margin))
        else:
            pairs = zip(compared.gated, compared.paths, strict=True)
            raw += [latency_gate(run, item, path) for item, path in pairs if item.arm == arm]
            raw += [objective_gate(run, arm, target) for target in run.targets]
        raw += compile_gates(run, arm, stalls[arm])
        raw += [*eager_gates(run, arm), *refused_gates(run, arm)]
        raw += death_gates(run, arm) if search else error_gates(run, arm)
        raw += parity_gates(run, arm)
        raw += memory_gates(run, arm, memory) if at_end or ramp is not None else []
    if at_end and ramp is not None:
        raw.append(ramp_gate(ramp))
    gates = [
        with_needed(run, before, after, checks) for before, after in zip(raw, apply_checks(raw, checks), strict=True)
    ]
    external = {arm: delayed_text(run, arm) for arm in run.arms if run.account(arm).external}
    verdicts = {arm: combined([gate.verdict for gate in gates if gate.arm == arm]) for arm in run.treatments}
    return Judgement(
        compared=compared,
        facts=facts,
        stalls=stalls,
        memory=memory,
        gates=tuple(gates),
        checks=tuple(checks),
        machine_verdict=machine_verdict(machines, checks, run.trial_name),
        verdicts=verdicts,
        overall=combined(list(verdicts.values())),
        headline=headline(verdicts, gates, checks, run.control, partial(needed_text, run)),
        advice=advise(gates, checks, external=external, needs=needed_text(run, 0.0)),
    )
