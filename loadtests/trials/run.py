"""Run an experiment: trial after trial, each from a fresh start, with all records in one directory.

Everything is stopped in order, whatever happens: load generator, telemetry, splitter, arms.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tailgate.analysis.records.documents import toml_with_checksum, write_document
from tailgate.loadtests.experiments.files import check_makeable
from tailgate.loadtests.experiments.model import Experiment
from tailgate.loadtests.experiments.reading import to_toml, write_schema
from tailgate.loadtests.traffic.drawing import Source
from tailgate.loadtests.traffic.schedule import Schedule
from tailgate.loadtests.trials.context import RunError, StopRequestedError, TrialContext, TrialFacts
from tailgate.loadtests.trials.environment import describe_environment, new_run_dir
from tailgate.loadtests.trials.preflight import check_experiment
from tailgate.loadtests.trials.served_parity import Answers
from tailgate.loadtests.trials.status import Status
from tailgate.loadtests.trials.steering import Judge, Steering, end_when_decided, watch_weights
from tailgate.loadtests.trials.trial import Trial
from tailgate.loadtests.trials.trial_schedule import draw, in_trial, source_of
from tailgate.loadtests.trials.weights import WeightController
from tailgate.servers.clock import now_ns
from tailgate.servers.complaint import ConfigError, fault, write_failure
from tailgate.servers.splitter.admin import SplitterError

# -P: a directory called `servers` where the user stands must not be imported instead.
ARM_COMMAND = (sys.executable, "-P", "-m", "tailgate.servers.front.serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """How a run ended. Complete only if no trial was stopped. `failed_parity` is why no trial was begun."""

    run_dir: Path
    complete: bool
    interrupted: bool = False
    error: str | None = None
    failed_parity: Mapping[str, Any] | None = None

    @property
    def ended(self) -> dict[str, Any]:
        """Return how it ended, as documents have it."""
        why = self.error or ("the arms do not compute the same: see parity.json" if self.failed_parity else None)
        known = {"complete": self.complete, "interrupted": self.interrupted, "error": why}
        return {key: value for key, value in known.items() if value or key == "complete"}


class Orchestrator:
    """Runs one experiment into a new directory under `out`. `status` says at any time what is going on.

    `arm_command` is what starts an arm replica, in front of --config, --port, --replica and --cache-dir.
    """

    def __init__(
        self,
        experiment: Experiment,
        *,
        out: Path,
        status: Status | None = None,
        arm_command: Sequence[str] = ARM_COMMAND,
    ) -> None:
        self.experiment = experiment
        self.status = status or Status()
        self._out = out
        self._shared_cache = out / "compile-cache"
        self._arm_command = tuple(arm_command)
        self._source: Source | None = None
        self._judge: Judge | None = None
        # A plain flag: the signal handler that sets it may interrupt any line of the main thread, where taking a lock
        # could deadlock.
        self._interrupted = False

    def interrupt(self) -> None:
        """End the run soon and in order. Safe in a signal handler."""
        self._interrupted = True

    def prepare(self) -> None:
        """Check machine and traffic; start and write nothing. Raises ConfigError."""
        if self._source is None:
            check_experiment(self.experiment)
            source = source_of(self.experiment)
            draw(self.experiment, source, 1)  # an impossible schedule is known now
            if source.trace:
                self.status.note(source.trace.account)
            check_makeable(self._out)
            self._source = source

    @property
    def source(self) -> Source:
        """Return what schedules are drawn from, once all is prepared."""
        assert self._source is not None
        return self._source

    def run(self) -> RunOutcome:
        """Record all trials, or those until the run breaks or is interrupted, in a new run directory.

        Raises ConfigError, before anything was started, for what is known to fail on this machine.
        """
        experiment, status = self.experiment, self.status
        status.trials = experiment.trials.count
        status.duration_s = experiment.traffic.duration_s
        self.prepare()
        status.run_dir = run_dir = self._directory()
        ended = partial(RunOutcome, run_dir=run_dir, complete=False)
        try:
            if experiment.parity.full:
                parity = self.measure_parity(run_dir)
                for arm in parity["arms"]:
                    status.note(f"parity of {arm['name']}: {arm['verdict']}. {' '.join(arm['reasons'])}".rstrip())
                if parity["verdict"] == "FAIL":
                    return ended(failed_parity=parity)
            if experiment.gates.sequential:
                self._judge = Judge(run_dir)
            self._run_trials(run_dir)
        except StopRequestedError:
            return ended(interrupted=True)
        except (RunError, SplitterError, ConfigError) as error:
            return ended(error=str(error))
        except OSError as error:
            return ended(error=f"{write_failure(error)}, and see {run_dir}")
        except Exception as error:  # what was recorded until then is still judged
            return ended(error=fault(error, run_dir))
        finally:
            if self._judge is not None:
                if failure := self._judge.failure():
                    status.note(failure)
                self._judge.stop()
        return RunOutcome(run_dir=run_dir, complete=True)

    def measure_parity(self, folder: Path) -> dict[str, Any]:
        """Measure every arm alone, write the outcome to `parity.json` in `folder`, and return it."""
        from tailgate.loadtests.trials.parity_processes import PARITY_COMMAND, ParityRun

        return ParityRun(
            self.experiment,
            folder=folder,
            shared_cache=self._shared_cache,
            status=self.status,
            check=self._check,
            command=PARITY_COMMAND,
        ).run()

    def _directory(self) -> Path:
        """Make and return the run directory, which states what is run, and where."""
        run_dir = new_run_dir(self._out, self.experiment.name)
        (run_dir / "experiment.toml").write_text(toml_with_checksum(to_toml(self.experiment)), encoding="utf-8")
        write_schema(run_dir)
        write_document(run_dir / "environment.json", describe_environment(), indent=2)
        return run_dir

    def _run_trials(self, run_dir: Path) -> None:
        """Record all trials of the experiment."""
        for number in range(1, self.experiment.trials.count + 1):
            self.status.trial = number
            self._check()
            rates: tuple[float, ...] = ()
            if self.experiment.traffic.arrivals == "saturation" and number > 1:
                arms = [arm.name for arm in self.experiment.arms]
                rates = self._next_rates(run_dir, arms, self.experiment.traffic.saturation_steps)
                self.status.note(f"trial {number} searches at {', '.join(f'{rate:g}' for rate in rates)} requests/s")
            schedule = draw(self.experiment, self.source, number, rates)
            context = self._context(in_trial(self.experiment, number), number, run_dir, schedule)
            self._run_trial(context, schedule)
            if context.facts.ended is not None:
                return

    def _next_rates(self, run_dir: Path, arms: Sequence[str], count: int) -> tuple[float, ...]:
        """Return `count` rates at which a search for the load that these arms hold goes on."""
        from tailgate.loadtests.trials.rate_search import next_rates, recorded_steps

        low, high = self.experiment.traffic.step_rates
        return next_rates(arms, recorded_steps(run_dir), count, low=low, high=high)

    def _context(
        self, experiment: Experiment, number: int, run_dir: Path, schedule: Schedule | None = None
    ) -> TrialContext:
        """Return what every part of trial number `number` works with."""
        return TrialContext(
            experiment=experiment,
            number=number,
            folder=run_dir / f"trial-{number:02d}",
            facts=TrialFacts.of(experiment, number, schedule),
            status=self.status,
            check=self._check,
            arm_command=self._arm_command,
            shared_cache=self._shared_cache,
        )

    def _run_trial(self, context: TrialContext, schedule: Schedule, expected: dict[str, Answers] | None = None) -> None:
        """Record the trial, and end all that it started."""
        trial = Trial(context, schedule=schedule, expected=expected, steering=self._steering(context))
        clean = False
        try:
            trial.run()
            clean = True
        except StopRequestedError:
            context.facts.interrupted_ns = now_ns()
            raise
        finally:
            trial.close(hurry=not clean)

    def _steering(self, context: TrialContext) -> list[Steering]:
        """Return what may end a trial early, or watches or moves its weights."""
        steering: list[Steering] = [] if self._judge is None else [partial(end_when_decided, self._judge)]
        if context.experiment.traffic.design == "split":
            given = {arm.name: arm.weight for arm in context.experiment.arms}
            weights = WeightController(context.folder.parent, given, trial=context.number, configured=given)
            steering.append(partial(watch_weights, weights))
        return steering

    def _check(self) -> None:
        if self._interrupted:
            raise StopRequestedError
