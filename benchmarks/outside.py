"""How far compiles are called from outside on real runs: the same arms' telemetry says what was there to be called.

    python benchmarks/outside.py run [SCENARIO ...] --out runs [--model random:tiny] [--devices cpu] [--seconds 240]
    python benchmarks/outside.py judge [RUN ...]     # without RUN the kept ones

Arms: `eager` (the control); `naive`, compiled by torch's defaults, warmed with one short request; `lengths`, the same,
warmed with prompts of many lengths, one at a time; `steps`, which pads to a ladder and compiles each of its steps when
traffic first reaches it. Scenarios, each half of a trace of its own:

    longer    prompts up to an eighth of the longest, then up to the longest: steps of the ladder that nothing reached
    shorter   long prompts, then short ones
    batches   requests that hardly overlap, then ten times as many
    steady    the same conversations all the time

`run` sends each scenario to all arms at once and keeps the run; `judge` prints, by arm and run, the compiles that
telemetry has and that met a request, how many of them were seen as a stall and called a compile by the records of
requests alone, and calls that were no compile. The last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.arrays import Floats, Ints
from analysis.summary.summary import analyze
from benchmarks.kept import unpack

KEPT = ("h100-from-outside", "cpu-from-outside")
_EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
_COUNTS = ("telemetry", "seen", "called", "extra")
_SIGMA = 0.985  # of the logarithm of the lengths of Azure's conversations of 2023, as traffic.workload has it

# One half of a trace: (requests/s as a share of --rate, shortest and longest prompt as a share of the most).
Half = tuple[float, float, float]
SCENARIOS: Mapping[str, tuple[Half, Half]] = {
    "longer": ((1.0, 0.0, 0.125), (1.0, 0.0, 1.0)),
    "shorter": ((0.5, 0.5, 1.0), (1.0, 0.0, 0.125)),
    "batches": ((0.1, 0.0, 0.5), (1.0, 0.0, 0.5)),
    "steady": ((1.0, 0.0, 1.0), (1.0, 0.0, 1.0)),
}


def trace(
    scenario: str, *, seconds: float, rate: float, most_prompt: int, most_answer: int, seed: int
) -> Iterator[tuple[float, int, int]]:
    """(second, prompt tokens, answer tokens) of each request, rising: Poisson arrivals, log-normal lengths."""
    rng = np.random.default_rng([seed, *scenario.encode()])
    for number, (share, low, high) in enumerate(SCENARIOS[scenario]):
        half = seconds / 2.0
        times = np.sort(rng.uniform(0.0, half, rng.poisson(share * rate * half)))
        bounds = (max(1, round(low * most_prompt)), round(high * most_prompt))
        prompts = _lengths(rng, len(times), *bounds)
        answers = _lengths(rng, len(times), max(1, most_answer // 16), most_answer)
        yield from zip((number * half + times).tolist(), prompts.tolist(), answers.tolist(), strict=True)


def _lengths(rng: np.random.Generator, count: int, low: int, high: int) -> Ints:
    """Log-normal about a quarter of the way from `low` to `high`, within both."""
    values: Floats = rng.lognormal(np.log(low + 0.25 * (high - low)), _SIGMA, count)
    return np.clip(values, low, high).astype(np.int64)


def experiment(scenario: str, options: argparse.Namespace, path: Path) -> str:
    """The experiment as TOML; its trace lies at `path`."""
    on_gpu = options.devices[0] != "cpu"
    naive = 'preset = "compiled-naive"'
    steps = (
        naive,
        "[arms.shapes]",
        'kind = "buckets"',
        "[arms.compile]",
        "dynamic = false",
        "regional = true",
        "recompile_limit = 256",
    )
    arms = {
        "eager": ('preset = "eager"', "control = true"),
        "naive": (naive,),
        "lengths": (naive, "[arms.compile]", 'warmup = "lengths"'),
        "steps": steps,
    }
    lines = [
        f'name = "outside-{scenario}"',
        f"seed = {options.seed}",
        "[model]",
        f'id = "{options.model}"',
        f'dtype = "{"bfloat16" if on_gpu else "float32"}"',
        *(['attention = "sdpa"'] if on_gpu else []),
        "[engine]",
        f"slots = {options.slots}",
        "max_queue = 512",
        f"max_prompt_tokens = {options.most_prompt}",
        f"max_new_tokens = {options.most_answer}",
        *([] if on_gpu else ["threads = 1"]),
        "[traffic]",
        'design = "mirrored"',
        "direct = true",
        f"duration_s = {options.seconds}",
        'arrivals = "trace"',
        'workload = "trace"',
        f'trace = "{path}"',
        "timeout_s = 120",
        "[trials]",
        "count = 1",
        f"starting_at_once = {len(arms) if on_gpu else 2}",
        "ready_timeout_s = 600",
    ]
    for number, (name, own) in enumerate(arms.items()):
        device = options.devices[number % len(options.devices)]
        lines += ["[[arms]]", f'name = "{name}"', *own, "[arms.model]", f'device = "{device}"']
    return "\n".join(lines) + "\n"


def run(options: argparse.Namespace) -> list[Path]:
    """Each scenario has run; the run directories."""
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    directories = []
    for scenario in options.names or SCENARIOS:
        path = (out / f"{scenario}.csv").resolve()
        rows = trace(
            scenario,
            seconds=options.seconds,
            rate=options.rate,
            most_prompt=options.most_prompt,
            most_answer=options.most_answer,
            seed=options.seed,
        )
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("TIMESTAMP", "ContextTokens", "GeneratedTokens"))
            # A trace begins with its first request, and must cover the trial.
            for second, prompt, answer in ((0.0, 1, 1), *rows, (options.seconds + 1.0, 1, 1)):
                writer.writerow(((_EPOCH + timedelta(seconds=second)).strftime("%Y-%m-%d %H:%M:%S.%f"), prompt, answer))
        written = out / f"{scenario}.toml"
        written.write_text(experiment(scenario, options, path))
        before = set(out.glob(f"*-outside-{scenario}"))
        command = [
            sys.executable,
            "-m",
            "loadtests.commands.main",
            "run",
            str(written),
            "--out",
            str(out),
            "--page",
            "off",
        ]
        subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
        directories += sorted(set(out.glob(f"*-outside-{scenario}")) - before)
    return directories


def agreements(directory: Path) -> list[dict[str, Any]]:
    """A row for each arm of the run that has telemetry of compiles, or stalls."""
    summary = analyze(directory)
    rows = []
    for arm in summary["arms"]:
        outside = arm["blackbox"]
        agreement = outside["agreement"] or dict.fromkeys(_COUNTS, 0)
        rows.append(
            {
                "run": directory.name,
                "arm": arm["name"],
                **{name: agreement[name] for name in _COUNTS},
                "unexplained": outside["unexplained"] + outside["part"],
                "onset_error_ms": agreement.get("onset_error_ms"),
            }
        )
    return rows


def kept_runs() -> list[Path]:
    """Return the run directories of the kept archives."""
    results = Path(__file__).parent / "results"
    return [run for name in KEPT for run in sorted(unpack(results / f"{name}.tar.xz").iterdir()) if run.is_dir()]


def show(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The table is on stdout; the sums."""
    print(f"{'run':<20}{'arm':<10}{'compiles':>9}{'seen':>6}{'called':>8}{'wrong':>7}{'open':>6}")
    for row in rows:
        print(
            f"{row['run']:<20}{row['arm']:<10}{row['telemetry']:>9}{row['seen']:>6}{row['called']:>8}{row['extra']:>7}"
            f"{row['unexplained']:>6}"
        )
    total = {name: sum(row[name] for row in rows) for name in _COUNTS}
    made = total["called"] + total["extra"]
    return total | {
        "recall": total["called"] / total["telemetry"] if total["telemetry"] else None,
        "precision": total["called"] / made if made else None,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="python benchmarks/outside.py"
    )
    parser.add_argument("action", choices=["run", "judge"])
    parser.add_argument("names", nargs="*", metavar="SCENARIO|RUN")
    parser.add_argument("--out", default="runs", help="where runs are kept (%(default)s)")
    parser.add_argument("--model", default="random:tiny")
    parser.add_argument("--devices", default="cpu", type=_devices, help="between commas; arms take turns (%(default)s)")
    parser.add_argument("--seconds", type=float, default=240.0, help="of traffic, a scenario (%(default)s)")
    parser.add_argument("--rate", type=float, default=3.0, help="requests/s to each arm (%(default)s)")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--most-prompt", type=int, default=192, help="tokens (%(default)s)")
    parser.add_argument("--most-answer", type=int, default=48, help="tokens (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    if options.action == "run":
        for name in options.names:
            if name not in SCENARIOS:
                parser.error(f'scenario "{name}" is unknown: use {", ".join(SCENARIOS)}')
        directories = run(options)
    else:
        directories = [Path(name) for name in options.names] or kept_runs()
    rows = [row for directory in directories for row in agreements(directory)]
    total = show(rows)
    print(json.dumps({"benchmark": "outside", "rows": rows, **total}))
    return 0


def _devices(text: str) -> list[str]:
    return text.split(",")


if __name__ == "__main__":
    sys.exit(main())
