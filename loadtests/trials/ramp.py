"""The ramp of a candidate: its traffic grows step by step, and goes back at once when something happens.

`tailgate.analysis.judging.ramp` says what ends a step. A change that the splitter did not take is sent again until it
does, or until another program has set the weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tailgate.analysis.judging.alarms import Alarm, burst_alarms, compile_alarms, death_alarms
from tailgate.analysis.judging.ramp import Action, Standing, decide
from tailgate.loadtests.experiments.model import Experiment
from tailgate.loadtests.trials.context import TrialContext
from tailgate.loadtests.trials.run import Orchestrator
from tailgate.loadtests.trials.steering import END_DELAY_NS, Judge, Steered, Steering
from tailgate.loadtests.trials.weights import UNANSWERED, WeightController, in_words
from tailgate.servers.clock import now_ns
from tailgate.servers.complaint import ConfigError

WHOLE = 10_000  # the sum of all weights, so that a step may have two decimals
_AFTER_NS = 10_000_000_000  # of traffic that goes on after a rollback, to show that the control serves it
_LAST_NS = 2_000_000_000  # before the traffic ends: what a rollback may take
# The last interim analysis says nothing of now once it is older than four blocks, and a minute.
_SILENT_S: Final = 60.0
_SILENT_BLOCKS: Final = 4
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
            f"ramp.candidate {given}: name one of {', '.join(names)}, such as --set ramp.candidate={names[0]}"
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
    """The candidate of a ramp: its weights, what happens to it, and what interim analyses say of it."""

    def __init__(self, run_dir: Path, experiment: Experiment, judge: Judge) -> None:
        self.limits, self.name = experiment.ramp, experiment.ramp.candidate
        self.weights = WeightController(run_dir, (experiment.control.name, self.name))
        self._gates, self._judge = experiment.gates, judge
        self._most_silent_s = max(_SILENT_S, _SILENT_BLOCKS * experiment.gates.block_s)
        self._counts = deque([(0, 0, 0)])  # (when, requests finished, of these failed)

    def alarms(self, trial: Steered) -> list[Alarm]:
        """Return what happened to it while it served, in order. Errors count since its share last changed."""
        at_ns, (_, finished, failed) = now_ns(), self._counts[-1]
        if (load := trial.context.status.load.arms.get(self.name)) is not None:
            finished, failed = load.finished, load.failed
        self._counts.append((at_ns, finished, failed))
        since_ns = max(at_ns - _WINDOW_NS, self.weights.since_ns)
        while self._counts[0][0] < since_ns:
            self._counts.popleft()
        first_ns, finished_before, failed_before = self._counts[0]
        found = compile_alarms(
            self.name,
            # In this order: a compile that ends meanwhile is in both.
            [*trial.collector.compiling, *trial.collector.served_compiles],
            now_ns=at_ns,
            stall_limit_s=self.limits.stall_limit_s,
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

    @property
    def interim(self) -> Mapping[str, Any]:
        """Return the last interim analysis, before the first its number and time alone."""
        return self._judge.last() or {"number": 0, "at_ns": 0}

    @property
    def standing(self) -> Standing:
        """Return where it stands by the last interim analysis."""
        return Standing(**self.interim.get("step", {}))

    @property
    def silent_s(self) -> float:
        """Return how long there has been no interim analysis of the present weights; 0 while it is not too long."""
        silent_s = (now_ns() - max(self.interim["at_ns"], self.weights.since_ns)) / 1e9
        return silent_s if silent_s > self._most_silent_s else 0.0

    def missing(self) -> str | None:
        """Return why nothing is sure of it now, whatever its standing; None where that can be."""
        if not self.weights.held:
            return "the weights in force are not known"
        if self.silent_s:
            return f"there was no interim analysis for {self.silent_s:.0f} s; the limit is {self._most_silent_s:g} s"
        if self.interim["at_ns"] < self.weights.since_ns:  # it counts the requests of the weights before
            return "there is no interim analysis of these weights yet: it takes a block (traffic.block_s) of requests"
        return None


class RampControl:
    """The ramp of one trial, which begins with the traffic, at step `step`. The journal is in `run_dir`.

    Weights that another program sets are recorded, stay as they are, and end the ramp.
    """

    def __init__(self, run_dir: Path, experiment: Experiment, *, judge: Judge, step: int = 0) -> None:
        self._candidate = Candidate(run_dir, experiment, judge)
        self._limits, self._control, self._weights = experiment.ramp, experiment.control.name, self._candidate.weights
        self._end_ns: int | None = None  # when the load ends, once the ramp has
        self._decided = 0  # the number of the last interim analysis that was decided by
        self._step = step

    @property
    def share(self) -> float:
        """Return the percentage of the traffic that the candidate has at this step."""
        return self._limits.steps[self._step]

    def poll(self, trial: Steered) -> None:
        """Decide what is due now, and have the splitter take it."""
        facts, weights = trial.context.facts, self._weights
        if facts.start_ns is None:
            return
        if weights.last is None:
            self._record("start", f"step {self._step + 1} of {len(self._limits.steps)}")
        assert weights.last is not None
        if self._end_ns is not None:
            if facts.ended is None and now_ns() >= self._end_ns:
                facts.ended = f"the ramp ended: {weights.last.action}, {weights.last.why}"
                trial.end_load(now_ns() + END_DELAY_NS)
            return
        self._sync(trial)
        if self._end_ns is not None or weights.last.action == "rollback":
            return  # decided once, whether or not the splitter has taken it
        # After the traffic nothing rolls an open step back.
        is_over = now_ns() >= facts.start_ns + round(facts.duration_s * 1e9) - _LAST_NS
        alarms = self._candidate.alarms(trial)
        if alarms or (is_over and self._limits.on_inconclusive == "rollback"):
            why = alarms[0].why if alarms else "the ramp ran out of time before the step was decided"
            self._act(trial, "rollback", why, cause_ns=alarms[0].at_ns if alarms else None)
        elif weights.due is None:
            self._decide(trial)
        if weights.due is not None:
            self._sync(trial)

    def _decide(self, trial: Steered) -> None:
        """Act on an interim analysis that is new and of the present weights.

        A step without interim analyses ends by its longest time: nothing about it is sure. The last step, which would
        be promoted by its time alone, waits.
        """
        candidate, limits = self._candidate, self._limits
        step_s = (now_ns() - self._weights.since_ns) / 1e9
        missing, number = candidate.missing(), candidate.interim["number"]
        if missing is None and number != self._decided:
            self._decided = number
            self._act(trial, *decide(candidate.standing, limits, step=self._step, step_s=step_s))
        elif candidate.silent_s and step_s >= limits.most_step_s and self._step < len(limits.steps) - 1:
            self._act(trial, limits.on_inconclusive, f"still open after {limits.most_step_s:g} s: {missing}")

    def _act(self, trial: Steered, action: Action, why: str, *, cause_ns: int | None = None) -> None:
        status, last = trial.context.status, self._weights.last
        if action in ("stay", "hold"):
            status.detail = f"{self.share:g} % to {self._candidate.name}: {why}"
        if action == "stay" or (last is not None and action == last.action == "hold"):
            return
        self._step += action == "advance"
        self._record(action, why, cause_ns=cause_ns)
        if action == "promoted":
            self._end_ns = now_ns()
        status.note(f"ramp: {action} at {self.share:g} %: {why}")

    def _record(self, action: str, why: str, *, cause_ns: int | None = None) -> None:
        share = 0 if action == "rollback" else round(self.share / 100.0 * WHOLE)
        weights = {self._control: WHOLE - share, self._candidate.name: share}
        self._weights.record(weights, action=action, why=why, step=self._step, cause_ns=cause_ns)

    def _sync(self, trial: Steered) -> None:
        """Have the splitter take what is due; one that does not answer is asked again. Weights that others have set
        stay as they are and end the ramp."""
        status, due = trial.context.status, self._weights.due
        try:
            change = self._weights.poll(trial.splitter)
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
        name = self._candidate.name
        status.detail = f"{100.0 * change.weights[name] / WHOLE:g} % of the traffic to {name}"
        status.note(status.detail)
        if change.action == "rollback":
            self._end_ns = now_ns() + _AFTER_NS
