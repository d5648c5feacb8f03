"""The arm that a preset and options describe, and the process that becomes it: what serve and inspect share."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from loadtests.commands.options import file_name
from servers.complaint import ConfigError
from servers.presets import PRESETS

# Defaults, as the help says them: to import the settings takes longer than all of --help.
USUAL = {
    **{"model": "random:tiny", "device": "auto", "dtype": "auto"},
    **{"slots": 8, "max_prompt_tokens": 256, "max_new_tokens": 128},
}

if TYPE_CHECKING:
    from servers.config import ArmConfig

# Options of an arm. None tells one that was not given from one that repeats the default.
Model = Annotated[
    str | None,
    typer.Option(help=f"Hugging Face path or id, or random:NAME. [default: {USUAL['model']}]", metavar="MODEL"),
]
Device = Annotated[
    str | None, typer.Option(help=f"auto, cpu, cuda or cuda:N. [default: {USUAL['device']}]", metavar="DEVICE")
]
Dtype = Annotated[
    str | None,
    typer.Option(help=f"auto, float32, float16 or bfloat16. [default: {USUAL['dtype']}]", metavar="DTYPE"),
]
Slots = Annotated[int | None, typer.Option(help=f"Requests that run at once. [default: {USUAL['slots']}]", metavar="N")]
MaxPromptTokens = Annotated[
    int | None, typer.Option(help=f"Longest prompt. [default: {USUAL['max_prompt_tokens']}]", metavar="N")
]
MaxNewTokens = Annotated[
    int | None, typer.Option(help=f"Longest answer. [default: {USUAL['max_new_tokens']}]", metavar="N")
]
CacheDir = Annotated[
    str, typer.Option(metavar="DIR", help="Keep compiled code here. Default: nowhere.", parser=file_name)
]
Arm = Annotated[
    str,
    typer.Option(
        "--arm",
        "--preset",
        metavar="NAME",
        help=f"An arm of EXPERIMENT; without one a preset: {', '.join(PRESETS)}.",
    ),
]
# Table and key of each option.
ARM_FLAGS = {
    "model": ("model", "id"),
    "device": ("model", "device"),
    "dtype": ("model", "dtype"),
    "slots": ("engine", "slots"),
    "max_prompt_tokens": ("engine", "max_prompt_tokens"),
    "max_new_tokens": ("engine", "max_new_tokens"),
}


def flag_of(name: str) -> str:
    """Return the flag of an option, such as --max-new-tokens."""
    return f"--{name.replace('_', '-')}"


def given_flags(context: typer.Context) -> dict[str, Any]:
    """Return the values of ARM_FLAGS, None for each that was not given."""
    return {name: context.params[name] for name in ARM_FLAGS}


def preset_arm(preset: str, flags: Mapping[str, Any], *, name: str = "", settings: Sequence[str] = ()) -> ArmConfig:
    """Return the arm that a preset, ARM_FLAGS (None: not given) and --set describe. Raises ConfigError."""
    from loadtests.experiments.overrides import parse_setting, set_path
    from loadtests.experiments.toml_limits import check_values
    from servers.config import ArmConfig, over, with_preset
    from servers.fields import read

    tables: dict[str, Any] = {"name": name or preset, "preset": preset, "model": {}, "engine": {}}
    for flag, (table, key) in ARM_FLAGS.items():
        if flags.get(flag) is not None:
            tables[table][key] = flags[flag]
    changes: dict[str, Any] = {}
    for setting in settings:
        set_path(changes, *parse_setting(setting))
    check_values(changes, "--set")
    for table in changes:
        if table not in ("model", "engine", "shapes", "compile"):
            raise ConfigError(f"--set {table} is unknown: use model.KEY, engine.KEY, shapes.KEY or compile.KEY")
    return read(ArmConfig, with_preset(over(tables, changes)))


def become(module: str, arm: ArmConfig, cache_dir: str, extra: Sequence[str]) -> NoReturn:
    """Replace this process by `python -m module` for the arm."""
    from loadtests.trials.processes import thread_variables

    # The new program reads its configuration from a file without a name, and nothing is left behind. A pipe would take
    # 64 KiB and then wait for a reader that is not there yet.
    with tempfile.TemporaryFile() as nameless:
        nameless.write(json.dumps(arm.to_dict()).encode())
        nameless.seek(0)
        reader = os.dup(nameless.fileno())
    os.set_inheritable(reader, True)
    command = [sys.executable, "-P", "-m", module, "--config", f"/dev/fd/{reader}", *extra]
    if cache_dir:
        command += ["--cache-dir", cache_dir]
    os.execve(sys.executable, command, {**os.environ, **thread_variables(arm)})
