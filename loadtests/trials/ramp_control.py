"""Moves the traffic of a trial to its candidate step by step, and back at once when something happens.

What a step is left by, `analysis.judging.ramp_decision` says. A change of weights is written down before the splitter
is told, so that the candidate never has more than the last line allows, and again once the splitter has taken it. One
that the splitter did not take is told again until it does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from analysis.judging.alarms import Alarm, burst_alarms, compile_alarms, death_alarms
from analysis.judging.gates import FAIL, PASS
from analysis.judging.ramp_decision import Decision, Standing, decide
from analysis.records.weight_journal import BY_HAND, WeightChange, append
from analysis.settings.gate_limits import GateLimits
from analysis.settings.ramp_limits import RampLimits
from loadtests.trials.early_end import END_DELAY_NS
from loadtests.trials.judge import Judge
from loadtests.trials.splitters import UNANSWERED, Splitter
from loadtests.trials.steering import Steered
from servers.clock import now_ns

WHOLE = 10_000  # the sum of all weights, so that a step may have two decimals
_AFTER_NS = 10_000_000_000  # of traffic that goes on after a rollback, to show that the control serves it
_READ_NS = 1_000_000_000  # between two readings of the weights in force
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
        self._run_dir = run_dir
        self._limits, self._gates = limits, gates
        self._control, self._candidate = control, limits.candidate
        self._judge = judge
        self._began_ns = 0
        self._end_ns: int | None = None  # when the load ends, once the ramp has
        self._looked = self._looked_ns = 0
        self._failed_before = self._finished_before = 0
        self._step = step
        self._last: WeightChange | None = None
        self._due: WeightChange | None = None  # written down, and not taken by the splitter yet
        self._read_ns = 0
        self._held = True  # by the last reading

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
        if self._last is None:
            self._change(trial, "start", f"step {self._step + 1} of {len(self._limits.steps)}")
        self._tell(trial, splitter)
        assert self._last is not None
        if self._last.action == "rollback":
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
        if self._due is not None or not self._holds(trial, splitter, self._last):
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
        if decision.action == "hold" and self._last is not None and self._last.action != "hold":
            self._last = self._record(decision.action, decision.why)
            trial.context.status.note(f"ramp: held at {self.share:g} %: {decision.why}")
        if decision.action in ("stay", "hold"):
            trial.context.status.detail = f"{self.share:g} % to {self._candidate}: {decision.why}"
            return
        if decision.action == "advance":
            self._step += 1
        if decision.action == "promoted":
            self._last = self._record(decision.action, decision.why, cause_ns=cause_ns)
        else:
            self._change(trial, decision.action, decision.why, cause_ns=cause_ns)
        trial.context.status.note(f"ramp: {decision.action}: {decision.why}")
        if decision.action == "promoted":
            self._end_ns = now_ns()

    def _change(self, trial: Steered, action: str, why: str, *, cause_ns: int | None = None) -> None:
        """The journal says what the candidate is to have, and the splitter is to be told."""
        self._last = self._due = self._record(action, why, cause_ns=cause_ns)
        self._began_ns = now_ns()
        load = trial.context.status.load.arms.get(self._candidate)
        if load is not None:
            self._failed_before, self._finished_before = load.failed, load.finished

    def _tell(self, trial: Steered, splitter: Splitter) -> None:
        """What is due is done, and the journal says since when. A splitter that does not answer is told again."""
        due = self._due
        if due is None:
            return
        status = trial.context.status
        try:
            splitter.reweight(due.weights)
        except UNANSWERED as error:
            status.detail = f"the weights are not changed yet: {error}"
            return
        self._due, self._last = None, replace(due, done_ns=now_ns())
        self._read_ns = self._began_ns = now_ns()
        self._held = True
        append(self._run_dir, self._last)
        share = f"{100.0 * due.weights[self._candidate] / WHOLE:g} % of the traffic to {self._candidate}"
        status.detail = share
        status.note(share)
        if due.action == "rollback":
            self._end_ns = now_ns() + _AFTER_NS

    def _holds(self, trial: Steered, splitter: Splitter, last: WeightChange) -> bool:
        """Whether the splitter still has the weights that it was told, by the last reading.

        What somebody else has set is written down, and the ramp leaves it so and ends. Weights that a splitter has
        forgotten because it started anew are set again.
        """
        before_ns = self._read_ns
        if now_ns() - before_ns < _READ_NS:
            return self._held
        read = self._read(trial, splitter)
        self._held = read is not None and _gives(read[0], last.weights)
        if read is None or self._held:
            return self._held
        weights, up_s = read
        if _started_since(last, up_s):
            self._change(trial, "again", "the splitter has started anew, with the weights of its configuration")
        else:
            self._yield(trial, weights, since_ns=before_ns or last.done_ns or now_ns())
        return False

    def _read(self, trial: Steered, splitter: Splitter) -> tuple[Mapping[str, int], float] | None:
        """The weights in force and for how long the splitter has kept what it was told; None where it does not say."""
        self._read_ns = now_ns()
        try:
            return splitter.weights(), splitter.up_s()
        except UNANSWERED as error:
            trial.context.status.detail = f"the splitter does not answer: {error}"
            return None

    def _yield(self, trial: Steered, weights: Mapping[str, int], *, since_ns: int) -> None:
        """Somebody else has set the weights, at `since_ns` not yet: the ramp leaves them so and ends."""
        shares = ", ".join(f"{arm}={weight}" for arm, weight in weights.items())
        self._last = WeightChange(
            at_ns=since_ns,
            weights=dict(weights),
            why=f"somebody else set the weights to {shares}",
            action=BY_HAND,
            step=self._step,
            done_ns=now_ns(),
        )
        append(self._run_dir, self._last)
        self._end_ns = now_ns()
        trial.context.status.note(f"ramp: {self._last.why}; it leaves them so and ends")

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


def _gives(weights: Mapping[str, int], change: Mapping[str, int]) -> bool:
    """Whether a splitter with the weights gives the arms of a change what it says."""
    return all(weights.get(arm, 0) == weight for arm, weight in change.items())


def _started_since(change: WeightChange, up_s: float) -> bool:
    """Whether a splitter that has been up for so long started after it was told the change."""
    return up_s < (now_ns() - (change.done_ns or change.at_ns)) / 1e9
