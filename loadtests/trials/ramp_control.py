"""Moves the traffic of a trial to its candidate step by step, and back at once when something happens.

`analysis.judging.ramp` says what ends a step. A change that the splitter did not take is sent again until it does, or
until another program has set the weights.
"""

from __future__ import annotations

from pathlib import Path

from analysis.judging.ramp import Decision, decide
from analysis.records.weight_journal import WeightChange
from loadtests.experiments.model import Experiment
from loadtests.trials.candidate import Candidate
from loadtests.trials.steering import END_DELAY_NS, Judge, Steered
from loadtests.trials.weights import UNANSWERED, Splitter, WeightController, in_words
from servers.clock import now_ns

WHOLE = 10_000  # the sum of all weights, so that a step may have two decimals
_AFTER_NS = 10_000_000_000  # of traffic that goes on after a rollback, to show that the control serves it
_LAST_NS = 2_000_000_000  # before the traffic ends: what a rollback may take
_UNSEEN_NS = 120_000_000_000  # without a look, after which a step whose time is over does not wait for one


class RampControl:
    """The ramp of one trial, which begins with the traffic, at step `step`. The journal is in `run_dir`.

    Weights that another program sets are recorded, stay as they are, and end the ramp.
    """

    moves_weights = True

    def __init__(self, run_dir: Path, experiment: Experiment, *, judge: Judge, step: int = 0) -> None:
        self._limits, self._control, self._judge = experiment.ramp, experiment.control.name, judge
        self._candidate = Candidate(experiment.ramp, experiment.gates)
        self._weights = WeightController(run_dir, (self._control, self._candidate.name))
        self._end_ns: int | None = None  # when the load ends, once the ramp has
        self._looked = self._looked_ns = 0
        self._step = step

    @property
    def share(self) -> float:
        """The percentage of the traffic that the candidate has at this step."""
        return self._limits.steps[self._step]

    def poll(self, trial: Steered) -> None:
        """Decide what is due now, and have the splitter take it."""
        splitter = trial.splitter
        if splitter is None or trial.context.facts.start_ns is None:
            return
        if self._end_ns is not None:
            self._end(trial)
            return
        if self._weights.last is None:
            self._change(trial, "start", f"step {self._step + 1} of {len(self._limits.steps)}")
        self._tell(trial, splitter)
        assert self._weights.last is not None
        if self._end_ns is not None or self._weights.last.action == "rollback":
            return  # decided once, whether or not the splitter has taken it
        if (alarms := self._candidate.alarms(trial)) or self._is_over(trial):
            why = alarms[0].why if alarms else "the time of the ramp was over before the step was decided"
            self._act(trial, Decision(action="rollback", why=why), cause_ns=alarms[0].at_ns if alarms else None)
        else:
            self._watch(trial, splitter)
            if self._end_ns is None and self._weights.due is None and self._weights.held:
                self._decide(trial)
        self._tell(trial, splitter)

    def _is_over(self, trial: Steered) -> bool:
        """Whether the traffic ends in a moment, after which nothing rolls an open step back."""
        facts = trial.context.facts
        if self._limits.on_inconclusive != "rollback" or facts.start_ns is None:
            return False
        return now_ns() >= facts.start_ns + round(facts.duration_s * 1e9) - _LAST_NS

    def _decide(self, trial: Steered) -> None:
        """Act on an interim analysis that is new and was begun in this step."""
        look, candidate = self._judge.last(), self._candidate
        if look is None or int(look["number"]) == self._looked:
            self._decide_unseen(trial)
            return
        self._looked, self._looked_ns = int(look["number"]), now_ns()
        if int(look["at_ns"]) >= candidate.began_ns:  # an older one counts the requests of the step before
            self._act(trial, decide(candidate.standing(look, step=self._step), self._limits))

    def _decide_unseen(self, trial: Steered) -> None:
        """End a step without interim analyses by its longest time: nothing about it is sure. The last one, which would
        be promoted by its time alone, waits."""
        began_ns, limit_s = self._candidate.began_ns, self._limits.most_step_s
        unseen_ns = now_ns() - max(self._looked_ns, began_ns)
        is_last = self._step == len(self._limits.steps) - 1
        if is_last or unseen_ns < _UNSEEN_NS or (now_ns() - began_ns) / 1e9 < limit_s:
            return
        why = f"still open after {limit_s:g} s: there was no interim analysis for {unseen_ns / 1e9:.0f} s"
        self._act(trial, Decision(action=self._limits.on_inconclusive, why=why))

    def _act(self, trial: Steered, decision: Decision, *, cause_ns: int | None = None) -> None:
        weights, status = self._weights, trial.context.status
        if decision.action in ("stay", "hold"):
            if decision.action == "hold" and weights.last is not None and weights.last.action != "hold":
                weights.decide(action=decision.action, why=decision.why)
                status.note(f"ramp: held at {self.share:g} %: {decision.why}")
            status.detail = f"{self.share:g} % to {self._candidate.name}: {decision.why}"
            return
        if decision.action == "promoted":
            weights.decide(action=decision.action, why=decision.why)
            self._end_ns = now_ns()
        else:
            self._step += decision.action == "advance"
            self._change(trial, decision.action, decision.why, cause_ns=cause_ns)
        status.note(f"ramp: {decision.action}: {decision.why}")

    def _change(self, trial: Steered, action: str, why: str, *, cause_ns: int | None = None) -> None:
        """Record what the candidate is to have, and begin to count."""
        share = 0 if action == "rollback" else round(self.share / 100.0 * WHOLE)
        weights = {self._control: WHOLE - share, self._candidate.name: share}
        self._weights.set(weights, action=action, why=why, step=self._step, cause_ns=cause_ns)
        self._candidate.begin(trial)

    def _tell(self, trial: Steered, splitter: Splitter) -> None:
        """Have the splitter take what is due; one that does not answer is asked again."""
        status, due = trial.context.status, self._weights.due
        try:
            change = self._weights.tell(splitter)
        except UNANSWERED as error:
            status.detail = f"the weights are not changed yet: {error}"
            return
        if change is None or due is None:
            return
        if change.action != due.action:
            self._end_by_others(trial, change, f", and {due.action} was not done: {due.why}")
            return
        self._candidate.begin(trial)
        share = change.weights[self._candidate.name]
        status.detail = f"{100.0 * share / WHOLE:g} % of the traffic to {self._candidate.name}"
        status.note(status.detail)
        if change.action == "rollback":
            self._end_ns = now_ns() + _AFTER_NS

    def _watch(self, trial: Steered, splitter: Splitter) -> None:
        """End the ramp where others have set the weights, which stay as they are."""
        try:
            change = self._weights.watch(splitter)
        except UNANSWERED as error:
            trial.context.status.detail = f"the splitter does not answer: {error}"
            return
        if change is not None:
            self._end_by_others(trial, change)

    def _end_by_others(self, trial: Steered, change: WeightChange, undone: str = "") -> None:
        self._end_ns = now_ns()
        trial.context.status.note(f"ramp: another program set the weights to {in_words(change)}; the ramp ends{undone}")

    def _end(self, trial: Steered) -> None:
        """End the load some time after the ramp has ended."""
        facts = trial.context.facts
        if facts.ended is None and self._end_ns is not None and now_ns() >= self._end_ns:
            assert self._weights.last is not None
            facts.ended = f"the ramp ended: {self._weights.last.action}, {self._weights.last.why}"
            trial.end_load(now_ns() + END_DELAY_NS)
