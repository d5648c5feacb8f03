"""`tailgate inspect`: the graphs of an arm, and the shapes that will recompile."""

from __future__ import annotations

from typing import Annotated

import typer

from tailgate.loadtests.commands.arm_flags import Arm, CacheDir, become, inspected_arm
from tailgate.loadtests.commands.options import Json, OptionalExperiment, Quiet, set_option

EXAMPLES = """\
  tailgate inspect demo --arm compiled-naive
  tailgate inspect --arm compiled-bucketed --set model.id=random:llama-3.2-1b --set engine.max_prompt_tokens=2048
  tailgate inspect --arm compiled-dynamic --shapes "prefill 1x128, prefill 1x129, decode 8@200"
  tailgate inspect canary.toml --arm buckets --set arms.buckets.compile.mode=max-autotune"""


def command(
    arm: Arm,
    experiment: OptionalExperiment = None,
    shapes: Annotated[str, typer.Option(metavar="LIST", help="Shapes to run in this order, between commas.")] = "",
    settings: Annotated[
        list[str] | None, set_option("compile.mode=max-autotune, or as `run` takes it with EXPERIMENT")
    ] = None,
    cache_dir: CacheDir = "",
    quiet: Quiet = False,
    as_json: Json = False,
) -> int:
    """List the graphs of an arm and the shapes that will recompile.

    Loads the arm, warms it up as it would be served, then runs each shape as a step of the engine and reports what it
    met: a ready graph, a compile, a recompile and why, or a fall-back to eager. --json adds graph breaks and times.

    A shape is a step before padding: `prefill ROWSxTOKENS`, `decode ROWS@CONTEXT`, or for later chunks of prompts
    `extend ROWSxTOKENS@CONTEXT`. Without --shapes it runs every planned shape and a few that are not.

    Exit codes: 0 every shape is ready, 99 some are not, 2 bad usage or configuration, 1 it broke or was
    interrupted.
    """
    from tailgate.loadtests.trials.preflight import check_arm

    inspected = inspected_arm(experiment, arm, settings)
    check_arm(inspected)
    become(
        "tailgate.servers.inspect",
        inspected,
        cache_dir,
        ["--shapes", shapes, *(["--quiet"] * quiet), *(["--json"] * as_json)],
    )
