"""Moves the traffic of a trial to its candidate step by step, and back at once when something happens.

`analysis.judging.ramp` says what ends a step. A change that the splitter did not take is sent again until it
does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from analysis.judging.alarms import Alarm, burst_alarms, compile_alarms, death_alarms
from analysis.judging.gates import FAIL, PASS
from analysis.judging.ramp import Decision, Standing, decide
from analysis.settings.gate_limits import GateLimits
from analysis.settings.ramp_limits import RampLimits
from loadtests.trials.early_end import END_DELAY_NS
from loadtests.trials.judge import Judge
from loadtests.trials.steering import Steered
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

    def __init__(
        self,
        run_dir: Path,
        *,
        limits: RampLimits,
        gates: GateLimits,
        control: str,
        judge: Judge,
        step: int = 0,
    ) -> None:
        self._limits, self._gates = limits, gates
        self._control, self._candidate = control, limits.candidate
        self._judge = judge
        self._weights = WeightController(run_dir, (control, limits.candidate))
        self._began_ns = 0
        self._end_ns: int | None = None  # when the load ends, once the ramp has
        self._looked = self._looked_ns = 0
        self._failed_before = self._finished_before = 0
        self._step = step

    @property
    def share(self) -> float:
        """The percentage of the traffic that the candidate has at this step."""
        return self._limits.steps[self._step]

    def poll(self, trial: Steered) -> None:
        """The weights are as they should be now."""
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
        if self._weights.last.action == "rollback":
            return  # decided once, whether or not the splitter has taken it
        alarms = self._alarms(trial)
        if alarms:
            self._act(trial, Decision(action="rollback", why=alarms[0].why), cause_ns=alarms[0].at_ns)
            self._tell(trial, splitter)
            return
        if self._limits.on_inconclusive == "rollback" and self._is_over(trial):
            why = "the time of the ramp was over before the step was decided"
            self._act(trial, Decision(action="rollback", why=why))
            self._tell(trial, splitter)
            return
        self._watch(trial, splitter)
        if self._end_ns is not None or self._weights.due is not None or not self._weights.held:
            return
        look = self._judge.last()
        if look is None or int(look["number"]) == self._looked:
            self._act_unseen(trial, splitter)
            return
        self._looked, self._looked_ns = int(look["number"]), now_ns()
        if int(look["at_ns"]) < self._began_ns:
            return  # it was begun before the step, and counts the requests of the one before
        self._act(trial, decide(self._standing(look), self._limits))
        self._tell(trial, splitter)

    def _is_over(self, trial: Steered) -> bool:
        """Whether the traffic ends in a moment, after which nobody moves the weights."""
        facts = trial.context.facts
        return facts.start_ns is not None and now_ns() >= facts.start_ns + round(facts.duration_s * 1e9) - _LAST_NS

    def _standing(self, look: Mapping[str, Any]) -> Standing:
        outlook = look["arms"][self._candidate]
        step = look.get("step") or {}
        failed = outlook["reason"] if outlook["decision"] == FAIL else step.get("failed")
        return Standing(
            step=self._step,
            step_s=(now_ns() - self._began_ns) / 1e9,
            failed=failed,
            safe=bool(step.get("safe")),
            passed=outlook["decision"] == PASS,
            requests=int(step.get("requests") or 0),
            uneven=step.get("uneven"),
        )

    def _act_unseen(self, trial: Steered, splitter: Splitter) -> None:
        """A step that nobody looks at ends by its longest time all the same: nothing about it is sure. The last one,
        which would be promoted by its time alone, waits."""
        unseen_ns, step_s = now_ns() - max(self._looked_ns, self._began_ns), (now_ns() - self._began_ns) / 1e9
        is_last = self._step == len(self._limits.steps) - 1
        if is_last or unseen_ns < _UNSEEN_NS or step_s < self._limits.most_step_s:
            return
        why = f"nobody has looked at the run for {unseen_ns / 1e9:.0f} s"
        standing = Standing(step=self._step, step_s=step_s, requests=self._limits.least_requests, uneven=why)
        self._act(trial, decide(standing, self._limits))
        self._tell(trial, splitter)

    def _alarms(self, trial: Steered) -> list[Alarm]:
        """What happened to the candidate while it served, in order."""
        limits, candidate = self._limits, self._candidate
        under_way = [compile.so_far(now_ns()) for compile in trial.collector.compiling]
        found = compile_alarms(
            candidate,
            [*trial.collector.served_compiles, *under_way],
            stall_limit_s=limits.stall_limit_s,
            max_recompiles=self._gates.max_recompiles,
        )
        found += death_alarms(candidate, trial.context.facts.deaths, now_ns=now_ns())
        if (load := trial.context.status.load.arms.get(candidate)) is not None:
            found += burst_alarms(
                candidate,
                failed=load.failed - self._failed_before,
                finished=load.finished - self._finished_before,
                now_ns=now_ns(),
                meanwhile="in this step",
            )
        return sorted(found)

    def _act(self, trial: Steered, decision: Decision, *, cause_ns: int | None = None) -> None:
        weights = self._weights
        if decision.action == "hold" and weights.last is not None and weights.last.action != "hold":
            weights.decide(action=decision.action, why=decision.why)
            trial.context.status.note(f"ramp: held at {self.share:g} %: {decision.why}")
        if decision.action in ("stay", "hold"):
            trial.context.status.detail = f"{self.share:g} % to {self._candidate}: {decision.why}"
            return
        if decision.action == "advance":
            self._step += 1
        if decision.action == "promoted":
            weights.decide(action=decision.action, why=decision.why, cause_ns=cause_ns)
            self._end_ns = now_ns()
        else:
            self._change(trial, decision.action, decision.why, cause_ns=cause_ns)
        trial.context.status.note(f"ramp: {decision.action}: {decision.why}")

    def _change(self, trial: Steered, action: str, why: str, *, cause_ns: int | None = None) -> None:
        """Record what the candidate is to have, and begin to count."""
        share = 0 if action == "rollback" else round(self.share / 100.0 * WHOLE)
        weights = {self._control: WHOLE - share, self._candidate: share}
        self._weights.set(weights, action=action, why=why, step=self._step, cause_ns=cause_ns)
        self._began_ns = now_ns()
        load = trial.context.status.load.arms.get(self._candidate)
        if load is not None:
            self._failed_before, self._finished_before = load.failed, load.finished

    def _tell(self, trial: Steered, splitter: Splitter) -> None:
        """Have the splitter take what is due; one that does not answer is asked again."""
        status = trial.context.status
        try:
            if not self._weights.tell(splitter):
                return
        except UNANSWERED as error:
            status.detail = f"the weights are not changed yet: {error}"
            return
        assert self._weights.last is not None
        self._began_ns = now_ns()
        share = self._weights.last.weights[self._candidate]
        status.detail = f"{100.0 * share / WHOLE:g} % of the traffic to {self._candidate}"
        status.note(status.detail)
        if self._weights.last.action == "rollback":
            self._end_ns = now_ns() + _AFTER_NS

    def _watch(self, trial: Steered, splitter: Splitter) -> None:
        """End the ramp where others have set the weights, which stay as they are."""
        status = trial.context.status
        try:
            change = self._weights.watch(splitter)
        except UNANSWERED as error:
            status.detail = f"the splitter does not answer: {error}"
            return
        if change is not None:
            self._end_ns = now_ns()
            status.note(f"ramp: another program set the weights to {in_words(change)}; the ramp ends")

    def _end(self, trial: Steered) -> None:
        """The load ends some time after the ramp has."""
        facts = trial.context.facts
        if facts.ended is None and self._end_ns is not None and now_ns() >= self._end_ns:
            assert self._weights.last is not None
            facts.ended = f"the ramp ended: {self._weights.last.action}, {self._weights.last.why}"
            trial.end_load(now_ns() + END_DELAY_NS)
