"""What judging costs: seconds and memory from a run's Arrow files to comparisons, beside scipy's bootstrap.

    python benchmarks/analysis.py [--requests 1000000] [--tokens 0] [--peer-draws 999] [--run DIR]

Makes a run of two mirrored arms in a temporary folder, an hour long, with `--requests` rows in all, second by second;
with `--run` it is kept, and used where it is there. In a process of its own for each, once its modules are loaded: (1)
*comparisons*: `read_run`, `Run.of` and the comparisons of p50, p95 and p99 of E2E of the arm with the control over 999
draws, all within the clock; (2) *analyze*: all of `tailgate analyze` but its imports, with summary and reports
written; (3) *peer*: `scipy.stats.bootstrap` by percentiles of the same log ratios of the same latencies, which are in
memory before its clock starts, of all quantiles at once and in a call each. Memory is the most that is added while it
runs. The last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy import stats

# First, since this file has the name of the package beside it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.arrays import Floats
from analysis.judging.comparisons import compared, judge_quantiles
from analysis.records.run_records import read_run
from analysis.records.schemas import REQUESTS
from analysis.records.tables import Checksum
from analysis.report import write_reports
from analysis.run.run import Run
from analysis.summary.summary import analyze, write_summary
from benchmarks.simulation.records import EPOCH_NS, request_table, to_ns, token_lists

QUANTILES = (0.5, 0.95, 0.99)
DRAWS = 999
METRIC = "e2e"
SECONDS = 3600

_PEER_BATCH = 1  # what a batch larger than the processor's cache gains is lost in fetching it


# --- The run ----------------------------------------------------------------------------------------------------------


def write_run(
    directory: Path, *, requests: int, tokens: int, seed: int, seconds: int = SECONDS, together: int = 1
) -> int:
    """A run of `requests` rows, half of each arm, lies in `directory`. Returns the bytes of its records.

    Each second is a batch, as the recorder writes it; of a long run so many seconds `together`, a divisor of 30.
    `tokens` is the times kept for each request, 0 for none.
    """
    folder = directory / "trial-01"
    folder.mkdir(parents=True)
    (directory / "experiment.toml").write_text(
        f'name = "benchmark"\nseed = {seed}\n[[arms]]\nname = "eager"\ncontrol = true\n[[arms]]\nname = "compiled"\n'
        f'[traffic]\ndesign = "mirrored"\ntimeout_s = 120\n[gates]\nmetrics = ["{METRIC}"]\n'
    )
    pairs = requests // 2
    trial = {
        "trial": 1,
        "design": "mirrored",
        "start_ns": EPOCH_NS,
        "duration_s": seconds,
        "block_s": 30,
        "open_loop": True,
        "complete": True,
        "planned": {"eager": pairs, "compiled": pairs},
    }
    (folder / "trial.json").write_text(json.dumps(trial))
    rng = np.random.default_rng(seed)
    batches = seconds // together
    counts = rng.multinomial(pairs, np.full(batches, 1.0 / batches))
    level = np.repeat(np.exp(0.1 * rng.standard_normal(seconds // 30)), 30)
    first = 0
    path = folder / "requests-0.arrow"
    checksum = Checksum()
    with path.open("wb") as file:

        def write(piece: pa.Buffer | bytes, rows: int) -> None:
            file.write(piece)
            checksum.add(memoryview(piece), rows)

        write(REQUESTS.serialize(), 0)
        for second, count in zip(range(0, batches * together, together), counts.tolist(), strict=True):
            if count:
                due = second + together * np.sort(rng.random(count))
                batch = _batch(first, due, float(level[second]), tokens, rng)
                write(batch.serialize(), batch.num_rows)
                first += count
        file.write(checksum.end())
    return path.stat().st_size


def _batch(first: int, due: Floats, level: float, tokens: int, rng: np.random.Generator) -> pa.RecordBatch:
    """The requests of one second on both arms."""
    count = len(due)
    output = np.clip(rng.lognormal(5.019, 0.859, count), 1, 2000).astype(np.int32)
    prompt = rng.integers(16, 4096, count).astype(np.int32)
    numbers = np.arange(first, first + count)
    names = pa.array(numbers).cast(pa.string())
    scheduled = to_ns(due)
    arms = []
    for arm in ("eager", "compiled"):
        wait = np.exp(0.3 * rng.standard_normal(count)) * level
        ttft = (0.08e9 * wait).astype(np.int64)
        took = ttft + (0.02e9 * wait * (output - 1)).astype(np.int64)
        times = None
        if tokens:
            shares = np.linspace(0.0, 1.0, tokens)
            offsets = (ttft[:, None] + shares * (took - ttft)[:, None]).astype(np.int64).ravel()
            times = token_lists(offsets, np.full(count, tokens))
        arms.append(
            request_table(
                scheduled + 300_000,
                scheduled_ns=scheduled,
                request_id=pc.binary_join_element_wise("1", names, arm, "-"),
                session_id=pc.binary_join_element_wise("1", pa.array(numbers // 3).cast(pa.string()), "-"),
                arm=arm,
                replica=f"{arm}-0",
                pair_id=pc.binary_join_element_wise("1", names, "-"),
                first_token_ns=scheduled + ttft,
                end_ns=scheduled + took,
                prompt_tokens=prompt,
                max_tokens=2048,
                output_tokens=output,
                token_ns=times,
                compile_stall_ns=0,
                batch_id=numbers // 4,
                server_recv_ns=scheduled + 400_000,
                server_end_ns=scheduled + took - 100_000,
                phase="measure",
            )
        )
    return pa.concat_tables(arms).combine_chunks().to_batches()[0]


# --- The contestants, each in a process of its own --------------------------------------------------------------------


def comparisons(directory: Path) -> dict[str, Any]:
    """Reading, cutting and comparing; the seconds of each, and the ratios."""
    began, worked = time.perf_counter(), time.process_time()
    records = [read_run(directory)]
    read = time.perf_counter()
    run = Run.of(records.pop())  # which lets go of the table, as `analyze` does
    cut, before = time.perf_counter(), time.process_time()
    ratios = judge_quantiles(run, "compiled", METRIC, "steady", qs=QUANTILES)
    ended = time.perf_counter()
    return {
        "seconds": ended - began,
        "read_s": read - began,
        "cut_s": cut - read,
        "compare_s": ended - cut,
        "cpu_s": time.process_time() - worked,
        "compare_cpu_s": time.process_time() - before,
        "ratios": [[item.low, item.ratio, item.high] for item in ratios],
    }


def whole(directory: Path) -> dict[str, Any]:
    """All of `tailgate analyze`: the summary and the reports are in the run directory."""
    began, worked = time.perf_counter(), time.process_time()
    summary = analyze(directory)
    judged = time.perf_counter()
    write_summary(summary, directory / "summary.json")
    write_reports(summary, directory)
    ended = time.perf_counter()
    return {
        "seconds": ended - began,
        "judge_s": judged - began,
        "cpu_s": time.process_time() - worked,
        "verdict": summary["overall"],
    }


def peer(directory: Path, draws: int, *, together: bool = True) -> dict[str, Any]:
    """scipy's bootstrap of the three log ratios: `together` from the same resamples, else in a call each."""
    run = Run.of(read_run(directory))
    samples = [sample.values for sample in compared(run, "compiled", METRIC, "steady")]

    def log_ratios(treatment: Floats, control: Floats, axis: int, qs: tuple[float, ...]) -> Floats:
        above, below = (np.quantile(values, qs, axis=axis, method="linear") for values in (treatment, control))
        return np.asarray(np.log(above / below))

    began, worked = time.perf_counter(), time.process_time()
    limits: list[list[float]] = []
    for qs in (QUANTILES,) if together else tuple((q,) for q in QUANTILES):
        interval = stats.bootstrap(
            samples,
            partial(log_ratios, qs=qs),
            n_resamples=draws,
            batch=_PEER_BATCH,
            vectorized=True,
            paired=False,
            axis=-1,
            confidence_level=0.9,
            method="percentile",
            rng=np.random.default_rng(1),
        ).confidence_interval
        limits += np.exp(np.column_stack((interval.low, interval.high))).tolist()
    return {
        "seconds": time.perf_counter() - began,
        "cpu_s": time.process_time() - worked,
        "draws": draws,
        "requests": sum(len(sample) for sample in samples),
        "limits": limits,
    }


def memory_mb(key: str) -> float:
    """VmRSS or VmHWM (its highest so far) of this process, in MB of 10^6 bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError(f"/proc/self/status has no {key}: run this on Linux")


def alone(what: str, directory: Path, draws: int) -> dict[str, Any]:
    """`what`, done in a fresh process, and the memory that it took beyond what the loaded modules take."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(here, what, directory, draws).result()


def here(what: str, directory: Path, draws: int) -> dict[str, Any]:
    """`what`, done in this process."""
    before = memory_mb("VmRSS")
    if what == "comparisons":
        figures = comparisons(directory)
    else:
        figures = whole(directory) if what == "analyze" else peer(directory, draws, together=what == "peer")
    return {**figures, "added_mb": memory_mb("VmHWM") - before}


def memory(figures: dict[str, Any]) -> str:
    return f"{figures['added_mb']:6.0f} MB"


# --- The command ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=1_000_000, help="rows, both arms together (%(default)s)")
    parser.add_argument("--tokens", type=int, default=0, help="token times a request (default: none)")
    parser.add_argument("--peer-draws", type=int, default=DRAWS, help="of scipy's, scaled to 999; 0: no peer")
    parser.add_argument("--repeats", type=int, default=3, help="of the comparisons; the median counts (%(default)s)")
    parser.add_argument("--run", type=Path, help="where the run is made and kept; one that is there is used")
    options = parser.parse_args(arguments)
    if options.requests < 2 * SECONDS:
        parser.error(f"--requests is {options.requests}: give at least {2 * SECONDS}, one a second and arm")
    # One thread in the linear algebra, as on a machine that has other work to do.
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as place:
        directory = options.run or Path(place) / "run"
        if not directory.exists():
            write_run(directory, requests=options.requests, tokens=options.tokens, seed=1)
        size = sum(path.stat().st_size for path in directory.glob("trial-*/requests-*.arrow"))
        times = f", {options.tokens} token times each" if options.tokens else ""
        print(f"{options.requests:,} requests, {size / 1e6:.0f} MB of records{times}")
        tries = [alone("comparisons", directory, 0) for _ in range(options.repeats)]
        own = {key: statistics.median(row[key] for row in tries) for key in tries[0] if key != "ratios"}
        print(
            f"comparisons  {own['seconds']:8.2f} s  (read {own['read_s']:.2f}, cut {own['cut_s']:.2f}, "
            f"compare {own['compare_s']:.2f})  {memory(own)}"
        )
        analyzed = alone("analyze", directory, 0)
        print(
            f"analyze      {analyzed['seconds']:8.2f} s  ({analyzed['cpu_s']:.1f} of the processor)  {memory(analyzed)}"
        )
        result: dict[str, Any] = {
            "benchmark": "analysis",
            "requests": options.requests,
            "tokens": options.tokens,
            "records_mb": size / 1e6,
            "draws": DRAWS,
            "quantiles": QUANTILES,
            "comparisons": own | {"ratios": tries[0]["ratios"]},
            "analyze": analyzed,
        }
        if options.peer_draws:
            for name, way in (("peer", "all quantiles at once"), ("peer-apart", "a call a quantile")):
                other = alone(name, directory, options.peer_draws)
                scale = DRAWS / other["draws"]
                # In processor time, which other work on the machine changes less than it does the clock.
                ratios = {
                    "all": scale * other["cpu_s"] / own["cpu_s"],
                    "comparing": scale * other["cpu_s"] / own["compare_cpu_s"],
                }
                result[name] = other | {"seconds_999": scale * other["seconds"], "times_faster": ratios}
                print(
                    f"bootstrap    {scale * other['seconds']:8.2f} s  ({other['draws']} draws, {way}): "
                    f"{ratios['all']:.0f} × all, "
                    f"{ratios['comparing']:.0f} × the comparing alone, in processor time"
                )
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
