"""Run the search for a frontier: trial after trial with one fresh start of one arm each.

Which arm comes next, and with how many steps, `tailgate.analysis.frontier.search` decides from the records so far and
from the time that is left. What it decided stands in frontier.json, written after every trial, so that a run that is
cut off says as much as one that ended.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from statistics import mean

from tailgate.analysis.frontier.holdings import Frontier, frontier_of
from tailgate.analysis.frontier.search import FEWEST_STEPS, Budget, Left, Turn, first_turns, fitted, next_round
from tailgate.analysis.judging.load_steps import FEWEST_STARTS, Step
from tailgate.analysis.records.documents import write_document
from tailgate.loadtests.experiments.model import Experiment
from tailgate.loadtests.trials.context import BudgetSpentError, RunError, StartError, TrialContext
from tailgate.loadtests.trials.environment import has_requests
from tailgate.loadtests.trials.rate_search import recorded_steps
from tailgate.loadtests.trials.run import ARM_COMMAND, Orchestrator
from tailgate.loadtests.trials.served_parity import Answers
from tailgate.loadtests.trials.status import Status
from tailgate.loadtests.trials.trial_schedule import draw, in_trial
from tailgate.servers.clock import now_ns
from tailgate.servers.complaint import ConfigError

SCHEMA = 1
# Until a start was seen, in seconds.
_EAGER_START_S, _COMPILED_START_S, _AROUND_S = 10.0, 60.0, 12.0


class FrontierSearch(Orchestrator):
    """Run one experiment as a search that takes `budget_s` from now on."""

    def __init__(
        self,
        experiment: Experiment,
        *,
        out: Path,
        budget_s: float,
        status: Status | None = None,
        arm_command: Sequence[str] = ARM_COMMAND,
    ) -> None:
        super().__init__(experiment, out=out, status=status, arm_command=arm_command)
        self._budget_s = budget_s
        self._starts_s: dict[str, list[float]] = {}  # what the starts of each arm took until now
        self._around_s: list[float] = []  # what trials took in addition to their start and their steps
        self._left: list[Left] = []
        self._trials = 0  # that were begun
        self._expected: dict[str, Answers] = {}  # what the control answered in an earlier trial
        self._began_s = time.monotonic()

    @property
    def spent_s(self) -> float:
        """Return how long the search has taken."""
        return time.monotonic() - self._began_s

    @property
    def _why_spent(self) -> str:
        return f"--budget of {self._budget_s / 60.0:.3g}m was spent before an arm took any load: give more"

    # --- What is decided ----------------------------------------------------------------------------------------------

    def _run_trials(self, run_dir: Path) -> None:
        """Search until nothing is open any more, or no time is left. Raises BudgetSpentError without any request."""
        stop = "it was interrupted"
        try:
            stop = self._search(run_dir)
        except BudgetSpentError:
            stop = "the budget was spent"
        except RunError as error:
            stop = str(error)
            raise
        finally:
            self._write(run_dir, stop)
        if not has_requests(run_dir):
            raise BudgetSpentError(self._why_spent)
        self.status.note(f"the search ends: {stop}")

    def _search(self, run_dir: Path) -> str:
        """Take turns until nothing is open or no time is left; return which, in words."""
        self._write(run_dir, "")
        self._take(first_turns(self._arms, self._start_s, self._budget), run_dir)
        for number in count(1):
            decided = next_round(
                self._frontier(recorded_steps(run_dir)),
                start_s=self._start_s,
                budget=self._budget,
                spent_s=self.spent_s,
                number=number,
                before=self._left,
            )
            self._drop_arms(decided.left)
            before = self._trials
            self._take(decided.turns, run_dir)
            if self._trials == before:
                break
        return decided.stop or "no start fits into the time that is left"

    @property
    def _arms(self) -> tuple[str, ...]:
        """Return all arms, the control first."""
        control = self.experiment.control.name
        return (control, *(arm.name for arm in self.experiment.arms if arm.name != control))

    @property
    def _start_s(self) -> dict[str, float]:
        """Return what a start of each arm takes: the mean of those seen, or a guess."""
        guessed = {
            arm.name: _COMPILED_START_S if arm.compile.enabled else _EAGER_START_S
            for arm in self.experiment.managed_arms
        }
        return guessed | {arm: mean(seconds) for arm, seconds in self._starts_s.items()}

    @property
    def _budget(self) -> Budget:
        traffic = self.experiment.traffic
        around_s = mean(self._around_s) if self._around_s else _AROUND_S
        return Budget(
            total_s=self._budget_s,
            step_s=traffic.step_s,
            steps=traffic.saturation_steps,
            around_s=around_s + traffic.rampup_s,
        )

    def _frontier(self, known: Sequence[Step]) -> Frontier:
        replicas = {arm.name: arm.replicas for arm in self.experiment.arms}
        steps = [replace(step, rate=step.rate / replicas[step.arm]) for step in known]
        return frontier_of(steps, self._arms, alpha=self.experiment.gates.alpha)

    def _drop_arms(self, left: Iterable[Left]) -> None:
        for item in left:
            self._left.append(item)
            self.status.note(f"{item.arm} {item.reason}")

    # --- What is done -------------------------------------------------------------------------------------------------

    def _take(self, turns: Sequence[Turn], run_dir: Path) -> None:
        """Take the turns one after the other, as far as time is left, but for those of arms that have left."""
        for place, turn in enumerate(rounds := in_rounds(turns)):
            self.status.trials = self._trials + len(rounds) - place
            left = {item.arm for item in self._left}
            if turn.arm not in left and (fits := self._fitted(turn)) is not None:
                self._start(fits, run_dir)

    def _fitted(self, turn: Turn) -> Turn | None:
        """Return the turn with the steps that there is time for; None where too little is left to say anything."""
        fit = partial(fitted, budget=self._budget, left_s=self._budget_s - self.spent_s)
        fits = fit(turn, start_s=self._start_s[turn.arm])
        if fits is None and turn.arm not in self._starts_s:
            # A guess keeps no arm from being tried.
            fits = fit(replace(turn, steps=FEWEST_STEPS), start_s=0.0)
        return fits

    def _start(self, turn: Turn, run_dir: Path) -> None:
        """Record one trial with a fresh start of the turn's arm, or drop the arm if it does not start."""
        self._check()
        self._trials += 1
        number, arm = self._trials, turn.arm
        traffic = self.experiment.traffic
        traffic = traffic.replace(duration_s=traffic.rampup_s + turn.steps * traffic.step_s)
        part = in_trial(self.experiment, number).only([arm]).model_copy(update={"traffic": traffic})
        rates = self._next_rates(run_dir, [arm], turn.steps)
        schedule = draw(part, self.source, number, rates)
        context = self._context(part, number, run_dir, schedule)
        self.status.trial, self.status.duration_s = number, traffic.duration_s
        self.status.trials = max(number, self.status.trials)
        self.status.note(f"trial {number}: {arm} at {', '.join(f'{rate:g}' for rate in rates)} requests/s")
        began_ns, began_s = now_ns(), self.spent_s
        try:
            self._run_trial(context, schedule, self._expected)
        except BudgetSpentError:
            context.facts.ended = "the budget was spent"
            raise
        except RunError as error:
            reason = self._why_left(error, context)
            if reason is None:
                raise
            context.facts.ended = f"{arm} {reason}"
            self._drop_arms([Left(arm=arm, reason=reason)])
        finally:
            if context.facts.ended is not None:
                context.keep_facts()
            if context.facts.ready_ns is not None:
                start_s = (context.facts.ready_ns - began_ns) / 1e9
                self._starts_s.setdefault(arm, []).append(start_s)
                if context.facts.complete:
                    self._around_s.append(max(0.0, self.spent_s - began_s - start_s - traffic.duration_s))
        self._write(run_dir, "")

    def _why_left(self, error: RunError, context: TrialContext) -> str | None:
        """Return why the trial's arm leaves the search; None where the run broke, or its control did."""
        if context.experiment.arms[0].name == self.experiment.control.name:
            return None
        if isinstance(error, StartError):
            return f"did not start: {error}"
        return "died under load" if context.facts.deaths else None

    def _write(self, run_dir: Path, stop: str) -> None:
        """Write what was decided until now to frontier.json."""
        document = {
            "schema": SCHEMA,
            "budget_s": self._budget_s,
            "spent_s": self.spent_s,
            "stop": stop,
            "left": [{"arm": item.arm, "reason": item.reason} for item in self._left],
        }
        write_document(run_dir / "frontier.json", document, indent=2)

    def _check(self) -> None:
        super()._check()
        if self.spent_s >= self._budget_s:
            raise BudgetSpentError(self._why_spent)


def check_budget(experiment: Experiment, budget_s: float) -> None:
    """Raise ConfigError unless the budget is enough for the fewest starts of every arm with the fewest steps, if
    starts took no time."""
    traffic = experiment.traffic
    least_s = FEWEST_STARTS * len(experiment.arms) * (traffic.rampup_s + FEWEST_STEPS * traffic.step_s)
    if budget_s < least_s:
        raise ConfigError(
            f"--budget is {budget_s / 60:.3g}m, but two starts of {len(experiment.arms)} arms with {FEWEST_STEPS} "
            f"steps of {traffic.step_s:g} s take {least_s / 60:.3g}m and their warm-up: give more, fewer arms or a "
            "shorter traffic.step_s"
        )


def in_rounds(turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns with the starts of each arm spread out: the first of every arm, then the second of every arm."""
    arms = [turn.arm for turn in turns]
    return [turns[place] for place in sorted(range(len(turns)), key=lambda place: arms[:place].count(arms[place]))]
