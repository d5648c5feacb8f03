"""What a trial is given: its schedule, and the devices of its arms."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from tailgate.loadtests.experiments.model import Experiment, ExperimentArm, OwnArm
from tailgate.loadtests.monitor.gpus import device_name
from tailgate.loadtests.traffic.drawing import Source, build_schedule, read_source
from tailgate.loadtests.traffic.schedule import Schedule


@dataclass(frozen=True, slots=True)
class TrialSchedules:
    """Draws the schedule of a trial from the experiment's traffic."""

    experiment: Experiment
    source: Source

    @classmethod
    def of(cls, experiment: Experiment) -> Self:
        """Read trace and tokenizer, and try a first schedule. Raises ConfigError."""
        source = read_source(
            experiment.traffic,
            model=experiment.counting_model,
            answers=experiment.task == "generate",
        )
        schedules = cls(experiment, source)
        schedules.draw(1)
        return schedules

    def draw(self, trial: int, rates: Sequence[float] = ()) -> Schedule:
        """Draw the schedule of trial number `trial`, for a saturation search at these `rates`."""
        experiment = self.experiment
        engines = [arm.engine for arm in experiment.own_arms]
        if experiment.external_arms:
            engines.append(experiment.engine)
        return build_schedule(
            experiment.traffic,
            self.source,
            arms=[arm.name for arm in experiment.arms],
            seed=experiment.seed,
            trial=trial,
            # Arms of an experiment about models may have limits of their own: every prompt must fit all of them.
            # The limits of external arms are unknown: [engine] at the top stands for them.
            max_prompt_tokens=min(engine.max_prompt_tokens for engine in engines),
            max_new_tokens=0 if experiment.task == "embed" else min(engine.max_new_tokens for engine in engines),
            levels=rates,
        )


_STREAM = 1001  # other than the streams of the schedule


def devices_of(experiment: Experiment, trial: int) -> dict[str, str]:
    """Return the device of each arm that tailgate starts, in trial number `trial` (from 1).

    Arms change places with arms on another device of the same kind, so that no device's speed looks like an arm's;
    those that share one device share the next. In each group of as many trials as there are devices every arm has every
    device once, in an order drawn from the seed.
    """
    given = {arm.name: arm.model.device for arm in experiment.own_arms}
    if not experiment.trials.swap_devices:
        return given
    # `cuda` and cuda:0 are one device, called as the first arm on it calls it.
    first: dict[str, str] = {}
    given = {name: first.setdefault(device_name(device), device) for name, device in given.items()}
    kinds: dict[str, list[str]] = defaultdict(list)
    for device in first.values():
        kinds[device.partition(":")[0]].append(device)
    moved: dict[str, str] = {}
    for number, (_, devices) in enumerate(sorted(kinds.items())):
        size = len(devices)
        group, place = divmod(trial - 1, size)
        rng = np.random.default_rng(np.random.SeedSequence(experiment.seed, spawn_key=(_STREAM, number, group)))
        turn = int(rng.permutation(size)[place])
        moved |= {device: devices[(index + turn) % size] for index, device in enumerate(devices)}
    return {name: moved[device] for name, device in given.items()}


def in_trial(experiment: Experiment, trial: int) -> Experiment:
    """Return the experiment with its arms on the devices of trial number `trial`."""
    devices = devices_of(experiment, trial)
    arms: list[ExperimentArm] = []
    for arm in experiment.arms:
        if isinstance(arm, OwnArm):
            arm = arm.replace(model=arm.model.replace(device=devices[arm.name]))
        arms.append(arm)
    return experiment.model_copy(update={"arms": tuple(arms)})  # of a part, too
