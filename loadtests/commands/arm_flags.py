"""What serve, inspect and precompile share: the arm that options describe, and the process that becomes it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from tailgate.loadtests.commands.options import set_option
from tailgate.servers.complaint import ConfigError, did_you_mean
from tailgate.servers.presets import PRESETS

if TYPE_CHECKING:
    from tailgate.servers.config import ArmConfig

ArmSettings = Annotated[
    list[str] | None, set_option("compile.mode=max-autotune; with EXPERIMENT arms.NAME.compile.mode=max-autotune")
]
CacheDir = Annotated[str, typer.Option(metavar="DIR", help="Keep compiled code here. Default: nowhere.")]
Arm = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help=f"An arm of EXPERIMENT; without one a preset: {', '.join(PRESETS)}.",
    ),
]


def preset_arm(preset: str, settings: Sequence[str] | None = None, *, name: str = "", flag: str = "--arm") -> ArmConfig:
    """Return the arm that the preset of `flag` and settings describe. Raises ConfigError."""
    from tailgate.loadtests.experiments.reading import parse_setting, set_path
    from tailgate.servers.config import ArmConfig, over, with_preset
    from tailgate.servers.fields import read

    if preset not in PRESETS:
        raise ConfigError(f'{flag} is "{preset}": {did_you_mean(preset, PRESETS)}use {", ".join(PRESETS)}')
    changes: dict[str, Any] = {}
    for setting in settings or ():
        set_path(changes, *parse_setting(setting))
    return read(ArmConfig, with_preset(over({"name": name or preset, "preset": preset}, changes)))


def inspected_arm(experiment: Path | None, name: str, settings: Sequence[str] | None) -> ArmConfig:
    """Return an arm of an experiment or, without one, of a preset. Raises ConfigError."""
    if experiment is None:
        return preset_arm(name, settings)
    from tailgate.loadtests.experiments.model import ManagedArm
    from tailgate.loadtests.experiments.reading import load

    loaded = load(experiment, settings=settings or ())
    arm = next((arm for arm in loaded.arms if arm.name == name), None)
    if arm is None:
        names = [arm.name for arm in loaded.arms]
        raise ConfigError(
            f'--arm "{name}" is not in experiment "{loaded.name}": {did_you_mean(name, names)}use one of '
            f"{', '.join(names)}"
        )
    if not isinstance(arm, ManagedArm):
        raise ConfigError(f'--arm "{name}" is external (kind = "{arm.kind}"): only arms of tailgate are inspected')
    return arm.config


def become(module: str, arm: ArmConfig, cache_dir: str, extra: Sequence[str]) -> NoReturn:
    """Replace this process by `python -m module` for the arm."""
    from tailgate.loadtests.experiments.files import check_makeable
    from tailgate.loadtests.trials.processes import thread_variables

    if cache_dir:
        check_makeable(Path(cache_dir), "--cache-dir")
    # A file without a name, which the new program inherits. A pipe would take 64 KiB and then wait for a reader.
    reader = os.memfd_create("arm", 0)
    os.write(reader, json.dumps(arm.to_dict()).encode())
    command = [sys.executable, "-P", "-m", module, "--config", f"/dev/fd/{reader}", *extra]
    if cache_dir:
        command += ["--cache-dir", cache_dir]
    os.execve(sys.executable, command, {**os.environ, **thread_variables(arm)})
