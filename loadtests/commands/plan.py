"""`tailgate plan`: how long a run must be, before it is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from analysis.wording import counted, duration_text
from loadtests.commands.options import Json, file_name, real, run_directory
from loadtests.commands.terminal_table import aligned
from servers import stdout

EXAMPLES = "  tailgate plan runs/20260101T120000Z-canary --margin 0.1"


def command(
    run_dir: Annotated[
        str, typer.Argument(metavar="RUN_DIR", help="A pilot: a directory that `tailgate run` wrote.", parser=file_name)
    ],
    margin: Annotated[
        float | None,
        typer.Option(metavar="M", parser=real(1e-4, 10, "share"), help="Accepted rise. Default: the pilot's."),
    ] = None,
    ratio: Annotated[
        float, typer.Option(metavar="R", parser=real(0.01, 100), help="True ratio to plan for; 1 is equal arms.")
    ] = 1.0,
    as_json: Json = False,
) -> int:
    """Say how long a run must be.

    Uses the spread that a pilot run saw. All gates pass together with a chance of 80 % where the arms are equal.
    Nothing is run.
    """
    from analysis.planning import plan_of
    from analysis.records.tables import RecordError
    from loadtests.experiments.config_errors import as_config_error

    with as_config_error(RecordError):
        plan = plan_of(run_directory(run_dir), margin=margin, ratio=ratio)
    stdout.write(plan_text(plan), plan, as_json=as_json)
    return 0


def plan_text(plan: Mapping[str, Any]) -> str:
    """Return the plan for a terminal."""
    goal, source = plan["wanted"], plan["source"]
    lines = [
        f"{source['run_dir']}: {duration_text(source['seconds'])} in {counted(source['trials'], 'trial')}, "
        f"{source['design']}",
        f"goal: margin {100 * goal['margin']:g} %, power {100 * goal['power']:g} %, alpha {goal['alpha']:g}, "
        f"for a true ratio of {goal['ratio']:g}",
        "",
    ]
    table = [["arm", "gate", "seen", "spread", "run length", ""]]
    for row in plan["rows"]:
        spread = "" if row["spread"] is None else f"{row['spread']:.3f}"
        length = "none" if row["needed_s"] is None else duration_text(row["needed_s"])
        table.append([row["arm"], row["what"], _seen(row), spread, length, row["note"]])
    lines += [*aligned(table, left=2), ""]
    lines += list(plan["notes"])
    if plan["needed_s"] is None:
        lines.append(f"No run of up to a week decides {', '.join(plan['out_of_reach'])}.")
    else:
        each = "" if plan["trials"] == 1 else f": {plan['trials']} trials of {duration_text(plan['trial_s'])}"
        lines.append(
            f"Run for {duration_text(plan['needed_s'])} ({plan['needed_s']:,.0f} s){each}. "
            f"Longest: {plan['decided_by']}."
        )
    return "\n".join(lines)


def _seen(row: Mapping[str, Any]) -> str:
    if row["seen"] is None:
        return ""
    return f"{row['seen']:.3f}" if row["spread"] is not None else f"{100 * row['seen']:.3g} %"
