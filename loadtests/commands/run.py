"""`tailgate run`: an experiment, run and judged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tailgate.loadtests.commands import options
from tailgate.servers.complaint import ConfigError

if TYPE_CHECKING:
    from tailgate.loadtests.experiments.model import Experiment

EXAMPLES = """\
  tailgate run demo
  tailgate run demo --duration 20m --set trials.count=3
  tailgate run canary.toml --trace AzureLLMInferenceTrace_conv.csv --set traffic.time_scale=2
  tailgate run canary.toml --set arms.compiled.compile.mode=max-autotune
  tailgate run canary.toml --until-decided --at-most 60m"""


UntilDecided = Annotated[
    bool,
    typer.Option(
        "--until-decided",
        help="End the run once every gate is decided, or can no longer be. It is analysed after every block, at one "
        "error rate for all analyses (gates.sequential = true).",
    ),
]


def command(
    context: typer.Context,
    experiment: options.ExperimentName,
    settings: Annotated[list[str] | None, options.set_option("traffic.rate=4")] = None,
    duration: options.Duration = None,
    trace: options.TraceFile = "",
    out: options.Out = "runs",
    until_decided: UntilDecided = False,
    at_most: options.AtMost = None,
    page: options.Page = 0,
    metrics: options.Metrics = "",
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    as_json: options.Json = False,
) -> int:
    """Run an experiment and judge it.

    Starts every arm and the splitter, sends the traffic through them, records everything in a new directory, and judges
    the arms against the control. Ctrl-C stops in order and judges what was recorded; a second Ctrl-C kills at once.

    Exit codes: 0 PASS, 3 INCONCLUSIVE, 99 FAIL, 2 bad usage or configuration, 1 the run broke or was interrupted.
    """
    from tailgate.loadtests.commands.judged_run import run_and_judge
    from tailgate.loadtests.trials.run import ARM_COMMAND, Orchestrator

    loaded = planned(experiment, settings, duration, trace, until_decided, at_most)
    orchestrator = Orchestrator(loaded, out=Path(out), arm_command=context.obj or ARM_COMMAND)
    return run_and_judge(orchestrator, page=page, metrics=metrics, verbosity=verbose - quiet, as_json=as_json)


def planned(
    experiment: Path,
    settings: Sequence[str] | None,
    duration: float | None,
    trace: str,
    until_decided: bool,
    at_most: float | None,
) -> Experiment:
    """Return the experiment that the options of `tailgate run` describe. Raises ConfigError."""
    from tailgate.loadtests.experiments.reading import load

    if at_most is not None and not until_decided:
        raise ConfigError("--at-most belongs to --until-decided: give both, or --duration")
    if at_most is not None and duration is not None:
        raise ConfigError("--at-most and --duration are both given: leave one out")
    changes = [] if duration is None else [f"traffic.duration_s={duration!r}"]
    changes += ["gates.sequential=true"] if until_decided else []
    loaded = load(experiment, settings=[*(settings or ()), *changes], trace=trace)
    if at_most is None:
        return loaded
    return loaded.replace(traffic=loaded.traffic.replace(duration_s=at_most / loaded.trials.count))
