"""`tailgate frontier`: which policy to ship at which load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tailgate.loadtests.commands import options

EXAMPLES = """\
  tailgate frontier frontier-demo --budget 9m
  tailgate frontier canary.toml --budget 3h
  tailgate frontier canary.toml --set traffic.rates=[2,64] --set slo.p99_ttft_ms=500"""


def command(
    context: typer.Context,
    experiment: options.ExperimentName,
    budget: Annotated[
        float,
        typer.Option(metavar="TIME", parser=options.duration, help="How long the search may take, such as 90m or 3h."),
    ] = "1h",  # type: ignore[assignment]  # is parsed, and --help shows it
    settings: Annotated[list[str] | None, options.set_option("traffic.step_s=20")] = None,
    out: options.Out = "runs",
    page: options.Page = 0,
    metrics: options.Metrics = "",
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    as_json: options.Json = False,
) -> int:
    """Find out which policy to ship at which load.

    Starts one arm after another and loads each around the highest rate that it holds within the [slo], until the budget
    is spent or nothing is open. Loads begin at traffic.rates, or around traffic.rate. Ctrl-C ends with what is known.

    Exit codes: 0 it ended with an answer, 3 no load is known; where the experiment sets [gates], those of `run` (0
    PASS, 3 INCONCLUSIVE, 99 FAIL); 2 bad usage or configuration; 1 it broke or was interrupted.
    """
    from tailgate.loadtests.commands.frontier_plan import frontier_plan
    from tailgate.loadtests.commands.judged_run import run_and_judge
    from tailgate.loadtests.trials.frontier import FrontierSearch, check_budget
    from tailgate.loadtests.trials.run import ARM_COMMAND

    loaded = frontier_plan(experiment, settings=settings or ())
    check_budget(loaded, budget)
    search = FrontierSearch(loaded, out=Path(out), budget_s=budget, arm_command=context.obj or ARM_COMMAND)
    return run_and_judge(search, page=page, metrics=metrics, verbosity=verbose - quiet, as_json=as_json)
