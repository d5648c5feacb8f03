"""What a trial is given: its schedule, and the devices of its arms."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tailgate.loadtests.experiments.model import Experiment, ExperimentArm, ManagedArm
from tailgate.loadtests.monitor.gpus import device_name
from tailgate.loadtests.traffic.drawing import Source, build_schedule, read_source
from tailgate.loadtests.traffic.schedule import Schedule

_STREAM = 1001  # other than the streams of the schedule


def source_of(experiment: Experiment) -> Source:
    """Read trace and tokenizer. Raises ConfigError."""
    return read_source(experiment.traffic, tokenizer=experiment.tokenizer, answers=experiment.task == "generate")


def draw(experiment: Experiment, source: Source, trial: int, rates: Sequence[float] = ()) -> Schedule:
    """Draw the schedule of trial number `trial`, for a saturation search at these `rates`. Raises ConfigError."""
    engines = [arm.engine for arm in experiment.managed_arms]
    if experiment.external_arms:
        engines.append(experiment.engine)
    return build_schedule(
        experiment.traffic,
        source,
        arms=[arm.name for arm in experiment.arms],
        seed=experiment.seed,
        trial=trial,
        # Arms of an experiment about models may have limits of their own: every prompt must fit all of them.
        # The limits of external arms are unknown: [engine] at the top stands for them.
        max_prompt_tokens=min(engine.max_prompt_tokens for engine in engines),
        max_new_tokens=0 if experiment.task == "embed" else min(engine.max_new_tokens for engine in engines),
        levels=rates,
    )


def devices_of(experiment: Experiment, trial: int) -> dict[str, str]:
    """Return the device of each arm that tailgate starts, in trial number `trial` (from 1).

    Arms change places with arms on another GPU, so that no GPU's speed looks like an arm's; those that share one share
    the next. In each group of as many trials as there are GPUs every arm has every GPU once, in an order drawn from the
    seed.
    """
    given = {arm.name: arm.model.device for arm in experiment.managed_arms}
    # `cuda` and cuda:0 are one GPU, called as the first arm on it calls it.
    first: dict[str, str] = {}
    gpu_of = {name: first.setdefault(device_name(at), at) for name, at in given.items() if at.startswith("cuda")}
    if not gpu_of or not experiment.trials.swap_devices:
        return given
    gpus = list(first.values())
    group, place = divmod(trial - 1, len(gpus))
    rng = np.random.default_rng(np.random.SeedSequence(experiment.seed, spawn_key=(_STREAM, group)))
    turn = int(rng.permutation(len(gpus))[place])
    return given | {name: gpus[(gpus.index(gpu) + turn) % len(gpus)] for name, gpu in gpu_of.items()}


def in_trial(experiment: Experiment, trial: int) -> Experiment:
    """Return the experiment with its arms on the devices of trial number `trial`."""
    devices = devices_of(experiment, trial)
    arms: list[ExperimentArm] = [
        arm.replace(model=arm.model.replace(device=devices[arm.name])) if isinstance(arm, ManagedArm) else arm
        for arm in experiment.arms
    ]
    return experiment.model_copy(update={"arms": tuple(arms)})  # of a part, too
