"""Moves the traffic of a run to its candidate step by step, and back at once when something happens.

What a step is left by, `analysis.judging.ramp_decision` says. A change of weights is written down before the splitter
is told, so that the candidate never has more than the last line allows, and again once the splitter has taken it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from analysis.judging.gates import FAIL, PASS
from analysis.judging.ramp_decision import Decision, Standing, decide
from analysis.records.tables import RecordError
from analysis.records.weight_journal import WeightChange, append
from analysis.run.spikes import RECOMPILE_KINDS
from analysis.settings.gate_limits import GateLimits
from analysis.settings.ramp_limits import RampLimits
from loadtests.experiments.config_errors import as_config_error
from loadtests.experiments.model import Experiment
from loadtests.trials.context import TrialContext
from loadtests.trials.early_end import END_DELAY_NS
from loadtests.trials.judge import Judge
from loadtests.trials.run import Orchestrator
from loadtests.trials.steering import Steered, Steering
from servers.clock import now_ns
from servers.fields import ConfigError
from servers.splitter.weights import reweight

WHOLE = 10_000  # the sum of all weights, so that a step may have two decimals
_AFTER_NS = 10_000_000_000  # of traffic that goes on after a rollback, to show that the control serves it
_BURST_REQUESTS, _BURST_SHARE = 5, 0.2  # of failed requests, and of those that ended in the step


def ramped(experiment: Experiment, *, at_most_s: float | None = None) -> Experiment:
    """The experiment as a ramp of its candidate beside its control: split by weights, looked at after every block.

    Raises ConfigError where it cannot be one.
    """
    limits = experiment.ramp
    names = [arm.name for arm in experiment.arms if not arm.control]
    candidate = limits.candidate or (names[0] if len(names) == 1 else "")
    if candidate not in names:
        given = f'is "{limits.candidate}"' if limits.candidate else "is not given"
        raise ConfigError(
            f"ramp.candidate {given}: name one of {', '.join(names)}, such as ramp.candidate = {names[0]}"
        )
    if experiment.external_arms:
        raise ConfigError(
            f'arm "{experiment.external_arms[0].name}" is external and goes direct: a ramp moves the traffic of arms '
            "that tailgate starts behind its own splitter"
        )
    if experiment.traffic.direct:
        raise ConfigError("traffic.direct = true goes past the splitter, whose weights a ramp moves: leave it out")
    control = experiment.control.name
    arms = tuple(
        replace(arm, weight=int(arm.name == control)) for arm in experiment.arms if arm.name in (control, candidate)
    )
    duration_s = min(limits.longest_s, at_most_s or limits.longest_s)
    with as_config_error(RecordError):
        return replace(
            experiment,
            arms=arms,
            traffic=replace(experiment.traffic, design="split", duration_s=duration_s),
            trials=replace(experiment.trials, count=1),
            gates=replace(experiment.gates, sequential=True),
            ramp=replace(limits, candidate=candidate),
        )


class RampRun(Orchestrator):
    """Runs an experiment that `ramped` has made, as one trial."""

    def _steering(self, context: TrialContext) -> Steering | None:
        assert self._judge is not None
        return RampControl(
            context.folder.parent,
            limits=self.experiment.ramp,
            gates=self.experiment.gates,
            control=self.experiment.control.name,
            judge=self._judge,
        )


class RampControl:
    """The ramp of one trial, whose steps begin with the traffic. The journal is in `run_dir`."""

    def __init__(self, run_dir: Path, *, limits: RampLimits, gates: GateLimits, control: str, judge: Judge) -> None:
        self._run_dir = run_dir
        self._limits, self._gates = limits, gates
        self._control, self._candidate = control, limits.candidate
        self._judge = judge
        self._step = 0
        self._began_ns = 0
        self._end_ns: int | None = None  # when the load ends, once the ramp has
        self._looked = 0
        self._failed_before = self._finished_before = 0
        self._last: WeightChange | None = None

    @property
    def share(self) -> float:
        """The percentage of the traffic that the candidate has at this step."""
        return self._limits.steps[self._step]

    def poll(self, trial: Steered) -> None:
        """The weights are as they should be now."""
        facts = trial.context.facts
        if trial.envoy is None or facts.start_ns is None:
            return
        if self._last is None:
            self._change(trial, "start", f"step 1 of {len(self._limits.steps)}")
        if self._end_ns is not None:
            self._end(trial)
            return
        alarms = self._alarms(trial)
        if len(alarms) > self._limits.failure_limit:
            cause_ns, why = alarms[self._limits.failure_limit]
            self._act(trial, Decision(action="rollback", why=why), cause_ns=cause_ns)
            return
        look = self._judge.last()
        if look is None or int(look["look"]) == self._looked:
            return
        self._looked = int(look["look"])
        if int(look["at_ns"]) < self._began_ns:
            return  # it was begun before the step, and counts the requests of the one before
        self._act(trial, decide(self._standing(look, [why for _, why in alarms]), self._limits))

    def _standing(self, look: Mapping[str, Any], alarms: Sequence[str]) -> Standing:
        outlook = look["arms"][self._candidate]
        step = look.get("step") or {}
        failed = outlook["reason"] if outlook["decision"] == FAIL else step.get("failed")
        return Standing(
            step=self._step,
            step_s=(now_ns() - self._began_ns) / 1e9,
            alarms=alarms,
            failed=failed,
            safe=bool(step.get("safe")),
            passed=outlook["decision"] == PASS,
            requests=int(step.get("requests") or 0),
            uneven=step.get("uneven"),
        )

    def _alarms(self, trial: Steered) -> list[tuple[int, str]]:
        """What happened to the candidate while it served, in order, each with when."""
        limits, candidate = self._limits, self._candidate
        found = []
        recompiles = 0
        for event in trial.collector.served_compiles:
            if event.arm != candidate or event.kind not in RECOMPILE_KINDS:
                continue
            recompiles += 1
            shape = f" for {event.shape}" if event.shape else ""
            if event.seconds >= limits.stall_limit_s:
                found.append((event.end_ns, f"{candidate} compiled for {event.seconds:.1f} s while serving{shape}"))
            elif recompiles > self._gates.max_recompiles:
                found.append((event.end_ns, f"{candidate} recompiled {recompiles} times while serving{shape}"))
        for death in trial.context.facts.deaths:
            if death.get("arm") == candidate:
                at_ns = death.get("at_ns")
                found.append((int(at_ns) if isinstance(at_ns, int) else now_ns(), f"{death.get('replica')} died"))
        if (load := trial.context.status.load.arms.get(candidate)) is not None:
            failed = load.failed - self._failed_before
            finished = load.finished - self._finished_before
            if failed >= _BURST_REQUESTS and failed > _BURST_SHARE * finished:
                found.append((now_ns(), f"{failed} of {finished} requests to {candidate} failed in this step"))
        return sorted(found)

    def _act(self, trial: Steered, decision: Decision, *, cause_ns: int | None = None) -> None:
        if decision.action == "stay":
            trial.context.status.detail = f"{self.share:g} % to {self._candidate}: {decision.why}"
            return
        if decision.action == "advance":
            self._step += 1
        if decision.action == "promoted":
            self._last = self._record(decision.action, decision.why, cause_ns=cause_ns)
        else:
            self._change(trial, decision.action, decision.why, cause_ns=cause_ns)
        trial.context.status.note(f"ramp: {decision.action}: {decision.why}")
        if decision.action in ("rollback", "promoted"):
            after_ns = _AFTER_NS if decision.action == "rollback" else 0
            self._end_ns = now_ns() + after_ns

    def _change(self, trial: Steered, action: str, why: str, *, cause_ns: int | None = None) -> None:
        """The splitter sends the candidate its share, and the journal says since when."""
        assert trial.envoy is not None
        change = self._record(action, why, cause_ns=cause_ns)
        reweight(trial.envoy.admin, change.weights)
        self._last = replace(change, done_ns=now_ns())
        append(self._run_dir, self._last)
        self._began_ns = now_ns()
        load = trial.context.status.load.arms.get(self._candidate)
        if load is not None:
            self._failed_before, self._finished_before = load.failed, load.finished
        trial.context.status.note(f"{change.weights[self._candidate] / WHOLE:.4g} of the traffic to {self._candidate}")

    def _record(self, action: str, why: str, *, cause_ns: int | None = None) -> WeightChange:
        share = 0 if action == "rollback" else round(self.share / 100.0 * WHOLE)
        change = WeightChange(
            at_ns=now_ns(),
            weights={self._control: WHOLE - share, self._candidate: share},
            why=why,
            action=action,
            step=self._step,
            cause_ns=cause_ns,
        )
        append(self._run_dir, change)
        return change

    def _end(self, trial: Steered) -> None:
        """The load ends some time after the ramp has."""
        facts = trial.context.facts
        if facts.ended is None and self._end_ns is not None and now_ns() >= self._end_ns:
            assert self._last is not None
            facts.ended = f"the ramp ended: {self._last.action}, {self._last.why}"
            trial.end_load(now_ns() + END_DELAY_NS)
