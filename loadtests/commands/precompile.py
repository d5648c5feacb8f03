"""`tailgate precompile`: the compiled code of an arm in a file, for quick starts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tailgate.loadtests.commands.arm_flags import Arm, become, inspected_arm
from tailgate.loadtests.commands.options import Json, OptionalExperiment, Quiet, set_option
from tailgate.servers.complaint import ConfigError

if TYPE_CHECKING:
    from tailgate.servers.config import ArmConfig

EXAMPLES = """\
  tailgate precompile --arm compiled-bucketed --set model.id=random:llama-3.2-1b --out bucketed.compiled
  tailgate serve --preset compiled-bucketed --set model.id=random:llama-3.2-1b \\
                 --set compile.artifact=bucketed.compiled
  tailgate precompile canary.toml --arm buckets   to the file that the arm's compile.artifact names"""


def command(
    arm: Arm,
    experiment: OptionalExperiment = None,
    out: Annotated[str, typer.Option(metavar="FILE", help="File to write. Default: the arm's compile.artifact.")] = "",
    settings: Annotated[
        list[str] | None, set_option("compile.mode=max-autotune, or as `run` takes it with EXPERIMENT")
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> int:
    """Compile an arm once, for quick starts.

    Loads the arm, warms it up as it would be served, and writes what the compiler made to one file. A start whose
    arm has compile.artifact set to that file, here or on another machine of the same kind, finds its graphs
    and inductor's tuned kernels. The file is refused where torch, the device, the model's name or the policy
    differs. Torch unpickles its content: load only files that you trust like a program.

    Exit codes: 0 written, 2 bad usage or configuration, 1 it broke or was interrupted.
    """
    from tailgate.loadtests.experiments.files import check_writable
    from tailgate.loadtests.trials.preflight import check_arm

    compiled, path = precompiled_arm(inspected_arm(experiment, arm, settings), out)
    check_arm(compiled)
    check_writable(Path(path).parent)
    become(
        "tailgate.servers.precompile", compiled, "", ["--out", path, *(["--quiet"] * quiet), *(["--json"] * as_json)]
    )


def precompiled_arm(arm: ArmConfig, out: str) -> tuple[ArmConfig, str]:
    """Return the arm to compile, without an artifact of its own, and the file to write. Raises ConfigError."""
    path = out or arm.compile.artifact
    if not path:
        raise ConfigError(f'arm "{arm.name}" has no compile.artifact and --out names none: add --out FILE')
    if Path(path).is_dir():
        raise ConfigError(f'--out "{path}" is a folder: give a file')
    if not arm.compile.enabled:
        raise ConfigError(f'arm "{arm.name}" compiles nothing (compile.enabled is false): choose a compiled one')
    if arm.compile.backend != "inductor":
        raise ConfigError(
            f'arm "{arm.name}" has compile.backend "{arm.compile.backend}", and only inductor keeps compiled code: '
            "choose another arm"
        )
    return arm.replace(compile=arm.compile.replace(artifact="")), path
