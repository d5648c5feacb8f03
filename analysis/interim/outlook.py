"""An interim analysis: each gate as its evidence decides it until now, and whether an arm is decided.

An arm has failed once a gate fails, and passed once every gate with interim evidence passes. What is asked after the
traffic, or what clients cannot see, is not waited for. A gate that only the whole run decides keeps an arm from passing
before the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from analysis.checks.applied import apply_checks, blocking
from analysis.checks.check import Check
from analysis.checks.table import checks_of_run
from analysis.checks.traffic import SAMPLE_RATIO
from analysis.judging.comparisons import gated_comparisons, step_comparisons
from analysis.judging.gates import FAIL, INCONCLUSIVE, PASS, Gate
from analysis.judging.gates.compiles import compile_gates, eager_gates
from analysis.judging.gates.latency import latency_gate
from analysis.judging.gates.memory import memory_gates
from analysis.judging.gates.objectives import error_gates, objective_gate, refused_gates
from analysis.judging.gates.parity import parity_gates
from analysis.judging.ramp_account import ramp_of
from analysis.judging.verdict import KIND_ORDER
from analysis.run.client_stalls import client_stalls
from analysis.run.memory import memory_of
from analysis.run.run import Run

_ASKED_LATER = ("parity",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmOutlook:
    """Where an arm stands. A FAIL is for good, a PASS unless what comes after contradicts it. `outlook_s` are the
    seconds that will likely decide it, None where that is unknown; `hopeless`: what is left of the run will hardly
    decide it."""

    arm: str
    reason: str
    decision: str | None = None
    decided_s: float | None = None
    outlook_s: float | None = 0.0
    hopeless: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutlook:
    """What a ramp asks of an interim analysis. `safe`: the candidate is surely no slower than a step allows; `failed`:
    why it surely is; `requests` of it were judged since the last change of weights; `uneven`: how its share differs."""

    safe: bool
    failed: str | None
    requests: int
    uneven: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Interim:
    """What is known of the run after `seconds` that could be judged."""

    seconds: float
    trial: int
    arms: tuple[ArmOutlook, ...]
    step: StepOutlook | None  # of a ramp
    gates: tuple[Gate, ...]
    checks: tuple[Check, ...]

    @property
    def decided(self) -> bool:
        """Whether every arm is decided, or hopeless."""
        return all(item.decision is not None or item.hopeless for item in self.arms)


def analyse(run: Run, *, left_s: float) -> Interim:
    """The interim analysis of what the run holds, of which `left_s` seconds are still to come."""
    compared = gated_comparisons(run)
    stalls = client_stalls(run.requests, run.arms)
    checks, _ = checks_of_run(run, compared, stalls, at_end=False)
    raw = [latency_gate(run, *pair) for pair in zip(compared.gated, compared.paths, strict=True)]
    for arm in run.treatments:
        raw += [objective_gate(run, arm, target) for target in run.targets]
        raw += compile_gates(run, arm, stalls[arm])
        raw += [*eager_gates(run, arm), *refused_gates(run, arm)]
        raw += error_gates(run, arm)
        raw += parity_gates(run, arm)
    ramp = ramp_of(run)
    if ramp is not None:
        # A peak is one observation of a start, however often it is analysed.
        raw += memory_gates(run, ramp.candidate, memory_of(run))
    gates = apply_checks(raw, checks)
    # No step of a ramp can wait for the end of the run.
    to_the_end = waits_for_the_end(run) and ramp is None
    outlooks = []
    for arm in run.treatments:
        own = [gate for gate in gates if gate.arm == arm]
        outlooks.append(outlook_of(arm, own, checks, seconds=run.seconds, left_s=left_s, to_the_end=to_the_end))
    return Interim(
        seconds=run.seconds,
        trial=max((trial.number for trial in run.trials), default=1),
        arms=tuple(outlooks),
        step=step_outlook(run, checks),
        gates=tuple(gates),
        checks=tuple(checks),
    )


def step_outlook(run: Run, checks: Sequence[Check]) -> StepOutlook | None:
    """What is known of the step that the run's ramp is at; None where it is none."""
    ramp = ramp_of(run)
    if ramp is None:
        return None
    compared = step_comparisons(run, ramp.candidate, ramp.limits.step_margin)
    uneven = [check.reason for check in checks if check.rule is SAMPLE_RATIO and not check.ok]
    own = run.of_arm(ramp.candidate) & run.usable
    return StepOutlook(
        safe=bool(compared) and all(path.outcome == PASS for _, path in compared),
        failed=next((item.reason for item, path in compared if path.outcome == FAIL), None),
        requests=int((own & (run.requests.start_ns >= ramp.last.at_ns)).sum()),
        uneven=uneven[0] if uneven else None,
    )


def waits_for_the_end(run: Run) -> bool:
    """Whether the experiment has gates that only the whole run decides."""
    limits = run.limits
    return limits.min_goodput_ratio is not None or limits.max_memory_ratio is not None


def outlook_of(
    arm: str,
    gates: Sequence[Gate],
    checks: Sequence[Check] = (),
    *,
    seconds: float,
    left_s: float,
    to_the_end: bool = False,
) -> ArmOutlook:
    """Where the arm stands by its gates. `to_the_end`: it has gates that only the end of the run decides."""
    failed = min((gate for gate in gates if gate.verdict == FAIL), key=lambda gate: KIND_ORDER[gate.kind], default=None)
    if failed is not None:
        at_s = failed.path.decided_s if failed.path is not None else None
        return ArmOutlook(arm=arm, decision=FAIL, decided_s=seconds if at_s is None else at_s, reason=failed.reason)
    waited = [gate for gate in gates if gate.kind not in _ASKED_LATER and not gate.unseen]
    still = [gate for gate in waited if gate.verdict == INCONCLUSIVE]
    left = [gate.path.outlook_s if gate.path is not None and gate.path.outcome is None else None for gate in still]
    if not still and waited and not to_the_end:
        at_s = max((gate.path.decided_s or 0.0 for gate in waited if gate.path is not None), default=seconds)
        reason = "Every gate with interim evidence has passed."
        return ArmOutlook(arm=arm, decision=PASS, decided_s=at_s, reason=reason)
    known = [value for value in left if value is not None]
    paths = [gate.path for gate in still if gate.path is not None]
    lost = [gate for gate in still if any(check.rule.lasting for check in blocking(gate, checks))]
    # No PASS is left to wait for, and no FAIL either.
    no_pass = bool(lost) or any(path.hopeless(left_s) for path in paths)
    hopeless = no_pass and not any(path.may_fail(left_s) for path in paths)
    return ArmOutlook(
        arm=arm,
        outlook_s=left_s if not still else max(known) if len(known) == len(left) else None,
        hopeless=hopeless,
        reason=(lost or still)[0].reason if still else "Some gates are decided at the end of the run.",
    )
