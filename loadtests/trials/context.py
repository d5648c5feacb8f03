"""What every part of a trial works with: its context, the facts that trial.json states, and why a run ends early."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from tailgate.analysis.records.documents import write_document
from tailgate.loadtests.experiments.model import Experiment, ExperimentArm, ManagedArm
from tailgate.loadtests.traffic.schedule import Schedule
from tailgate.loadtests.trials.status import Status


class RunError(RuntimeError):
    """The run itself failed. The message is one line that names the log."""


class StartError(RunError):
    """A replica did not become ready."""


class StopRequestedError(Exception):
    """The user asked the run to stop."""


class BudgetSpentError(RunError):
    """A search has no time left."""


@dataclass(slots=True, kw_only=True)
class TrialFacts:
    """The keys of trial.json; analysis reads them by these names. Times are integer ns since the epoch.

    What becomes known late is null until then, and stays so in a trial that was cut off.
    """

    trial: int
    design: str
    arms: list[dict[str, Any]]
    duration_s: float
    block_s: float
    load_processes: int
    devices: dict[str, str]
    open_loop: bool = True
    steps: list[dict[str, Any]] = field(default_factory=list)
    settle_s: float | None = None
    prompts: dict[str, Any] = field(default_factory=dict)
    planned: Mapping[str, int] = field(default_factory=dict)
    over_limit: dict[str, int] = field(default_factory=dict)
    start_ns: int | None = None
    complete: bool = False
    interrupted_ns: int | None = None  # when the user stopped it
    deaths: list[dict[str, Any]] = field(default_factory=list)
    ready_ns: int | None = None  # when every managed arm served
    startup: dict[str, dict[str, Any]] = field(default_factory=dict)
    monitor: dict[str, Any] | None = None  # the machines: devices, what ran there before, what cannot be read
    references: list[dict[str, Any]] = field(default_factory=list)  # speed of devices and host, before and after
    pressure: dict[str, Any] | None = None  # what weighed on the machines, and from when to when
    final: dict[str, dict[str, Any]] | None = None
    answers: dict[str, Any] | None = None
    asked: list[str] | None = None  # external arms whose answers are in files of their own
    ended: str | None = None  # why the trial was ended before its time; None where it was not
    ended_arms: dict[str, dict[str, Any]] = field(default_factory=dict)  # arms that got no more, since when and why

    @classmethod
    def of(cls, experiment: Experiment, number: int, schedule: Schedule | None = None) -> Self:
        """Return what is known before trial number `number` begins; without a schedule nothing is planned."""
        traffic = experiment.traffic
        facts = cls(
            trial=number,
            design=traffic.design,
            arms=[_arm(arm) for arm in experiment.arms],
            duration_s=traffic.duration_s,
            block_s=experiment.gates.block_s,
            load_processes=traffic.load_processes,
            devices={arm.name: arm.model.device for arm in experiment.managed_arms},
        )
        if schedule is not None:
            facts.steps = [dict(step) for step in schedule.steps]
            facts.settle_s = traffic.settle_s if schedule.steps else None
            facts.prompts, facts.planned = dict(schedule.prompts), schedule.planned
            facts.over_limit = dict(schedule.over)
        return facts


def _arm(arm: ExperimentArm) -> dict[str, Any]:
    facts: dict[str, Any] = {"name": arm.name, "kind": arm.kind, "replicas": list(arm.replica_names)}
    if isinstance(arm, ManagedArm):
        return {**facts, "config": arm.config.to_dict()}
    return {**facts, "external": {**arm.to_dict(), "address": ", ".join(arm.address)}}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialContext:
    """Trial number `number` (from 1) in `folder`.

    The experiment has its arms on the devices of this trial. `check` is called often, and raises StopRequestedError
    when the user wants an end. `arm_command` starts a replica; `shared_cache` has compiled code of all trials.
    """

    experiment: Experiment
    number: int
    folder: Path
    facts: TrialFacts
    status: Status
    check: Callable[[], None]
    arm_command: Sequence[str]
    shared_cache: Path

    @property
    def logs(self) -> Path:
        """Return the folder of logs and of what each process was given."""
        return self.folder / "logs"

    def write_facts(self) -> None:
        """Write the facts as they are now to trial.json."""
        facts = {item.name: getattr(self.facts, item.name) for item in fields(self.facts)}
        write_document(self.folder / "trial.json", facts, indent=2)

    def keep_facts(self) -> None:
        """Write the facts as they are now, where the disk takes them; otherwise they wait for the next write.

        For what must continue nevertheless: a full disk must not leave a process running that a trial would have ended.
        """
        with suppress(OSError):
            self.write_facts()
