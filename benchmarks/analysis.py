"""What judging costs: seconds and memory of `tailgate analyze`, without loading its modules.

    python benchmarks/analysis.py [--requests 1000000]

Makes a run of two mirrored arms in a temporary folder, in trials of an hour, with `--requests` rows in all, second by
second, and analyzes it in a fresh process, with summary and reports written. Memory is the most that is added while it
runs. The last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.compute as pc

# First, since this file has the name of the package next to it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.command import Ledger
from benchmarks.simulation.records import EPOCH_NS, request_table
from tailgate.analysis.arrays import Ints
from tailgate.analysis.records.documents import EDITED
from tailgate.analysis.records.schemas import REQUESTS
from tailgate.analysis.records.tables import RecordWriter
from tailgate.analysis.report import write_reports
from tailgate.analysis.summary.summary import analyze, write_summary
from tailgate.loadtests.trials.environment import describe_environment

METRIC = "e2e"
SECONDS = 3600  # of a trial
MOST_OF_A_TRIAL = 10_000_000


def write_run(directory: Path, *, requests: int, seed: int) -> int:
    """Write a run of `requests` rows, half of each arm, in trials of an hour; the bytes of its records."""
    trials = max(1, round(requests / MOST_OF_A_TRIAL))
    directory.mkdir(parents=True)
    (directory / "experiment.toml").write_text(
        f'name = "benchmark"\nseed = {seed}\n[[arms]]\nname = "eager"\ncontrol = true\n[[arms]]\nname = "compiled"\n'
        f'[traffic]\ndesign = "mirrored"\ntimeout_s = 120\n[gates]\nmetrics = ["{METRIC}"]\n{EDITED}\n'
    )
    rng = np.random.default_rng(seed)
    return sum(_write_trial(directory, number, requests // trials // 2, rng) for number in range(1, trials + 1))


def _write_trial(directory: Path, number: int, pairs: int, rng: np.random.Generator) -> int:
    """Write a trial, each second as a batch; the bytes of its records."""
    folder = directory / f"trial-{number:02d}"
    folder.mkdir()
    start_ns = EPOCH_NS + number * 2 * SECONDS * 10**9
    trial = {
        "trial": number,
        "design": "mirrored",
        "start_ns": start_ns,
        "duration_s": SECONDS,
        "block_s": 30,
        "open_loop": True,
        "complete": True,
        "planned": {"eager": pairs, "compiled": pairs},
    }
    (folder / "trial.json").write_text(json.dumps(trial))
    counts = rng.multinomial(pairs, np.full(SECONDS, 1.0 / SECONDS))
    level = np.repeat(np.exp(0.1 * rng.standard_normal(SECONDS // 30)), 30)
    first = 0
    path = folder / "requests-0.arrow"
    with RecordWriter(path, REQUESTS) as writer:
        for second, count in enumerate(counts.tolist()):
            if count:
                due = start_ns + second * 10**9 + (np.sort(rng.random(count)) * 1e9).astype(np.int64)
                writer.append_batch(_batch(number, first, due, float(level[second]), rng))
                first += count
    return path.stat().st_size


def _batch(trial: int, first: int, scheduled: Ints, level: float, rng: np.random.Generator) -> pa.RecordBatch:
    """Return the requests of one second on both arms."""
    count, prefix = len(scheduled), str(trial)
    output = np.clip(rng.lognormal(5.019, 0.859, count), 1, 2000).astype(np.int32)
    prompt = rng.integers(16, 4096, count).astype(np.int32)
    numbers = np.arange(first, first + count)
    names = pa.array(numbers).cast(pa.string())
    arms = []
    for arm in ("eager", "compiled"):
        wait = np.exp(0.3 * rng.standard_normal(count)) * level
        ttft = (0.08e9 * wait).astype(np.int64)
        took = ttft + (0.02e9 * wait * (output - 1)).astype(np.int64)
        arms.append(
            request_table(
                scheduled + 300_000,
                trial=trial,
                scheduled_ns=scheduled,
                request_id=pc.binary_join_element_wise(prefix, names, arm, "-"),
                session_id=pc.binary_join_element_wise(prefix, pa.array(numbers // 3).cast(pa.string()), "-"),
                arm=arm,
                replica=f"{arm}-0",
                pair_id=pc.binary_join_element_wise(prefix, names, "-"),
                first_token_ns=scheduled + ttft,
                end_ns=scheduled + took,
                prompt_tokens=prompt,
                max_tokens=2048,
                output_tokens=output,
                compile_stall_ns=0,
                server_recv_ns=scheduled + 400_000,
                server_end_ns=scheduled + took - 100_000,
                phase="measure",
            )
        )
    return pa.concat_tables(arms).combine_chunks().to_batches()[0]


def whole(directory: Path) -> dict[str, Any]:
    """Measure all of `tailgate analyze`, including the summary and the reports in the run directory."""
    before, began, worked = psutil.Process().memory_info().rss, time.perf_counter(), time.process_time()
    summary = analyze(directory)
    judged = time.perf_counter()
    write_summary(summary, directory / "summary.json")
    write_reports(summary, directory)
    ended = time.perf_counter()
    return {
        "seconds": ended - began,
        "judge_s": judged - began,
        "cpu_s": time.process_time() - worked,
        "added_mb": (_peak_bytes() - before) / 1e6,
        "verdict": summary["overall"],
    }


def _peak_bytes() -> int:
    """Return the peak memory of this process. `ru_maxrss` starts at the peak of the process that started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=1_000_000, help="rows, both arms together (%(default)s)")
    options = parser.parse_args(arguments)
    if options.requests < 2 * SECONDS:
        parser.error(f"--requests is {options.requests}: give at least {2 * SECONDS}, one a second and arm")
    # One thread in the linear algebra, as on a machine that has other work to do.
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    ledger, spawn = Ledger(), multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as place, ProcessPoolExecutor(1, mp_context=spawn) as fresh:
        directory = Path(place) / "run"
        size = write_run(directory, requests=options.requests, seed=1)
        ledger.add("records", requests=options.requests, mb=size / 1e6)
        ledger.add("analyze", **fresh.submit(whole, directory).result())
    return ledger.finish("analysis", arguments, machine=describe_environment())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
