"""What every part of a trial works with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from loadtests.experiments.model import Experiment
from loadtests.trials.progress import Status
from loadtests.trials.trial_facts import TrialFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialContext:
    """Trial number `number` (from 1) in `folder`.

    The experiment has its arms on the devices of this trial. `check` is called often, and raises StopRequestedError
    when the user wants an end. `metrics`: replicas show a page to Prometheus.
    """

    experiment: Experiment
    number: int
    folder: Path
    facts: TrialFacts
    status: Status
    check: Callable[[], None]
    metrics: bool = False

    @property
    def logs(self) -> Path:
        """The folder of logs and of what each process was given."""
        return self.folder / "logs"

    def write_facts(self) -> None:
        """trial.json is as the facts are now."""
        self.facts.write(self.folder)

    def keep_facts(self) -> None:
        """trial.json is as the facts are now, where the disk takes it. The facts stay for whoever writes them next.

        For what must go on all the same: a full disk must not leave a process running that a trial would have ended.
        """
        with suppress(OSError):
            self.write_facts()
