"""An experiment as tables and as TOML, with every setting: `loadtests.experiments.reading` makes an equal one of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Any

import tomli_w

from analysis.settings.model import Settings
from loadtests.experiments.model import Experiment, ExperimentArm, ExternalArm
from loadtests.external.addresses import external_table


def to_toml(experiment: Experiment) -> str:
    """The resolved experiment as TOML: every setting is there, defaults and presets included."""
    return tomli_w.dumps(to_table(experiment))


def to_table(experiment: Experiment) -> dict[str, Any]:
    """The resolved experiment as plain tables. A key whose value is None is left out: TOML has none."""
    table = {item.name: getattr(experiment, item.name) for item in fields(experiment)}
    return {key: _plain(value) for key, value in table.items()} | {
        "arms": [_arm_table(arm, experiment) for arm in experiment.arms]
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
        "shapes": _plain(arm.config.shapes),
        "compile": _plain(arm.config.compile),
    }
    for part in ("model", "engine"):
        shared = asdict(getattr(experiment, part))
        own = {key: value for key, value in asdict(getattr(arm.config, part)).items() if value != shared[key]}
        if own:
            table[part] = _plain(own)
    return table


def _plain(value: Any) -> Any:
    if isinstance(value, Settings):
        value = value.model_dump()
    elif is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
