"""The commands that look at a run from further off, on the command line: plan | calibrate | breakeven."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from analysis.records.requests import RecordError
from servers import stdout
from servers.config import ConfigError


class AddCommand(Protocol):
    """Adds a command to the command line."""

    def __call__(self, name: str, summary: str, details: str, examples: str) -> argparse.ArgumentParser: ...


def add_plan(command: AddCommand) -> None:
    parser = command(
        "plan",
        "say how long a run must be",
        "For a wanted margin and power: from the spread that a pilot run saw, for every gate and beside them every\n"
        "metric and quantile, or without a pilot from rate and design. With --duration it also says which margin a\n"
        "run of that length decides. Nothing is run.",
        "  tailgate plan runs/20260101T120000Z-canary --margin 0.1 --power 0.8\n"
        "  tailgate plan runs/20260101T120000Z-canary --duration 3600\n"
        "  tailgate plan --rate 4 --design mirrored --margin 0.1\n"
        "  tailgate plan --rate 4 --design split --slo 'p99_ttft_ms <= 500'",
    )
    add = parser.add_argument
    add("run_dir", nargs="?", default="", metavar="RUN_DIR", help="a pilot: a directory that `tailgate run` wrote")
    add("--margin", type=float, default=None, metavar="M", help="accepted rise (default: the pilot's, or 0.1)")
    add("--power", type=float, default=0.8, metavar="P", help="chance that a gate is decided (default %(default)s)")
    add("--ratio", type=float, default=1.0, metavar="R", help="true ratio to plan for; 1 is equal arms (default 1)")
    add("--alpha", type=float, default=None, metavar="A", help="error of each gate (default: the pilot's, or 0.05)")
    add("--duration", type=float, default=None, metavar="S", help="which margins so many seconds decide")
    group = parser.add_argument_group("without a pilot")
    group.add_argument("--rate", type=float, default=None, metavar="R", help="requests/s to each arm")
    group.add_argument(
        "--design",
        default=None,
        choices=("mirrored", "split", "switchback", "separate"),
        help="separate: two runs at different times or hosts (default mirrored)",
    )
    group.add_argument(
        "--arrivals",
        default=None,
        choices=("steady", "wandering"),
        help="whether the rate is constant, as of traffic.arrivals = poisson, or wanders (default wandering)",
    )
    group.add_argument("--trials", type=int, default=None, metavar="N", help="trials that share the time (default 1)")
    group.add_argument("--slo", action="append", default=None, metavar="TARGET", help="such as 'p99_ttft_ms <= 500'")


def add_calibrate(command: AddCommand) -> None:
    parser = command(
        "calibrate",
        "say whether a run's verdicts can be trusted",
        "On its own data. The control is split into halves that are equal by construction, many times: how often do\n"
        "the tests of the verdict call one slower, and how often do they see a half that was made slower? Then how\n"
        "alike neighbouring blocks are, and whether trials differ by more than their blocks foretell.\n\n"
        "Exit codes: 0 trustworthy, 3 too few data to say, 99 do not trust, 2 not readable.",
        "  tailgate calibrate runs/20260101T120000Z-canary\n"
        "  tailgate calibrate runs/20260101T120000Z-canary --splits 400 --json | jq .reasons",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="a directory that `tailgate run` wrote")
    parser.add_argument("--splits", type=int, default=100, metavar="N", help="each way (default %(default)s)")
    parser.add_argument("--seed", type=int, default=None, metavar="N", help="replaces the experiment's seed")


def add_breakeven(command: AddCommand) -> None:
    parser = command(
        "breakeven",
        "say when a compiled arm pays, and the GPUs for a load",
        "From a saturation search: what a replica holds within the SLO, the GPUs for --load, and after how many\n"
        "requests or hours the GPU-seconds that an arm saves have paid for its start, with the interval of the search\n"
        "carried through. A run without a search only shows that what was offered was held.",
        "  tailgate breakeven runs/20260101T120000Z-search --load 200\n"
        "  tailgate breakeven runs/20260101T120000Z-search --load 200 --gpus-per-replica 2 --json",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="a directory that `tailgate run` wrote")
    parser.add_argument(
        "--load", type=float, default=None, metavar="R", help="requests/s in all (default: rollout.load_rps, or any)"
    )
    parser.add_argument(
        "--gpus-per-replica", type=int, default=None, metavar="N", help="(default: rollout.gpus_per_replica, or 1)"
    )


def plan(options: argparse.Namespace) -> int:
    """`tailgate plan`; the exit code."""
    from analysis.settings.slo_targets import parse_targets
    from loadtests.commands.plan import Traffic, Wanted, plan_from_design, plan_from_run, plan_text

    wanted = Wanted(
        margin=options.margin,
        power=options.power,
        ratio=options.ratio,
        alpha=options.alpha,
        duration_s=options.duration,
    )
    if options.run_dir:
        for flag in ("rate", "design", "arrivals", "trials", "slo"):
            if getattr(options, flag) is not None:
                raise ConfigError(
                    f"--{flag} is for a plan without a pilot, but RUN_DIR is given: leave one of them out"
                )
        return _told(options, lambda: plan_from_run(_directory(options.run_dir), wanted), plan_text)
    if options.rate is None:
        raise ConfigError("there is neither a pilot nor a rate: give RUN_DIR, or --rate R for requests/s to each arm")
    traffic = Traffic(
        rate=options.rate,
        design=options.design or "mirrored",
        arrivals=options.arrivals or "wandering",
        trials=1 if options.trials is None else options.trials,
    )
    return _told(
        options,
        lambda: plan_from_design(traffic, wanted, targets=parse_targets(options.slo or [], "--slo")),
        plan_text,
    )


def calibrate(options: argparse.Namespace) -> int:
    """`tailgate calibrate`; the exit code."""
    from loadtests.commands.calibrate import calibrate_run, calibration_text

    if options.seed is not None and options.seed < 0:
        raise ConfigError(f"--seed is {options.seed}: give a whole number from 0")
    return _told(
        options,
        lambda: calibrate_run(_directory(options.run_dir), splits=options.splits, seed=options.seed),
        calibration_text,
    )


def breakeven(options: argparse.Namespace) -> int:
    """`tailgate breakeven`; the exit code."""
    from loadtests.commands.breakeven import breakeven_of_run, breakeven_text

    return _told(
        options,
        lambda: breakeven_of_run(
            _directory(options.run_dir), load_rps=options.load, gpus_per_replica=options.gpus_per_replica
        ),
        breakeven_text,
    )


def _directory(text: str) -> Path:
    if not Path(text).is_dir():
        raise ConfigError(f'run directory "{text}" does not exist: give one that `tailgate run` wrote')
    return Path(text)


def _told(
    options: argparse.Namespace, find: Callable[[], dict[str, Any]], words: Callable[[Mapping[str, Any]], str]
) -> int:
    """What was found is on stdout, in words or as JSON. Its exit code, 0 where it has none."""
    try:
        found = find()
    except RecordError as error:
        raise ConfigError(str(error)) from None
    stdout.write(words(found), found, as_json=options.json)
    return int(found.get("exit_code", 0))
