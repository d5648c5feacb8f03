"""Whether `tailgate compare` sees what is there: releases with a planted fault, and equal ones of another day.

    python benchmarks/releases.py [decode] [memory] [equal] [--seeds 5] [--trials 6] [--seconds 20]

First a folder of baselines, a run for each seed. Then for each seed the same build with every engine step 10 % longer,
with 30 % more memory, and twice as it was (see benchmarks/planted_arm.py), each compared with the folder. Real servers
with a tiny model on the CPU, real Envoy and Locust, and traffic of its own for each run. Each line is a share of
comparisons beside what it must reach; the last line on stdout is one JSON object. Exit code 1 when a line misses its
goal. Five seeds take about an hour and a half on two processors, which must be quiet. The runs are kept under --out,
and one that is there already is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.releases.comparison import arms_to_compare, compare_releases
from analysis.releases.history import History, by_time
from analysis.releases.release import read_release
from analysis.settings.release_limits import ReleaseLimits
from benchmarks.environment import ROOT, child_environment
from benchmarks.planted_arm import VARIABLE

EXPERIMENT = """
name = "release"
[model]
id = "random:tiny"
dtype = "float32"
device = "cpu"
[engine]
slots = 8
max_prompt_tokens = 192
max_new_tokens = 48
threads = 1
[[arms]]
name = "eager"
preset = "eager"
control = true
[[arms]]
name = "padded"
preset = "eager-padded"
[traffic]
duration_s = {seconds}
arrivals = "poisson"
rate = {rate}
workload = "conversation"
length_scale = 0.06
timeout_s = 60
block_s = 3
[trials]
count = {trials}
starting_at_once = 2
[slo]
p99_e2e_ms = 6000
[gates]
draws = 99
cold_s = 0
min_blocks = 2
max_generator_lag_ms = {lag_ms}
[parity]
served = false
{more}
"""
PLANTED_ARM = (sys.executable, "-m", "benchmarks.planted_arm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How the runs are made."""

    folder: Path
    trials: int
    seconds: float
    rate: float = 4.0
    lag_ms: float = 50.0  # of the generator, from which on its run is not believed
    more: str = ""  # of the experiment
    arm_command: Sequence[str] = PLANTED_ARM
    limits: ReleaseLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of candidate: the fault, the figure that shows it, and the share of comparisons that must FAIL by it."""

    name: str
    planted: str
    figure: str
    per_seed: int
    least: float
    most: float


KINDS = (
    Kind(name="decode", planted="decode=1.1", figure="p50_tpot_ms", per_seed=1, least=0.9, most=1.0),
    Kind(name="memory", planted="memory=1.3", figure="process_peak_bytes", per_seed=1, least=0.9, most=1.0),
    Kind(name="equal", planted="", figure="", per_seed=2, least=0.0, most=0.0),
)


def run_dir(plan: Plan, name: str, *, seed: int, planted: str) -> Path:
    """The directory of the run `name`, which is run unless it is there."""
    out = plan.folder / name
    if made := [path for path in out.glob("*/") if (path / "summary.json").exists()]:
        return made[0]
    out.mkdir(parents=True, exist_ok=True)
    experiment = plan.folder / "release.toml"
    experiment.write_text(
        EXPERIMENT.format(seconds=plan.seconds, trials=plan.trials, rate=plan.rate, lag_ms=plan.lag_ms, more=plan.more)
    )
    arguments = ["run", str(experiment), "--out", str(out), "--seed", str(seed)]
    code = (
        "import sys; from loadtests.commands.main import main; "
        f"sys.exit(main({arguments!r}, arm_command={list(plan.arm_command)!r}))"
    )
    environment = {**child_environment(), VARIABLE: planted, "PYTHONPATH": str(ROOT)}
    with (out / "log.txt").open("w") as log:
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False
        )
    made = [path for path in out.glob("*/") if (path / "summary.json").exists()]
    if not made:
        raise RuntimeError(f"{name} was not run: see {out / 'log.txt'}")
    return made[0]


def compared(plan: Plan, baselines: History, candidate: Path) -> dict[str, Any]:
    """The comparison of a run with the newest of the baselines."""
    later = read_release(candidate)
    arms = arms_to_compare(baselines.newest, later)
    return compare_releases(baselines, later, arms=arms, limits=plan.limits)


def outcomes(
    plan: Plan, kinds: Sequence[Kind], seeds: int, note: Callable[[Mapping[str, Any]], None]
) -> list[dict[str, Any]]:
    """What came of each comparison, one row each."""
    rows = []
    earlier = [run_dir(plan, f"baseline-{seed}", seed=1000 + seed, planted="") for seed in range(seeds)]
    baselines = History(releases=by_time([read_release(path) for path in earlier]))
    for seed in range(seeds):
        for kind in kinds:
            for copy in range(kind.per_seed):
                name = f"{kind.name}-{seed}-{copy}"
                candidate = run_dir(plan, name, seed=2000 + 10 * seed + copy, planted=kind.planted)
                document = compared(plan, baselines, candidate)
                failed = [row["figure"] for row in document["figures"] if row["verdict"] == "FAIL"]
                own = [row for row in document["figures"] if row["figure"] == kind.figure]
                row = {
                    "kind": kind.name,
                    "seed": seed,
                    "verdict": document["overall"],
                    "failed": sorted(set(failed)),
                    "ratios": {row["arm"]: row["ratio"] for row in own},
                    "doubts": sorted({row["doubt"] for row in document["figures"] if row["doubt"]}),
                    "machine": [arm["machine"]["text"] for arm in document["arms"] if arm["machine"]["text"]],
                }
                rows.append(row)
                note(row)
    return rows


def shares(rows: Sequence[Mapping[str, Any]], kinds: Sequence[Kind]) -> list[dict[str, Any]]:
    """For each kind, how many of its comparisons FAILed by what was planted (of equal ones: at all), and the goal."""
    lines = []
    for kind in kinds:
        own = [row for row in rows if row["kind"] == kind.name]
        failed = [row for row in own if (kind.figure in row["failed"] if kind.figure else row["verdict"] == "FAIL")]
        share = len(failed) / len(own)
        lines.append(
            {
                "kind": kind.name,
                "failed": len(failed),
                "of": len(own),
                "goal": f"{kind.least:g} to {kind.most:g}",
                "met": kind.least <= share <= kind.most,
            }
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [kind.name for kind in KINDS]
    parser.add_argument("kinds", nargs="*", choices=[*names, []], metavar="KIND", help=", ".join(names))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=20.0, help="of traffic in each trial (default %(default)s)")
    parser.add_argument("--out", default="runs/releases", help="where the runs are kept (default %(default)s)")
    parser.add_argument(
        "--without-references", action="store_true", help="take the machine for the same, and measure none of it"
    )
    options = parser.parse_args(arguments)
    kinds = [kind for kind in KINDS if kind.name in (options.kinds or names)]
    plan = Plan(
        folder=Path(options.out).resolve(),
        trials=options.trials,
        seconds=options.seconds,
        more="[bed]\nreference_s = 0\n" if options.without_references else "",
        limits=ReleaseLimits(need_references=not options.without_references),
    )
    rows = outcomes(plan, kinds, options.seeds, lambda row: print(json.dumps(row), file=sys.stderr, flush=True))
    lines = shares(rows, kinds)
    for line in lines:
        missed = "" if line["met"] else " MISSED"
        print(f"{line['kind']:8} {line['failed']} of {line['of']} FAIL (goal {line['goal']}){missed}")
    print(json.dumps({"lines": lines, "rows": rows, "cpus": os.cpu_count()}))
    return 0 if all(line["met"] for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
