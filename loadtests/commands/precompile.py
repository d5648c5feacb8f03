"""`tailgate precompile`: the compiled code of an arm in a file, for quick starts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tailgate.loadtests.commands.arm_flags import Arm, ArmSettings, become, inspected_arm
from tailgate.loadtests.commands.options import Json, OptionalExperiment, Quiet
from tailgate.servers.complaint import ConfigError

EXAMPLES = """\
  tailgate precompile --arm compiled-bucketed --set model.id=random:llama-3.2-1b --out bucketed.compiled
  tailgate serve --preset compiled-bucketed --set model.id=random:llama-3.2-1b \\
                 --set compile.artifact=bucketed.compiled
  tailgate precompile canary.toml --arm buckets   to the file that the arm's compile.artifact names"""


def command(
    arm: Arm,
    experiment: OptionalExperiment = None,
    out: Annotated[str, typer.Option(metavar="FILE", help="File to write. Default: the arm's compile.artifact.")] = "",
    settings: ArmSettings = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> int:
    """Compile an arm once, for quick starts.

    Loads the arm, warms it up as it would be served, and writes what the compiler made to one file. An arm with
    compile.artifact set to that file finds its graphs and tuned kernels, here or on a machine of the same kind. Torch
    unpickles its content: load only files that you trust like a program.

    Exit codes: 0 written, 2 bad usage or configuration, 1 it broke or was interrupted.
    """
    from tailgate.loadtests.experiments.files import check_makeable
    from tailgate.loadtests.trials.preflight import check_arm
    from tailgate.servers.fields import as_toml

    config = inspected_arm(experiment, arm, settings)
    path = out or config.compile.artifact
    if not path:
        raise ConfigError(f'arm "{config.name}" has no compile.artifact and --out names none: add --out FILE')
    if Path(path).is_dir():
        raise ConfigError(f'--out "{path}" is a folder: give a file')
    if not config.compile.enabled or config.compile.backend != "inductor":
        raise ConfigError(
            f'arm "{config.name}" has compile.enabled = {as_toml(config.compile.enabled)} and compile.backend '
            f'"{config.compile.backend}", and only inductor keeps compiled code: choose another arm'
        )
    config = config.replace(compile=config.compile.replace(artifact=""))
    check_arm(config)
    check_makeable(Path(path).parent)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    become("tailgate.servers.precompile", config, "", ["--out", path, *(["--quiet"] * quiet), *(["--json"] * as_json)])
