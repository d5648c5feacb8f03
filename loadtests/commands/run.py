"""`tailgate run`: an experiment, run and judged."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tailgate.loadtests.commands import options
from tailgate.servers.complaint import ConfigError

if TYPE_CHECKING:
    from tailgate.loadtests.experiments.model import Experiment

EXAMPLES = """\
  tailgate run demo
  tailgate run demo --set traffic.duration_s=1200 --set trials.count=3
  tailgate run canary.toml --trace AzureLLMInferenceTrace_conv.csv --set traffic.time_scale=2
  tailgate run canary.toml --set arms.compiled.compile.mode=max-autotune
  tailgate run canary.toml --set arms.compiled.replicas=2
  tailgate run canary.toml --until-decided --at-most 60m"""


def command(
    context: typer.Context,
    experiment: options.ExperimentName,
    settings: Annotated[list[str] | None, options.set_option("traffic.rate=4")] = None,
    trace: options.TraceFile = "",
    out: options.Out = "runs",
    until_decided: Annotated[
        bool,
        typer.Option(
            "--until-decided",
            help="Analyze the run after every block and end it when every gate is decided, or can no longer be. The "
            "error rate is controlled across these analyses (gates.sequential = true).",
        ),
    ] = False,
    at_most: options.AtMost = None,
    page: options.Page = "127.0.0.1:0",
    seed: options.Seed = None,
    metrics: options.Metrics = "",
    as_json: options.Json = False,
) -> int:
    """Run an experiment and judge it.

    Starts every arm and the splitter, sends the traffic through them, records everything in a new directory, and judges
    the arms against the control. Ctrl-C stops in order and judges what was recorded; a second Ctrl-C kills at once.

    Exit codes: 0 PASS, 3 INCONCLUSIVE, 99 FAIL, 2 bad usage or configuration, 1 the run broke or was interrupted.
    """
    from tailgate.loadtests.commands.judged_run import run_and_judge
    from tailgate.loadtests.experiments.reading import load
    from tailgate.loadtests.trials.run import ARM_COMMAND, Orchestrator

    loaded = load(experiment, settings=settings or (), trace=trace, seed=seed)
    if until_decided:
        loaded = _until_decided(loaded, at_most)
    elif at_most is not None:
        raise ConfigError("--at-most belongs to --until-decided: give both, or --set traffic.duration_s")
    orchestrator = Orchestrator(loaded, out=Path(out), arm_command=context.obj or ARM_COMMAND)
    return run_and_judge(orchestrator, page=page, metrics=metrics, as_json=as_json)


def _until_decided(experiment: Experiment, at_most_s: float | None) -> Experiment:
    """Return the experiment with an analysis after every block and at most `at_most_s` of traffic."""
    traffic = dict(experiment.traffic)
    if at_most_s is not None:
        traffic["duration_s"] = at_most_s / experiment.trials.count
    return experiment.replace(traffic=traffic, gates=experiment.gates.model_copy(update={"sequential": True}))
