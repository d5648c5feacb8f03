"""Runs the search for a frontier: trial after trial of one arm each, or of as many as have devices of their own.

Which arm comes next, and with how many steps, `analysis.frontier.search` decides from the records so far and from the
time that is left. What it decided stands in frontier.json, written after every trial, so that a run that is cut off
says as much as one that ended. Where a live page is served, search.jsonl gets a line before every trial, and one at the
end: what is tried, and what each arm holds until then.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from analysis.frontier.holdings import Frontier, frontier_of
from analysis.frontier.search import (
    FEWEST_STEPS,
    Budget,
    Left,
    Turn,
    first_turns,
    fitted,
    least_s,
    next_round,
)
from analysis.judging.load_steps import Step, steps_of, to_search
from analysis.records.documents import write_document
from analysis.records.run_records import read_run
from analysis.records.tables import RecordError
from analysis.run.run import Run
from analysis.run.startup import startup_row
from loadtests.experiments.model import Experiment
from loadtests.monitor.gpus import device_name
from loadtests.traffic.rate_steps import closer
from loadtests.trials.context import BudgetSpentError, RunError, StartError, TrialContext
from loadtests.trials.live_page import LivePage
from loadtests.trials.run import ARM_COMMAND, Orchestrator, RunOutcome
from loadtests.trials.served_parity import ExpectedAnswers
from loadtests.trials.status import Status
from loadtests.trials.trial_schedule import TrialSchedules, in_trial
from servers.clock import now_ns
from servers.fields import ConfigError

SCHEMA = 1
# Until a start was seen, in seconds.
_EAGER_START_S, _COMPILED_START_S, _AROUND_S = 10.0, 60.0, 12.0
_LEAST_READY_S = 1.0


@dataclass(slots=True)
class _Seen:
    """What starts took until now."""

    start_s: dict[str, list[float]] = field(default_factory=dict)
    around_s: list[float] = field(default_factory=list)

    def start_of(self, arm: str, guess: float) -> float:
        """The mean start of the arm, or what is guessed."""
        known = self.start_s.get(arm)
        return sum(known) / len(known) if known else guess

    @property
    def around(self) -> float:
        """The mean of what a trial takes beside its start and its steps."""
        return sum(self.around_s) / len(self.around_s) if self.around_s else _AROUND_S


class FrontierSearch(Orchestrator):
    """Runs one experiment as a search that takes `budget_s`, from `began` on: by default from `run`. `dropped` are arms
    that were left out beforehand.

    `after` are earlier searches of it, which are gone on with: their steps count, and what their starts took.
    `gated`: somebody asks for the verdicts of the gates. `clock` tells monotonic seconds.
    """

    def __init__(
        self,
        experiment: Experiment,
        *,
        out: Path,
        budget_s: float,
        dropped: Sequence[Left] = (),
        after: Sequence[Path] = (),
        gated: bool = False,
        status: Status | None = None,
        page: LivePage | None = None,
        arm_command: Sequence[str] = ARM_COMMAND,
        metrics: bool = False,
        clock: Callable[[], float] = time.monotonic,
        began: float | None = None,
    ) -> None:
        super().__init__(experiment, out=out, status=status, page=page, arm_command=arm_command, metrics=metrics)
        self._clock = clock
        self._budget_s = budget_s
        self._after = tuple(after)
        self._earlier = earlier_steps(after)
        self._gated = gated
        self._seen = _Seen(start_s=earlier_starts(after))
        self._left = list(dropped)
        self._turns: list[dict[str, Any]] = []
        self._trials = 0
        self._expected = ExpectedAnswers()
        self._began = began
        self._parity_s: float | None = None

    @property
    def spent_s(self) -> float:
        """How long the search has taken."""
        return 0.0 if self._began is None else self._clock() - self._began

    @property
    def left_s(self) -> float:
        """How much of the budget is left."""
        return self._budget_s - self.spent_s

    def run(self) -> RunOutcome:
        """As for any run; the time of the search has begun."""
        self._began = self._clock() if self._began is None else self._began
        return super().run()

    def _measure_parity(self, run_dir: Path) -> dict[str, Any]:
        """As for any run, within the budget. RunError where that ended first."""
        began = self._clock()
        try:
            return super()._measure_parity(run_dir)
        except BudgetSpentError:
            raise RunError(
                f"the budget of {self._budget_s / 60.0:g} minutes was spent before parity was measured: give more "
                "--budget, or set parity.full = false"
            ) from None
        finally:
            self._parity_s = self._clock() - began
            minutes = f"{self._parity_s / 60.0:.3g} of the {self._budget_s / 60.0:g} minutes"
            self.status.note(f"parity took {minutes} of the budget")

    # --- What is decided ----------------------------------------------------------------------------------------------

    def _run_trials(self, run_dir: Path) -> None:
        """The search has ended: nothing is open any more, or no time is left."""
        stop = "it was interrupted"
        try:
            stop = self._search(run_dir, self.schedules)
        except BudgetSpentError:
            stop = "the budget was spent"
        except RunError as error:
            stop = str(error)
            raise
        finally:
            self._write(run_dir, stop)
            self._show(run_dir, stop=stop)
        self.status.note(f"the search ends: {stop}")

    def _search(self, run_dir: Path, schedules: TrialSchedules) -> str:
        """Why the search ended, in words."""
        self._write(run_dir, "")
        # The control is started on every machine: what the others answer there is held to its answers.
        known = {step.arm for step in self._earlier} - {self.experiment.control.name}
        turns = first_turns(self._arms, self._start_s, self._budget)
        self._take([turn for turn in turns if turn.arm not in known], run_dir, schedules)
        number = 1
        while True:
            decided = next_round(
                self._frontier(run_dir),
                start_s=self._start_s,
                budget=self._budget,
                spent_s=self.spent_s,
                number=number,
                before=self._left,
            )
            self._let_go(decided.left)
            self._write(run_dir, "")
            taken = self._trials
            self._take(decided.turns, run_dir, schedules)
            if self._trials == taken:
                return decided.stop or "no start fits into the time that is left"
            number += 1

    @property
    def _arms(self) -> tuple[str, ...]:
        """All arms, the control first."""
        control = self.experiment.control.name
        return (control, *(arm.name for arm in self.experiment.arms if arm.name != control))

    @property
    def _start_s(self) -> dict[str, float]:
        """What a start of each arm takes, as seen, or as the starts of arms like it, or as guessed."""
        compiled = {arm.name: arm.config.compile.enabled for arm in self.experiment.own_arms}
        guess = {}
        for kind, otherwise in ((False, _EAGER_START_S), (True, _COMPILED_START_S)):
            alike = [self._seen.start_of(arm, 0.0) for arm in self._seen.start_s if compiled[arm] is kind]
            guess[kind] = sum(alike) / len(alike) if alike else otherwise
        return {arm: self._seen.start_of(arm, guess[compiled[arm]]) for arm in self._arms}

    @property
    def _budget(self) -> Budget:
        traffic = self.experiment.traffic
        return Budget(
            total_s=self._budget_s,
            step_s=traffic.step_s,
            steps=traffic.saturation_steps,
            around_s=self._seen.around + traffic.rampup_s,
            lanes=lanes_of(self.experiment),
        )

    @property
    def _failed(self) -> set[str]:
        return {row["arm"] for turn in self._turns for row in turn["failed"]}

    def _frontier(self, run_dir: Path) -> Frontier:
        return self._frontier_of(self._steps(run_dir))

    def _frontier_of(self, known: Sequence[Step]) -> Frontier:
        steps = [replace(step, rate=step.rate / self._replicas(step.arm)) for step in known]
        return frontier_of(steps, self._arms, alpha=self.experiment.gates.alpha)

    def _steps(self, run_dir: Path) -> list[Step]:
        return [*self._earlier, *recorded_steps(run_dir)]

    def _replicas(self, arm: str) -> int:
        return next(item.replicas for item in self.experiment.arms if item.name == arm)

    def _let_go(self, left: Iterable[Left]) -> None:
        known = {item.arm for item in self._left}
        for item in left:
            if item.arm not in known:
                self._left.append(item)
                self.status.note(f"{item.arm} {item.reason}")

    # --- What is done -------------------------------------------------------------------------------------------------

    def _take(self, turns: Sequence[Turn], run_dir: Path, schedules: TrialSchedules) -> None:
        """The turns were taken one after the other, as far as time is left, but for those of arms that do not start."""
        waiting = in_laps(turns)
        while waiting:
            group = together(waiting, devices_of_arms(self.experiment)) if self._budget.lanes > 1 else waiting[:1]
            waiting = [turn for turn in waiting if not any(turn is other for other in group)]
            self.status.trials = self._trials + 1 + len(waiting)
            if taken := self._fitted([turn for turn in group if turn.arm not in self._failed]):
                self._take_together(taken, run_dir, schedules)

    def _fitted(self, turns: Sequence[Turn]) -> list[Turn]:
        """The turns of one trial with the steps that there is time for after the longest start of them; without those
        for which too little time is left for a start that says anything."""
        fitting: list[Turn] = []
        longest_s = 0.0
        for turn in turns:
            start_s = self._start_s[turn.arm]
            if self._fits(turn, start_s) is None and turn.arm not in self._seen.start_s:
                # A guess keeps no arm from being tried.
                turn, start_s = replace(turn, steps=FEWEST_STEPS), 0.0
            if self._fits(turn, start_s) is not None:
                fitting.append(turn)
                longest_s = max(longest_s, start_s)
        return [fits for turn in fitting if (fits := self._fits(turn, longest_s)) is not None]

    def _fits(self, turn: Turn, start_s: float) -> Turn | None:
        return fitted(turn, start_s=start_s, budget=self._budget, left_s=self.left_s)

    def _take_together(self, turns: Sequence[Turn], run_dir: Path, schedules: TrialSchedules) -> None:
        """One trial with a fresh start of each turn's arm was recorded, or its arm let go where it did not start."""
        self._check()
        self._trials += 1
        number, names = self._trials, [turn.arm for turn in turns]
        steps = max(turn.steps for turn in turns)
        part = self._part(in_trial(self.experiment, number), names, steps)
        known = self._steps(run_dir)
        rates = self._rates(known, names, steps)
        schedule = replace(schedules, experiment=part).draw(number, rates)
        context = self._context(part, number, run_dir, schedule)
        self.status.trial = number
        self.status.trials = max(number, self.status.trials)
        self.status.duration_s = part.traffic.duration_s
        tried = rates or [step["rate"] for step in schedule.steps]
        at = ", ".join(f"{rate:g}" for rate in tried)
        self.status.note(f"trial {number}: {' and '.join(names)} at {at} requests/s")
        self._show(run_dir, known, arms=names, rates=tried)
        began_ns, began = now_ns(), self._clock()
        failed: list[dict[str, str]] = []
        try:
            self._run_trial(context, schedule, self._expected)
        except RunError as error:
            failed = self._failures(error, context)
            if not failed:
                raise
            self._end(context, f"{failed[0]['arm']} {failed[0]['reason']}")
        except BudgetSpentError:
            self._end(context, "the budget was spent")
            raise
        finally:
            wall = self._clock() - began
            ready = context.facts.ready
            if len(ready) == len(names):
                started = {arm: (ready[arm] - began_ns) / 1e9 for arm in names}
                for arm, seconds in started.items():
                    self._seen.start_s.setdefault(arm, []).append(seconds)
                if context.facts.complete:
                    around = wall - max(started.values()) - part.traffic.duration_s
                    self._seen.around_s.append(max(0.0, around))
            self._turns.append({"trial": number, "arms": names, "steps": steps, "seconds": wall, "failed": failed})
        self._let_go(Left(arm=row["arm"], reason=row["reason"]) for row in failed)
        self._write(run_dir, "")

    def _part(self, experiment: Experiment, names: Sequence[str], steps: int) -> Experiment:
        """The experiment with these arms alone, and so many steps; an arm may take as long to start as time is left."""
        traffic = experiment.traffic
        steps_s = steps * traffic.step_s
        ready_s = max(_LEAST_READY_S, self.left_s - self._seen.around - FEWEST_STEPS * traffic.step_s)
        return replace(
            experiment.only(names),
            traffic=replace(traffic, duration_s=traffic.rampup_s + steps_s),
            trials=replace(experiment.trials, ready_timeout_s=min(experiment.trials.ready_timeout_s, ready_s)),
        )

    def _rates(self, known: Sequence[Step], names: Sequence[str], steps: int) -> tuple[float, ...]:
        """The rates around what is open of these arms; empty for the whole staircase, where nothing is known of one."""
        low, high = self.experiment.traffic.step_rates
        around = [to_search(arm, known) for arm in names]
        return () if (None, None) in around else closer(around, steps, low=low, high=high)

    def _failures(self, error: RunError, context: TrialContext) -> list[dict[str, str]]:
        """The arms that did not start, or died, each with why; empty where the run itself broke, or its control did."""
        if isinstance(error, StartError):
            failed = [{"arm": error.arm, "reason": f"did not start: {error}"}]
        else:
            dead = dict.fromkeys(str(death["arm"]) for death in context.facts.deaths)
            failed = [{"arm": arm, "reason": "died under load"} for arm in dead]
        return [] if any(row["arm"] == self.experiment.control.name for row in failed) else failed

    def _end(self, context: TrialContext, why: str) -> None:
        context.facts.ended = why
        context.keep_facts()

    def _write(self, run_dir: Path, stop: str) -> None:
        """frontier.json says what was decided until now."""
        document = {
            "schema": SCHEMA,
            "budget_s": self._budget_s,
            "spent_s": self.spent_s,
            "parity_s": self._parity_s,
            "gated": self._gated,
            "after": [path.resolve().name for path in self._after],
            "stop": stop,
            "turns": self._turns,
            "left": [{"arm": item.arm, "reason": item.reason} for item in self._left],
        }
        write_document(run_dir / "frontier.json", document, indent=2)

    def _show(
        self,
        run_dir: Path,
        known: Sequence[Step] | None = None,
        *,
        arms: Sequence[str] = (),
        rates: Sequence[float] = (),
        stop: str = "",
    ) -> None:
        """The live page, where there is one, knows what the `known` steps say (None: all), and what is tried now."""
        if self._page is None:
            return
        left = {item.arm: item.reason for item in self._left}
        frontier = self._frontier(run_dir) if known is None else self._frontier_of(known)
        line = {
            "at_ns": now_ns(),
            "spent_s": self.spent_s,
            "budget_s": self._budget_s,
            "trial": self._trials,
            "arms": list(arms),
            "rates": list(rates),
            "stop": stop,
            "held": [{**asdict(item), "left": left.get(item.arm)} for item in frontier.holdings],
        }
        with suppress(OSError), (run_dir / "search.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _check(self) -> None:
        super()._check()
        if self._began is not None and self.left_s <= 0:
            raise BudgetSpentError


def check_budget(experiment: Experiment, minutes: float, *, goes_on: bool = False) -> None:
    """The minutes are enough for two starts of every arm with a few steps each, if starts took no time; where a search
    `goes_on` with an earlier one, for one start of one arm. Otherwise ConfigError."""
    traffic = experiment.traffic
    budget = Budget(
        total_s=minutes * 60.0, step_s=traffic.step_s, around_s=traffic.rampup_s, lanes=lanes_of(experiment)
    )
    least = least_s(dict.fromkeys((arm.name for arm in experiment.arms), 0.0), budget) / 60.0
    what, takes = f"two starts of {len(experiment.arms)} arms", "take"
    if goes_on:
        least = (traffic.rampup_s + FEWEST_STEPS * traffic.step_s) / 60.0
        what, takes = "one start of one arm", "takes"
    if minutes < least:
        raise ConfigError(
            f"--budget is {minutes:g} minutes, but {what} with {FEWEST_STEPS} steps of {traffic.step_s:g} s {takes} "
            f"{least:.3g} minutes and {'its' if goes_on else 'their'} warm-up: give more, "
            f"{'' if goes_on else 'fewer arms '}or a shorter traffic.step_s"
        )


def recorded_steps(run_dir: Path) -> list[Step]:
    """Every step that the trials in `run_dir` hold; none where nothing was recorded yet."""
    try:
        return steps_of(Run.of(read_run(run_dir)))
    except RecordError:
        return []


def earlier_steps(run_dirs: Sequence[Path]) -> list[Step]:
    """The steps of all of these runs; each start has a number of its own, 0 or less: trials to come begin at 1."""
    steps = [(place, step) for place, run_dir in enumerate(run_dirs) for step in recorded_steps(run_dir)]
    starts = dict.fromkeys((place, step.trial) for place, step in steps)
    numbers = {start: -number for number, start in enumerate(starts)}
    return [replace(step, trial=numbers[place, step.trial]) for place, step in steps]


def earlier_starts(run_dirs: Sequence[Path]) -> dict[str, list[float]]:
    """How long each arm took until it served, in each of these runs that knows it, in seconds."""
    found: dict[str, list[float]] = {}
    for run in (Run.of(read_run(run_dir)) for run_dir in run_dirs):
        for arm in run.arms:
            if (serving_s := startup_row(run, arm)["serving_s"]) is not None:
                found.setdefault(arm, []).append(serving_s)
    return found


def devices_of_arms(experiment: Experiment) -> dict[str, str]:
    """The device that the experiment gives to each arm; `cuda` is cuda:0."""
    return {arm.name: device_name(arm.config.model.device) for arm in experiment.own_arms}


def lanes_of(experiment: Experiment) -> int:
    """How many arms run at once: as many as there are GPUs that are named for them. A CPU is one device."""
    return max(1, len({device for device in devices_of_arms(experiment).values() if device.startswith("cuda")}))


def in_laps(turns: Sequence[Turn]) -> list[Turn]:
    """The turns with the starts of each arm spread out: the first of every arm, then the second of every arm."""
    before: dict[str, int] = {}
    laps = []
    for turn in turns:
        before[turn.arm] = before.get(turn.arm, 0) + 1
        laps.append(before[turn.arm])
    return [turn for _, turn in sorted(zip(laps, turns, strict=True), key=lambda pair: pair[0])]


def together(turns: Sequence[Turn], devices: Mapping[str, str]) -> list[Turn]:
    """The first turn, and the next ones of arms that each have a device of their own beside it."""
    group: list[Turn] = []
    taken: set[str] = set()
    for turn in turns:
        if devices[turn.arm] not in taken:
            taken.add(devices[turn.arm])
            group.append(turn)
    return group
