"""`tailgate inspect`: the graphs of an arm, and the shapes that will recompile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loadtests.commands.arm_flags import (
    Arm,
    CacheDir,
    Device,
    Dtype,
    MaxNewTokens,
    MaxPromptTokens,
    Model,
    Slots,
    become,
    flag_of,
    given_flags,
    preset_arm,
)
from loadtests.commands.options import Json, OptionalExperiment, file_name, set_option
from servers import stdout
from servers.complaint import ConfigError

if TYPE_CHECKING:
    from servers.config import ArmConfig

EXAMPLES = """\
  tailgate inspect demo --arm compiled-naive
  tailgate inspect --arm compiled-bucketed --model random:llama-3.2-1b --max-prompt-tokens 2048
  tailgate inspect --arm compiled-dynamic --shapes "prefill 1x128, prefill 1x129, decode 8@200"
  tailgate inspect canary.toml --arm buckets --set arms.buckets.compile.mode=max-autotune
  tailgate inspect --trace conv.csv --max-prompt-tokens 8192"""


def command(
    context: typer.Context,
    experiment: OptionalExperiment = "",
    arm: Arm = "",
    shapes: Annotated[str, typer.Option(metavar="LIST", help="Shapes to run in this order, between commas.")] = "",
    model: Model = None,
    device: Device = None,
    dtype: Dtype = None,
    slots: Slots = None,
    max_prompt_tokens: MaxPromptTokens = None,
    max_new_tokens: MaxNewTokens = None,
    settings: Annotated[
        list[str] | None, set_option("compile.mode=max-autotune, or as `run` takes it with EXPERIMENT")
    ] = None,
    cache_dir: CacheDir = "",
    trace: Annotated[
        str | None,
        typer.Option(metavar="TRACE", parser=file_name, help="Say what each compile policy makes of this trace."),
    ] = None,
    as_json: Json = False,
) -> int:
    """List the graphs of an arm and the shapes that will recompile.

    Loads the arm, warms it up as it would be served, then runs each shape as a step of the engine and reports what
    it met: a ready graph, a compile, a recompile and why, or a fall-back to eager. With --json it lists the graphs
    with their sizes, graph breaks and time too. No traffic is sent.

    A shape is a step before padding: `prefill ROWSxTOKENS`, `decode ROWS@CONTEXT`, or for later chunks of prompts
    `extend ROWSxTOKENS@CONTEXT`. Without --shapes it runs every planned shape and a few that are not.

    With --trace it loads no arm: it says how many graphs and compiles the prompt lengths of the trace need under each
    compile policy, how much they are padded, and which buckets pad them least.

    Exit codes: 0 every shape is ready, 99 some are not, 2 bad usage or configuration, 1 it broke or was
    interrupted.
    """
    flags = given_flags(context)
    if trace is not None:
        _check_alone(experiment, {**flags, "arm": arm, "shapes": shapes, "cache_dir": cache_dir, "set": settings})
        from loadtests.commands.trace_forecast import forecast, forecast_text
        from loadtests.traffic.traces import read_trace

        figures = forecast(read_trace(trace, blocks=False), max_prompt_tokens or 0)
        stdout.write(forecast_text(figures), figures, as_json=as_json)
        return 0
    if not arm:
        raise ConfigError("no arm is given: name one with --arm, or a trace with --trace")
    from loadtests.trials.preflight import check_arm

    inspected = inspected_arm(experiment, arm, flags, settings or ())
    check_arm(inspected)
    become("servers.inspect", inspected, cache_dir, ["--shapes", shapes, *(["--json"] * as_json)])


def _check_alone(experiment: str, options: Mapping[str, Any]) -> None:
    """Refuse, next to --trace, what describes an arm."""
    if experiment:
        raise ConfigError(f'EXPERIMENT "{experiment}" has no effect with --trace: leave it out')
    for name, value in options.items():
        if value and name != "max_prompt_tokens":
            raise ConfigError(f"{flag_of(name)} has no effect with --trace: leave it out")


def inspected_arm(experiment: str, name: str, flags: Mapping[str, Any], settings: Sequence[str]) -> ArmConfig:
    """Return an arm of an experiment, or, without one, a preset with the options of `serve`. Raises ConfigError."""
    if not experiment:
        return preset_arm(name, flags, settings=settings)
    from loadtests.experiments.model import OwnArm
    from loadtests.experiments.reading import load

    for flag, value in flags.items():
        if value is not None:
            raise ConfigError(
                f'{flag_of(flag)} is for presets, but EXPERIMENT "{experiment}" is given: use --set, as with '
                "`tailgate run`"
            )
    loaded = load(experiment, settings=settings, needs_traffic=False)
    arm = next((arm for arm in loaded.arms if arm.name == name), None)
    if arm is None:
        names = ", ".join(arm.name for arm in loaded.arms)
        raise ConfigError(f'--arm "{name}" is not in experiment "{loaded.name}": use one of {names}')
    if not isinstance(arm, OwnArm):
        raise ConfigError(f'--arm "{name}" is external (kind = "{arm.kind}"): only arms of tailgate are inspected')
    return arm.config
