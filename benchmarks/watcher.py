"""What watching the machines costs, and whether it disturbs what is measured: pairs of trials with and without it.

    python benchmarks/watcher.py EXPERIMENT.toml [--pairs 5] [--set KEY=VALUE ...]

In each pair one trial of the experiment is run with `bed.sample_s = 1` and one with 0, in an order that changes from
pair to pair. Compared are the generator's own lag (p99 of how late it started requests, and of how late a waiting
greenlet ran) and the median decode step of each arm: the mean over pairs of the log ratio, watched against not, with
its 95 % t-interval. Beside them stands the processor time of the watcher itself. The last line on stdout is one JSON
object; the exit status is 1 where the watcher took more than 0.5 % of a processor in any trial.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scipy import stats

# First, since this file has the name of a module of the package beside it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.records.documents import content_of
from analysis.records.schemas import STEPS
from analysis.records.tables import read_table

MOST_PCT = 0.5
_RUN = (sys.executable, "-P", "-m", "loadtests.commands.main", "run")
_JUDGED = (0, 3, 99)  # a short trial is rarely decided, and that is not asked here


def measured(trial: Path) -> dict[str, float]:
    """The figures of one trial by name, in milliseconds."""
    account = content_of(trial / "generator-0.json")
    figures = {"lag p99": account["lag_ms"]["p99"], "loop lag p99": account["loop_lag_ms"]["p99"]}
    took_ns: dict[str, list[int]] = defaultdict(list)
    for step in read_table(trial / "steps.arrow", STEPS)[0].to_pylist():
        if step["kind"] == "decode":
            took_ns[step["arm"]].append(step["end_ns"] - step["start_ns"])
    return figures | {f"decode step {arm}": statistics.median(times) / 1e6 for arm, times in took_ns.items()}


def ratios(pairs: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]) -> dict[str, dict[str, float | None]]:
    """Of each figure that every pair has: watched against not, and the interval, null for a single pair."""
    names = [name for name in pairs[0][0] if all(min(on.get(name, 0), off.get(name, 0)) > 0 for on, off in pairs)]
    found: dict[str, dict[str, float | None]] = {}
    for name in names:
        logs = [math.log(on[name] / off[name]) for on, off in pairs]
        mean, half = statistics.fmean(logs), None
        if len(logs) > 1:
            half = float(stats.t.ppf(0.975, len(logs) - 1)) * statistics.stdev(logs) / math.sqrt(len(logs))
        ends = (None, None) if half is None else (math.exp(mean - half), math.exp(mean + half))
        found[name] = {"ratio": math.exp(mean), "low": ends[0], "high": ends[1]}
    return found


def run_trial(experiment: Path, settings: Sequence[str], *, sample_s: float) -> tuple[dict[str, float], Any]:
    """The figures of one trial, and what its watcher cost."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [*settings, "trials.count=1", f"bed.sample_s={sample_s:g}"]
        command = [*_RUN, str(experiment), "--out", folder, *(part for flag in flags for part in ("--set", flag))]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode not in _JUDGED:
            raise SystemExit(f"the run ended with exit code {done.returncode}: {done.stderr[-2000:]}")
        (trial,) = Path(folder).glob("*/trial-01")
        return measured(trial), (content_of(trial / "trial.json").get("bed") or {}).get("watcher")


def main() -> int:
    parser = argparse.ArgumentParser(description="Pairs of trials with and without the watcher.")
    parser.add_argument("experiment", type=Path)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of tailgate run")
    options = parser.parse_args()
    pairs: list[tuple[dict[str, float], dict[str, float]]] = []
    costs: list[float] = []
    for pair in range(options.pairs):
        got: dict[float, dict[str, float]] = {}
        for sample_s in (1.0, 0.0) if pair % 2 else (0.0, 1.0):
            got[sample_s], cost = run_trial(options.experiment, options.set, sample_s=sample_s)
            if cost:
                costs.append(100 * cost["cpu_s"] / cost["seconds"])
        pairs.append((got[1.0], got[0.0]))
        print(f"pair {pair + 1}: {json.dumps({'watched': got[1.0], 'not': got[0.0]})}", flush=True)
    compared = ratios(pairs)
    for name, row in compared.items():
        between = "" if row["low"] is None else f" [{row['low']:.3f}, {row['high']:.3f}]"
        print(f"{name}: {row['ratio']:.3f}{between}")
    print(f"watcher: {', '.join(f'{cost:.2f}' for cost in costs)} % of a processor")
    print(json.dumps({"pairs": options.pairs, "ratios": compared, "watcher_pct": costs}))
    return int(not costs or max(costs) > MOST_PCT)


if __name__ == "__main__":
    sys.exit(main())
