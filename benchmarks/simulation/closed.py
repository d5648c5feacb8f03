"""Closed loops: users who wait for one answer before they ask again, so that a stall is seen once by each of them.

The treatment stands still for seconds at a time; open-loop traffic would see it at p99, and this traffic hardly does.
Whether the records say that they are of a closed loop or not, no gate on the tail may PASS.
"""

from __future__ import annotations

import heapq
import json
from pathlib import Path

import numpy as np
import pyarrow as pa

from analysis.summary.summary import analyze
from benchmarks.simulation.loops import loop_table
from benchmarks.simulation.records import EPOCH_NS, request_table, to_ns, write_requests
from benchmarks.simulation.table import Table

DURATION_S = 660.0
USERS = 8
WAYS = ("told", "no schedule", "schedule as sent", "schedule as sent, users who think 50 ms", "the same, 2 s")
THINK_S = {WAYS[3]: 0.05, WAYS[4]: 2.0}
_TAIL_GATES = ("noninferiority", "slo", "goodput")

EXPERIMENT = """
name = "closed"
seed = 1
[[arms]]
name = "eager"
control = true
[[arms]]
name = "compiled"
[traffic]
design = "split"
[slo]
p99_e2e_ms = 20000
"""


def closed_loop(
    rng: np.random.Generator, *, stalls: tuple[tuple[float, float], ...], work_s: float = 0.8, think_s: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """(start, end) in seconds of every request that USERS users make; nothing ends while the server stands still."""
    ready = [(float(rng.uniform(0, 1)), user) for user in range(USERS)]
    heapq.heapify(ready)
    starts, ends = [], []
    while ready[0][0] < DURATION_S:
        start, user = heapq.heappop(ready)
        end = start + work_s * float(np.exp(0.4 * rng.standard_normal()))
        for at, seconds in stalls:
            if start < at + seconds and end > at:
                end += at + seconds - max(start, at)
        starts.append(start)
        ends.append(end)
        pause = float(rng.exponential(think_s)) if think_s else 0.0
        # The client needs a moment to take the answer and ask again.
        heapq.heappush(ready, (end + float(rng.uniform(0.0001, 0.0008)) + pause, user))
    return np.array(starts), np.array(ends)


def write_closed(directory: Path, seed: int, way: str) -> Path:
    """A run directory of a closed loop on two arms, as one of WAYS records it; the treatment stalls five times."""
    rng = np.random.default_rng(seed)
    trial = directory / "trial-01"
    trial.mkdir(parents=True)
    (directory / "experiment.toml").write_text(EXPERIMENT)
    tables = []
    for arm, stalls in (
        ("eager", ()),
        ("compiled", tuple((float(at), 4.0) for at in np.sort(rng.uniform(40, 600, 5)))),
    ):
        starts, ends = closed_loop(rng, stalls=stalls, think_s=THINK_S.get(way, 0.0))
        sent = to_ns(starts)
        tables.append(
            request_table(
                sent,
                request_id=[f"{number}-{arm}" for number in range(len(sent))],
                arm=arm,
                scheduled_ns=None if way == "no schedule" else sent,
                first_token_ns=sent + ((ends - starts) * 2e8).astype(np.int64),
                end_ns=to_ns(ends),
                output_tokens=20,
            )
        )
    write_requests(trial / "requests-0.arrow", pa.concat_tables(tables).combine_chunks())
    info: dict[str, object] = {"trial": 1, "complete": True, "start_ns": EPOCH_NS, "duration_s": DURATION_S}
    if way == "told":
        info |= {"open_loop": False, "loop": "closed", "concurrency": USERS}
    (trial / "trial.json").write_text(json.dumps(info))
    return directory


def tail_passes(directory: Path) -> int:
    """How many gates on the tail the run passes."""
    gates = analyze(directory)["gates"]
    return sum(gate["kind"] in _TAIL_GATES and gate["verdict"] == "PASS" for gate in gates)


def closed_loop_table(table: Table, *, folder: Path) -> None:
    """The share of closed-loop runs that PASS any gate on the tail, for each way of recording them."""
    runs = max(1, table.seeds // 8)  # each is a whole analysis
    for way in WAYS:
        passed = sum(tail_passes(write_closed(folder / f"{way}-{seed}", seed, way)) > 0 for seed in range(runs))
        table.add(f"closed loop, {way}: PASS on a tail gate", passed / runs, runs=runs, most=0.0)
    loop_table(table)
