"""Closed loops: users who wait for one answer before they ask again, so that a stall is seen once by each of them.

The treatment stands still for seconds at a time; open-loop traffic would see it at p99, and this traffic hardly does.
Whether the records say that they are of a closed loop or not, no gate on the tail may PASS.
"""

from __future__ import annotations

import heapq
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from analysis.arrays import Ints
from analysis.summary.summary import analyze
from benchmarks.simulation.records import EPOCH_NS, request_table, write_requests
from benchmarks.simulation.table import Table

DURATION_S = 660.0
_WORK_S = 0.8
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
p99_e2e_ms = 60000
"""


class Slots:
    """A server: what comes takes the slot that is free first. `stalls`: (start, seconds) in which nothing goes on."""

    def __init__(self, slots: int, spread: float, stalls: Sequence[tuple[float, float]], rng: np.random.Generator):
        self._free = [0.0] * slots
        self._spread, self._stalls, self._rng = spread, stalls, rng

    def end_s(self, start_s: float) -> float:
        """When a request that comes at `start_s` ends; requests come in order."""
        begin = max(start_s, heapq.heappop(self._free))
        end = begin + _WORK_S * float(np.exp(self._spread * self._rng.standard_normal()))
        for at, seconds in self._stalls:
            if begin < at + seconds and end > at:
                end += at + seconds - max(begin, at)
        heapq.heappush(self._free, end)
        return end


def users(
    count: int, think_s: float, server: Slots, rng: np.random.Generator, *, duration_s: float
) -> tuple[Ints, Ints]:
    """A closed loop: each user asks again an exponential time after his answer."""
    ready = [float(at) for at in np.sort(rng.uniform(0, think_s + 0.5, count))]
    starts, ends = [], []
    while ready[0] < duration_s:
        start = heapq.heappop(ready)
        end = server.end_s(start)
        starts.append(start)
        ends.append(end)
        # The client needs a moment to take the answer and ask again.
        heapq.heappush(ready, end + float(rng.exponential(think_s)) + float(rng.uniform(0.0001, 0.0008)))
    return (np.asarray(starts) * 1e9).astype(np.int64), (np.asarray(ends) * 1e9).astype(np.int64)


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
        server = Slots(USERS, 0.4, stalls, rng)
        starts, ends = users(USERS, THINK_S.get(way, 0.0), server, rng, duration_s=DURATION_S)
        sent = EPOCH_NS + starts
        tables.append(
            request_table(
                sent,
                request_id=[f"{number}-{arm}" for number in range(len(sent))],
                arm=arm,
                scheduled_ns=None if way == "no schedule" else sent,
                first_token_ns=sent + (ends - starts) // 5,
                end_ns=EPOCH_NS + ends,
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


def closed_loop_table(table: Table) -> None:
    """The share of closed-loop runs that PASS any gate on the tail, for each way of recording them."""
    runs = max(1, table.seeds // 8)  # each is a whole analysis
    for way in WAYS:
        passed = 0
        for seed in range(runs):
            with tempfile.TemporaryDirectory() as folder:
                passed += tail_passes(write_closed(Path(folder), seed, way)) > 0
        table.add(f"closed loop, {way}: PASS on a tail gate", passed / runs, runs=runs, most=0.0)
