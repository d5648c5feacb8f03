"""An experiment as tables and as TOML, with every setting: `loadtests.experiments.reading` makes an equal one of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import tomli_w

from loadtests.experiments.model import Experiment, ExperimentArm, ExternalArm
from loadtests.external.addresses import external_table


def to_toml(experiment: Experiment) -> str:
    """The resolved experiment as TOML: every setting is there, defaults and presets included."""
    return tomli_w.dumps(to_table(experiment))


def to_table(experiment: Experiment) -> dict[str, Any]:
    """The resolved experiment as plain tables. A key whose value is None is left out: TOML has none."""
    return {
        "name": experiment.name,
        "seed": experiment.seed,
        "compare_models": experiment.compare_models,
        "model": _plain(asdict(experiment.model)),
        "engine": _plain(asdict(experiment.engine)),
        "arms": [_arm_table(arm, experiment) for arm in experiment.arms],
        "traffic": _plain(asdict(experiment.traffic)),
        "trials": _plain(asdict(experiment.trials)),
        "slo": _plain(experiment.slo),
        "goodput": dict(experiment.goodput),
        "gates": _plain(asdict(experiment.gates)),
        "rollout": _plain(asdict(experiment.rollout)),
        "splitter": _plain(asdict(experiment.splitter)),
        "parity": _plain(asdict(experiment.parity)),
        "security": _plain(asdict(experiment.security)),
    }


def _arm_table(arm: ExperimentArm, experiment: Experiment) -> dict[str, Any]:
    if isinstance(arm, ExternalArm):
        return {"name": arm.name, "control": arm.control, **_plain(external_table(arm.external))}
    table: dict[str, Any] = {
        "name": arm.name,
        "preset": arm.config.preset,
        "control": arm.control,
        "weight": arm.weight,
        "replicas": arm.replicas,
        "shapes": _plain(asdict(arm.config.shapes)),
        "compile": _plain(asdict(arm.config.compile)),
    }
    for part, common in (("model", experiment.model), ("engine", experiment.engine)):
        shared = asdict(common)
        own = {key: value for key, value in asdict(getattr(arm.config, part)).items() if value != shared[key]}
        if own:
            table[part] = _plain(own)
    return table


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
