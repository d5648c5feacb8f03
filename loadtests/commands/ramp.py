"""`tailgate ramp`: traffic moved to a candidate step by step, and back when something goes wrong."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tailgate.loadtests.commands import options
from tailgate.servers.address import host_port
from tailgate.servers.splitter.admin import admin_address

EXAMPLES = """\
  tailgate ramp canary.toml
  tailgate ramp demo --set ramp.candidate=compiled-padded --set ramp.step_s=60
  tailgate ramp canary.toml --admin 127.0.0.1:9901
  tailgate ramp canary.toml --admin 127.0.0.1:9901 --provider 127.0.0.1:9466 --at-most 4h"""


def command(
    context: typer.Context,
    experiment: options.ExperimentName,
    settings: Annotated[list[str] | None, options.set_option("ramp.step_s=600")] = None,
    trace: options.TraceFile = "",
    out: options.Out = "runs",
    admin: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT|PATH",
            help="Ramp production traffic behind the running `tailgate split` with this admin address.",
        ),
    ] = "",
    provider: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Answer Argo Rollouts or Flagger about the candidate here, and move no weights. An address that other "
            "machines reach requires a token in TAILGATE_PROVIDER_TOKEN.",
        ),
    ] = "",
    at_most: options.AtMost = None,
    page: options.Page = 0,
    metrics: options.Metrics = "",
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    as_json: options.Json = False,
) -> int:
    """Move traffic to a candidate step by step.

    Starts the control and the candidate behind the splitter, sends the experiment's traffic, and moves it to the
    candidate in the steps of [ramp]. Traffic increases only when the candidate is statistically no worse. A crash, a
    compile while serving or a burst of errors rolls back to 0 % at once. weights.jsonl records every change.

    With --admin the traffic is production traffic, behind a running `tailgate split --request-log FILE`. The
    weights stay when the ramp ends or is killed, and a new ramp continues from the candidate's share. With --provider
    another controller moves the weights, and asks the ramp for a verdict: PASS, FAIL or INCONCLUSIVE.

    Exit codes: 0 promoted and every gate passed, 3 held or open, 99 rolled back, 2 bad usage or configuration, 1
    the run broke or was interrupted.
    """
    from tailgate.loadtests.commands.judged_run import run_and_judge
    from tailgate.loadtests.experiments.files import table_of
    from tailgate.loadtests.experiments.reading import from_table, load_table
    from tailgate.loadtests.experiments.users import production_table
    from tailgate.loadtests.trials.ramp import RampRun, ramped
    from tailgate.loadtests.trials.run import ARM_COMMAND
    from tailgate.loadtests.trials.users_ramp import UsersRamp

    if admin:
        admin_address(admin, f'--admin "{admin}" is not HOST:PORT or PATH: give the address that the split printed')
    if provider:
        host_port(provider, f'--provider "{provider}" is not HOST:PORT: give one such as 127.0.0.1:9466', listens=True)
    changes = [f"users.{key}={value}" for key, value in (("admin", admin), ("provider", provider)) if value]
    table = load_table(experiment, settings=[*(settings or ()), *changes], trace=trace)
    production = any(table_of(table, "users").get(key) for key in ("admin", "route", "provider"))
    loaded = ramped(from_table(production_table(table) if production else table), at_most_s=at_most)
    run = UsersRamp if production else partial(RampRun, arm_command=context.obj or ARM_COMMAND)
    return run_and_judge(
        run(loaded, out=Path(out)), page=page, metrics=metrics, verbosity=verbose - quiet, as_json=as_json
    )
