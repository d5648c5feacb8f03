"""Which arm gets which device in a trial: arms change places, so that no device's speed looks like an arm's.

Pure and drawn from the seed: in each group of as many trials as there are devices, every arm has every device once,
and the order in which they come round is random.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np

from loadtests.experiments.model import Experiment, ExperimentArm, OwnArm
from loadtests.monitor.gpus import device_name

_STREAM = 1001  # apart from the streams of the schedule


def devices_of(experiment: Experiment, trial: int) -> dict[str, str]:
    """The device of each arm that tailgate starts, in trial number `trial` (from 1).

    Arms change places with arms on another device of the same kind; those that share one device share the next.
    """
    given = {arm.name: arm.config.model.device for arm in experiment.own_arms}
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
    """The experiment with its arms on the devices of trial number `trial`."""
    devices = devices_of(experiment, trial)
    arms: list[ExperimentArm] = []
    for arm in experiment.arms:
        if isinstance(arm, OwnArm):
            model = replace(arm.config.model, device=devices[arm.name])
            arm = replace(arm, config=replace(arm.config, model=model))
        arms.append(arm)
    return replace(experiment, arms=tuple(arms))
