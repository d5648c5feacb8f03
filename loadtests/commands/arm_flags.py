"""The arm that a preset and flags describe, and the process that becomes it: what serve and inspect share."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

from loadtests.commands.command_line import flag_of
from loadtests.experiments.arm_tables import check_read
from loadtests.experiments.overrides import parse_setting, set_path
from loadtests.experiments.toml_limits import check_values
from loadtests.trials.processes import thread_variables
from servers.config import ArmConfig, EngineConfig, ModelConfig
from servers.fields import ConfigError, override

# The flags that describe the arm of a preset: name, table and key that it sets, help.
ARM_FLAGS = (
    ("model", "model", "id", "Hugging Face path or id, or random:NAME"),
    ("device", "model", "device", "auto, cpu, cuda or cuda:N"),
    ("dtype", "model", "dtype", "auto, float32, float16 or bfloat16"),
    ("slots", "engine", "slots", "requests that run at once"),
    ("max_prompt_tokens", "engine", "max_prompt_tokens", "longest prompt"),
    ("max_new_tokens", "engine", "max_new_tokens", "longest answer"),
)


def add_arm_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of an arm, all of them None where they are not given."""
    tables = {"model": ModelConfig(), "engine": EngineConfig()}
    for name, table, key, text in ARM_FLAGS:
        default = getattr(tables[table], key)
        # None tells a flag that was not given from one that repeats the default
        parser.add_argument(flag_of(name), type=type(default), help=f"{text} (default {default})")


def preset_arm(options: argparse.Namespace) -> ArmConfig:
    """The arm that --preset, --name, the flags of an arm and --set describe."""
    tables: dict[str, dict[str, Any]] = {"model": {}, "engine": {}}
    for name, table, key, _ in ARM_FLAGS:
        if getattr(options, name) is not None:
            tables[table][key] = getattr(options, name)
    engine = override(EngineConfig(), tables["engine"], where="engine")
    changes: dict[str, Any] = {}
    for setting in options.settings:
        set_path(changes, *parse_setting(setting))
    check_values(changes, "--set")
    for table, values in changes.items():
        if table not in ("model", "engine", "shapes", "compile") or not isinstance(values, dict):
            raise ConfigError(f"--set {table} is unknown: use model.KEY, engine.KEY, shapes.KEY or compile.KEY")
    # A preset's policy may depend on the model's weights.
    model = override(ModelConfig(), {**tables["model"], **changes.pop("model", {})}, where="model")
    arm = ArmConfig.from_preset(options.preset, name=options.name, model=model, engine=engine)
    tables_of_arm: dict[str, Any] = {
        table: override(getattr(arm, table), values, where=table) for table, values in changes.items()
    }
    check_read(changes.get("compile", {}), tables_of_arm.get("compile", arm.compile), arm.compile, where="compile")
    return replace(arm, **tables_of_arm)  # at once: bounds and the smallest size may only fit together


def become(module: str, arm: ArmConfig, cache_dir: str, extra: Sequence[str]) -> NoReturn:
    """This process goes on as `python -m module` for the arm."""
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
