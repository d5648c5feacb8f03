"""`tailgate inspect`: the graphs of an arm, and the shapes that will recompile."""

from __future__ import annotations

from typing import Annotated

import typer

from tailgate.loadtests.commands.arm_flags import Arm, ArmSettings, CacheDir, become, inspected_arm
from tailgate.loadtests.commands.options import Json, OptionalExperiment, Quiet, number
from tailgate.servers import stdout
from tailgate.servers.complaint import ConfigError

EXAMPLES = """\
  tailgate inspect demo --arm compiled-naive
  tailgate inspect --arm compiled-bucketed --set model.id=random:llama-3.2-1b --set engine.max_prompt_tokens=2048
  tailgate inspect --arm compiled-dynamic --shapes "prefill 128, prefill 129, decode 8@200"
  tailgate inspect canary.toml --arm buckets --set arms.buckets.compile.mode=max-autotune
  tailgate inspect --trace conv.csv --max-prompt-tokens 8192"""


def command(
    experiment: OptionalExperiment = None,
    arm: Arm = "",
    shapes: Annotated[str, typer.Option(metavar="LIST", help="Shapes to run in this order, separated by commas.")] = "",
    settings: ArmSettings = None,
    cache_dir: CacheDir = "",
    trace: Annotated[
        str | None,
        typer.Option(metavar="TRACE", help="Say how much padding each choice of buckets costs on this trace."),
    ] = None,
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", parser=number(int, 1, 10**9), help="With --trace: leave longer prompts out."),
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> int:
    """List the graphs of an arm and the shapes that will recompile.

    Loads the arm, warms it up as it would be served, then runs each shape as a step of the engine and reports what it
    met: a ready graph, a compile, a recompile and why, or a fall-back to eager. With --shapes it compares the graphs.

    A shape is a step before padding: `prefill TOKENS`, `decode ROWS@CONTEXT`, or for an encoder `encode ROWSxTOKENS`.
    Without --shapes it runs every planned shape and a few that are not.

    With --trace it loads no arm. It counts the lengths of the trace's prompts, and says how much buckets pad them and
    which buckets pad them least.

    Exit codes: 0 every shape is ready, 99 some are not, 2 bad usage or configuration, 1 it broke or was
    interrupted.
    """
    if trace is not None:
        if given := experiment or arm or shapes or settings or cache_dir:
            raise ConfigError(f"{given} has no effect with --trace: leave EXPERIMENT and options of an arm out")
        from tailgate.loadtests.commands.trace_forecast import forecast, forecast_text
        from tailgate.loadtests.traffic.traces import read_trace

        figures = forecast(read_trace(trace, blocks=False), max_prompt_tokens or 0)
        stdout.write(forecast_text(figures), figures, as_json=as_json)
        return 0
    if not arm:
        raise ConfigError("no arm is given: name one with --arm, or a trace with --trace")
    if max_prompt_tokens is not None:
        raise ConfigError("--max-prompt-tokens belongs to --trace: for an arm give --set engine.max_prompt_tokens=N")
    from tailgate.loadtests.trials.preflight import check_arm

    inspected = inspected_arm(experiment, arm, settings)
    check_arm(inspected)
    become(
        "tailgate.servers.inspect",
        inspected,
        cache_dir,
        ["--shapes", shapes, *(["--quiet"] * quiet), *(["--json"] * as_json)],
    )
