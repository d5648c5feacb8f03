"""A search for `tailgate frontier`: checked against earlier ones, run and judged."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis.records.joining import RecordedRun, RunList, check_next, listed_runs
from analysis.records.run_records import check_runs
from analysis.records.tables import RecordError
from loadtests.commands.exits import EXIT_BROKE, complain, stopping, without_verdict
from loadtests.commands.joined_folder import check_outside, join_runs
from loadtests.commands.options import run_directory
from loadtests.commands.parity import show_parity
from loadtests.commands.verdict_output import judge_run
from loadtests.experiments.config_errors import as_config_error
from loadtests.experiments.model import Experiment
from loadtests.experiments.writing import to_toml
from loadtests.trials.context import known_before
from loadtests.trials.environment import describe_environment, has_requests
from loadtests.trials.frontier import FrontierSearch
from loadtests.trials.progress import Display
from loadtests.trials.run_metrics import exporting
from loadtests.trials.status import Status
from servers.fields import ConfigError


def earlier_searches(
    experiment: Experiment, texts: Sequence[str], accepted: Sequence[str], out: Path
) -> RunList | None:
    """Return the searches of --after, None where there are none. Raises ConfigError for those that cannot be joined."""
    if not texts:
        if accepted:
            raise ConfigError("--allow-different is for what differs from earlier searches: name them with --after")
        return None
    directories = [run_directory(text, "tailgate frontier") for text in texts]
    with as_config_error(RecordError):
        after = check_continued(experiment, directories, accepted)
    check_outside(out, [*directories, *after.directories])
    return after


def check_continued(experiment: Experiment, directories: Sequence[Path], accepted: Sequence[str] = ()) -> RunList:
    """Return the searches in `directories` if a search of `experiment` on this machine may be joined with them.

    Raises RecordError where it may not, but for what is `accepted`.
    """
    listed = listed_runs(directories, accepted)
    documents = check_runs(listed)
    for run in documents:
        if run.search is None:
            raise RecordError(f"{run.name} is no search, as it holds no frontier.json: give runs of tailgate frontier")
        if run.seed == str(experiment.seed):
            raise RecordError(
                f"{run.name} has seed {run.seed} too, so its requests would come again: give another --seed"
            )
    coming = RecordedRun(
        directory=Path(),
        name="what would run now",
        experiment=tomllib.loads(to_toml(experiment)),
        environment=describe_environment(),
        infos=(json.loads(json.dumps(known_before(experiment))),),  # as trial.json will have it
        search={},
    )
    check_next(documents, coming, listed.accepted)
    return listed


def search_and_judge(
    search: FrontierSearch,
    status: Status,
    after: RunList | None,
    ended: dict[str, Any],
    *,
    minutes: float,
    metrics: str,
    as_json: bool,
) -> int:
    """Run and judge the search, and say in `ended` how it ended; return the exit code."""
    with (
        exporting(status, metrics),
        stopping(search.interrupt, status.note),
        Display(status),
    ):
        outcome = search.run()
        status.phase = "recorded" if outcome.complete else "stopped"
    if outcome.error is not None:
        complain(outcome.error, EXIT_BROKE)
    elif outcome.interrupted:
        complain(f"interrupted: what was recorded is in {outcome.run_dir}", EXIT_BROKE)
    ended.clear()
    ended |= outcome.ended
    if outcome.failed_parity is not None:
        return show_parity(outcome.failed_parity, outcome.run_dir, as_json=as_json)
    if not has_requests(outcome.run_dir):
        if outcome.complete:
            why = f"--budget of {minutes:g} minutes was spent before an arm took any load: give more"
            complain(why, EXIT_BROKE)
            ended |= {"complete": False, "error": why}
        return without_verdict(outcome.run_dir, ended, as_json=as_json)
    run_dir = outcome.run_dir
    if after is not None:
        try:
            run_dir = join_runs([*after.directories, run_dir], out=f"{run_dir}-joined", accepted=after.accepted)
        except (RecordError, ConfigError, OSError) as error:
            status.note(f"judged by itself: {error}")
    status.phase = "judging"
    print(f"judging {run_dir}", file=sys.stderr)
    code = judge_run(run_dir, ended, as_json=as_json, broke=not outcome.complete)
    ended["judged"] = run_dir.name
    return code
