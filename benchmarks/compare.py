"""Whether `tailgate compare` sees what is there: runs with a planted fault, and equal ones of another day.

    python benchmarks/compare.py [decode] [equal] [--seeds 5] [--trials 6] [--seconds 20] [--lanes 1]

For each seed a baseline, then the same build with every engine step 20 % longer, and twice as it was (see
benchmarks/planted_arm.py), each compared with the baseline of its seed. Real servers
with a tiny model on the CPU, real Envoy and Locust, and traffic of its own for each run. Each line is a share of
comparisons beside what it must reach; the last line on stdout is one JSON object. Exit code 1 when a line misses its
goal. Five seeds take about an hour and a half on two processors, which must be quiet. With --lanes as many runs go on
side by side, each pinned to processors of its own: give each four or more. The runs are kept under --out, and one that
is there already is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


from analysis.compare.comparison import compare_runs
from benchmarks.environment import ROOT, child_environment
from benchmarks.planted_arm import VARIABLE
from loadtests.monitor.host import siblings

EXPERIMENT = """
name = "compared"
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
metrics = ["tpot"]
quantiles = [0.5]
margin = {margin}
cold_s = 0
min_blocks = 2
max_generator_lag_ms = {lag_ms}
[parity]
served = false
{more}
"""
PLANTED_ARM = (sys.executable, "-m", "benchmarks.planted_arm")


class Lanes:
    """Disjoint sets of this host's processors, equal in number; a run takes one and gives it back."""

    def __init__(self, count: int, processors: Sequence[int]) -> None:
        """Raises ValueError where a lane would have no processor."""
        each = len(processors) // count if count > 0 else 0
        if not each:
            raise ValueError(f"{count} lanes on {len(processors)} processors: give 1 to {len(processors)}")
        self.count = count
        self._free: SimpleQueue[frozenset[int]] = SimpleQueue()
        for lane in range(count):
            self._free.put(frozenset(processors[lane * each : (lane + 1) * each]))

    @contextmanager
    def one(self) -> Iterator[frozenset[int]]:
        """A lane that nobody else has meanwhile."""
        lane = self._free.get()
        try:
            yield lane
        finally:
            self._free.put(lane)


def all_processors() -> Lanes:
    """One lane of all processors that this process may use."""
    return Lanes(1, sorted(os.sched_getaffinity(0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How the runs are made."""

    folder: Path
    lanes: Lanes = field(default_factory=all_processors)
    trials: int
    seconds: float
    rate: float = 4.0
    lag_ms: float = 50.0  # of the generator, from which on its run is not believed
    more: str = ""  # of the experiment
    arm_command: Sequence[str] = PLANTED_ARM
    margin: float = 0.05  # of the decode time
    trust_machines: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of candidate: the fault, and the share of comparisons that must FAIL by it."""

    name: str
    planted: str
    per_seed: int
    least: float
    most: float


KINDS = (
    Kind(name="decode", planted="decode=1.2", per_seed=1, least=0.9, most=1.0),
    Kind(name="equal", planted="", per_seed=2, least=0.0, most=0.0),
)


def run_dir(plan: Plan, name: str, *, seed: int, planted: str) -> Path:
    """The directory of the run `name`, which is run unless it is there."""
    out = plan.folder / name
    if made := [path for path in out.glob("*/") if (path / "summary.json").exists()]:
        return made[0]
    out.mkdir(parents=True, exist_ok=True)
    experiment = out / "compared.toml"
    experiment.write_text(
        EXPERIMENT.format(
            seconds=plan.seconds,
            trials=plan.trials,
            rate=plan.rate,
            lag_ms=plan.lag_ms,
            margin=plan.margin,
            more=plan.more,
        )
    )
    arguments = ["run", str(experiment), "--out", str(out), "--seed", str(seed)]
    code = (
        "import sys; from loadtests.commands.main import main; "
        f"sys.exit(main({arguments!r}, arm_command={list(plan.arm_command)!r}))"
    )
    environment = {**child_environment(), VARIABLE: planted}
    with plan.lanes.one() as lane, (out / "log.txt").open("w") as log:
        # All that the run starts has the processors of the lane.
        pinned = f"import os; os.sched_setaffinity(0, {sorted(lane)}); {code}"
        subprocess.run(
            [sys.executable, "-c", pinned], cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False
        )
    made = [path for path in out.glob("*/") if (path / "summary.json").exists()]
    if not made:
        raise RuntimeError(f"{name} was not run: see {out / 'log.txt'}")
    return made[0]


def compared(plan: Plan, baseline: Path, candidate: Path) -> dict[str, Any]:
    """The comparison of a run with the baseline."""
    return compare_runs(baseline, candidate, arm="padded", trust_machines=plan.trust_machines)


def run_dirs(plan: Plan, kinds: Sequence[Kind], seeds: int) -> dict[str, Path]:
    """The directory of each run by its name, baselines first; as many at once as there are lanes."""
    runs = [(f"baseline-{seed}", 1000 + seed, "") for seed in range(seeds)]
    runs += [
        (f"{kind.name}-{seed}-{copy}", 2000 + 10 * seed + copy, kind.planted)
        for seed in range(seeds)
        for kind in kinds
        for copy in range(kind.per_seed)
    ]
    with ThreadPoolExecutor(plan.lanes.count) as pool:
        made = {name: pool.submit(run_dir, plan, name, seed=seed, planted=planted) for name, seed, planted in runs}
        return {name: future.result() for name, future in made.items()}


def outcomes(
    plan: Plan, kinds: Sequence[Kind], seeds: int, note: Callable[[Mapping[str, Any]], None]
) -> list[dict[str, Any]]:
    """What came of each comparison, one row each."""
    rows = []
    made = run_dirs(plan, kinds, seeds)
    for seed in range(seeds):
        for kind in kinds:
            for copy in range(kind.per_seed):
                summary = compared(plan, made[f"baseline-{seed}"], made[f"{kind.name}-{seed}-{copy}"])
                (latency,) = [row for row in summary["gates"] if row["kind"] == "noninferiority"]
                row = {
                    "kind": kind.name,
                    "seed": seed,
                    "verdict": latency["verdict"],
                    "ratio": latency["value"],
                    "blocked_by": latency["blocked_by"],
                }
                rows.append(row)
                note(row)
    return rows


def shares(rows: Sequence[Mapping[str, Any]], kinds: Sequence[Kind]) -> list[dict[str, Any]]:
    """For each kind, how many of its comparisons FAILed, and the goal."""
    lines = []
    for kind in kinds:
        own = [row for row in rows if row["kind"] == kind.name]
        failed = [row for row in own if row["verdict"] == "FAIL"]
        lines.append(
            {
                "kind": kind.name,
                "failed": len(failed),
                "of": len(own),
                "goal": f"{kind.least:g} to {kind.most:g}",
                "met": kind.least <= len(failed) / len(own) <= kind.most,
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
    parser.add_argument("--lanes", type=int, default=1, help="runs side by side, each on processors of its own")
    parser.add_argument("--out", default="runs/compared", help="where the runs are kept (default %(default)s)")
    parser.add_argument(
        "--without-references", action="store_true", help="take the machine for the same, and measure none of it"
    )
    options = parser.parse_args(arguments)
    kinds = [kind for kind in KINDS if kind.name in (options.kinds or names)]
    try:
        # Two threads of a core are neighbours here, so that they are in one lane.
        lanes = Lanes(options.lanes, sorted(os.sched_getaffinity(0), key=lambda cpu: (min(siblings(cpu)), cpu)))
    except ValueError as error:
        parser.error(str(error))
    plan = Plan(
        lanes=lanes,
        folder=Path(options.out).resolve(),
        trials=options.trials,
        seconds=options.seconds,
        more="[bed]\nreference_s = 0\n" if options.without_references else "",
        trust_machines=options.without_references,
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
