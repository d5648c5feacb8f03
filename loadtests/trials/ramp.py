"""The ramp of a candidate: its traffic grows step by step, and goes back at once when something happens.

`tailgate.analysis.judging.ramp` says what ends a step. A change that the splitter did not take is sent again until it
does, or until another program has set the weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tailgate.analysis.judging.alarms import Alarm, burst_alarms, compile_alarms, death_alarms
from tailgate.analysis.judging.gates import FAIL, PASS
from tailgate.analysis.judging.ramp import Decision, Standing, decide
from tailgate.analysis.settings.gate_limits import GateLimits
from tailgate.analysis.settings.ramp_limits import RampLimits
from tailgate.loadtests.experiments.model import Experiment
from tailgate.loadtests.trials.context import TrialContext
from tailgate.loadtests.trials.run import Orchestrator
from tailgate.loadtests.trials.steering import END_DELAY_NS, Judge, Steered, Steering
from tailgate.loadtests.trials.weights import UNANSWERED, Splitter, WeightController, in_words
from tailgate.servers.clock import now_ns
from tailgate.servers.complaint import ConfigError

WHOLE = 10_000  # the sum of all weights, so that a step may have two decimals
_AFTER_NS = 10_000_000_000  # of traffic that goes on after a rollback, to show that the control serves it
_LAST_NS = 2_000_000_000  # before the traffic ends: what a rollback may take
_UNSEEN_NS = 120_000_000_000  # without an interim analysis, after which a step whose time is over does not wait for one
_WINDOW_NS = 300_000_000_000  # in which a burst of errors counts


def ramped(experiment: Experiment, *, at_most_s: float | None = None) -> Experiment:
    """Return the experiment as a ramp of its candidate: split by weights, analysed after every block.

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
    control = experiment.control.name
    arms = tuple(
        arm.replace(weight=int(arm.name == control)) for arm in experiment.arms if arm.name in (control, candidate)
    )
    duration_s = min(limits.longest_s, at_most_s or limits.longest_s)
    return experiment.replace(
        arms=arms,
        traffic={**dict(experiment.traffic), "design": "split", "duration_s": duration_s},
        trials=experiment.trials.replace(count=1),
        gates=experiment.gates.model_copy(update={"sequential": True}),
        ramp=limits.model_copy(update={"candidate": candidate}),
    )


class RampRun(Orchestrator):
    """Runs an experiment that `ramped` has made, as one trial."""

    def _steering(self, context: TrialContext) -> list[Steering]:
        assert self._judge is not None
        return [RampControl(context.folder.parent, self.experiment, judge=self._judge).poll]


class Candidate:
    """Watches the candidate of `limits` since its share last changed, at `began_ns`."""

    def __init__(self, limits: RampLimits, gates: GateLimits) -> None:
        self.name = limits.candidate
        self.began_ns = 0
        self._limits, self._gates = limits, gates
        self._counts: deque[tuple[int, int, int]] = deque()  # (when, requests finished, of these failed)

    def begin(self, trial: Steered) -> None:
        """Count from now on: the candidate's share has changed."""
        self._count(trial)
        self.began_ns = now_ns()
        self._counts = deque([self._counts[-1]])

    def alarms(self, trial: Steered) -> list[Alarm]:
        """Return what happened to the candidate while it served, in order."""
        self._count(trial)
        at_ns, finished, failed = self._counts[-1]
        first_ns, finished_before, failed_before = self._counts[0]
        found = compile_alarms(
            self.name,
            # In this order: a compile that ends meanwhile is in both.
            [*trial.collector.compiling, *trial.collector.served_compiles],
            now_ns=at_ns,
            stall_limit_s=self._limits.stall_limit_s,
            max_recompiles=self._gates.max_recompiles,
        )
        found += death_alarms(self.name, trial.context.facts.deaths, now_ns=at_ns)
        found += burst_alarms(
            self.name,
            failed=failed - failed_before,
            finished=finished - finished_before,
            now_ns=at_ns,
            meanwhile=f"in the last {(at_ns - first_ns) / 1e9:.0f} s",
        )
        return sorted(found)

    def standing(self, interim: Mapping[str, Any], *, step: int = 0) -> Standing:
        """Return where the candidate stands by an interim analysis."""
        outlook, seen = interim["arms"][self.name], interim.get("step") or {}
        return Standing(
            step=step,
            step_s=(now_ns() - self.began_ns) / 1e9,
            failed=outlook["reason"] if outlook["decision"] == FAIL else seen.get("failed"),
            safe=bool(seen.get("safe")),
            passed=outlook["decision"] == PASS,
            requests=int(seen.get("requests") or 0),
            uneven=seen.get("uneven"),
        )

    def _count(self, trial: Steered) -> None:
        """Note how many requests have ended, and forget what is older than the window."""
        at_ns = now_ns()
        load = trial.context.status.load.arms.get(self.name)
        known = (load.finished, load.failed) if load is not None else self._counts[-1][1:] if self._counts else (0, 0)
        self._counts.append((at_ns, *known))
        while self._counts[0][0] < at_ns - _WINDOW_NS:
            self._counts.popleft()


class RampControl:
    """The ramp of one trial, which begins with the traffic, at step `step`. The journal is in `run_dir`.

    Weights that another program sets are recorded, stay as they are, and end the ramp.
    """

    def __init__(self, run_dir: Path, experiment: Experiment, *, judge: Judge, step: int = 0) -> None:
        self._limits, self._control, self._judge = experiment.ramp, experiment.control.name, judge
        self._candidate = Candidate(experiment.ramp, experiment.gates)
        self._weights = WeightController(run_dir, (self._control, self._candidate.name))
        self._end_ns: int | None = None  # when the load ends, once the ramp has
        self._last_interim = self._last_interim_ns = 0
        self._step = step

    @property
    def share(self) -> float:
        """Return the percentage of the traffic that the candidate has at this step."""
        return self._limits.steps[self._step]

    def poll(self, trial: Steered) -> None:
        """Decide what is due now, and have the splitter take it."""
        splitter = trial.splitter
        if splitter is None or trial.context.facts.start_ns is None:
            return
        if self._end_ns is not None:
            self._end(trial, self._end_ns)
            return
        if self._weights.last is None:
            self._change(trial, "start", f"step {self._step + 1} of {len(self._limits.steps)}")
        self._sync(trial, splitter)
        assert self._weights.last is not None
        if self._end_ns is not None or self._weights.last.action == "rollback":
            return  # decided once, whether or not the splitter has taken it
        if (alarms := self._candidate.alarms(trial)) or self._is_over(trial):
            why = alarms[0].why if alarms else "the ramp ran out of time before the step was decided"
            self._act(trial, Decision(action="rollback", why=why), cause_ns=alarms[0].at_ns if alarms else None)
        elif self._weights.due is None and self._weights.held:
            self._decide(trial)
        if self._weights.due is not None:
            self._sync(trial, splitter)

    def _is_over(self, trial: Steered) -> bool:
        """Return whether the traffic ends in a moment, after which nothing rolls an open step back."""
        facts = trial.context.facts
        end_ns = (facts.start_ns or 0) + round(facts.duration_s * 1e9)
        return self._limits.on_inconclusive == "rollback" and now_ns() >= end_ns - _LAST_NS

    def _decide(self, trial: Steered) -> None:
        """Act on an interim analysis that is new and was begun in this step.

        A step without interim analyses ends by its longest time: nothing about it is sure. The last step, which would
        be promoted by its time alone, waits.
        """
        interim, candidate = self._judge.last(), self._candidate
        began_ns, limit_s = candidate.began_ns, self._limits.most_step_s
        if interim is not None and int(interim["number"]) != self._last_interim:
            self._last_interim, self._last_interim_ns = int(interim["number"]), now_ns()
            if int(interim["at_ns"]) >= began_ns:  # an older one counts the requests of the step before
                self._act(trial, decide(candidate.standing(interim, step=self._step), self._limits))
            return
        unseen_ns = now_ns() - max(self._last_interim_ns, began_ns)
        is_last = self._step == len(self._limits.steps) - 1
        if is_last or unseen_ns < _UNSEEN_NS or (now_ns() - began_ns) / 1e9 < limit_s:
            return
        why = f"still open after {limit_s:g} s: there was no interim analysis for {unseen_ns / 1e9:.0f} s"
        self._act(trial, Decision(action=self._limits.on_inconclusive, why=why))

    def _act(self, trial: Steered, decision: Decision, *, cause_ns: int | None = None) -> None:
        weights, status = self._weights, trial.context.status
        assert weights.last is not None
        action, why = decision.action, decision.why
        if action in ("stay", "hold"):
            status.detail = f"{self.share:g} % to {self._candidate.name}: {why}"
        if action == "stay" or action == weights.last.action == "hold":
            return
        if action in ("hold", "promoted"):
            weights.decide(action=action, why=why)
            self._end_ns = now_ns() if action == "promoted" else None
        else:
            self._step += action == "advance"
            self._change(trial, action, why, cause_ns=cause_ns)
        status.note(f"ramp: {action} at {self.share:g} %: {why}")

    def _change(self, trial: Steered, action: str, why: str, *, cause_ns: int | None = None) -> None:
        """Record what the candidate is to have, and begin to count."""
        share = 0 if action == "rollback" else round(self.share / 100.0 * WHOLE)
        weights = {self._control: WHOLE - share, self._candidate.name: share}
        self._weights.set(weights, action=action, why=why, step=self._step, cause_ns=cause_ns)
        self._candidate.begin(trial)

    def _sync(self, trial: Steered, splitter: Splitter) -> None:
        """Have the splitter take what is due; one that does not answer is asked again. Weights that others have set
        stay as they are and end the ramp."""
        status, due = trial.context.status, self._weights.due
        try:
            change = self._weights.poll(splitter)
        except UNANSWERED as error:
            what = "the splitter does not answer" if due is None else "the weights are not changed yet"
            status.detail = f"{what}: {error}"
            return
        if change is None:
            return
        if due is None or change.action != due.action:
            self._end_ns = now_ns()
            undone = f", and {due.action} was not done: {due.why}" if due is not None else ""
            status.note(f"ramp: the weights are {in_words(change)} now: {change.why}; the ramp ends{undone}")
            return
        self._candidate.begin(trial)
        share = change.weights[self._candidate.name]
        status.detail = f"{100.0 * share / WHOLE:g} % of the traffic to {self._candidate.name}"
        status.note(status.detail)
        if change.action == "rollback":
            self._end_ns = now_ns() + _AFTER_NS

    def _end(self, trial: Steered, at_ns: int) -> None:
        """End the load some time after the ramp has ended."""
        facts, last = trial.context.facts, self._weights.last
        if facts.ended is None and last is not None and now_ns() >= at_ns:
            facts.ended = f"the ramp ended: {last.action}, {last.why}"
            trial.end_load(now_ns() + END_DELAY_NS)
