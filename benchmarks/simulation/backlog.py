"""What compiles truly did to requests: the same traffic on the same made-up server, with its compiles and without.

The difference of the two is the truth that `analysis.run.spikes` is held to: which requests a compile delayed, and by
how much. `python -m benchmarks.simulation.backlog [SEEDS]` prints it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from analysis.arrays import Bools, Floats, Ints
from analysis.records.run_records import RunRecords
from analysis.records.schemas import COMPILE_EVENTS
from analysis.run.run import Run
from analysis.run.spikes import excursions, find_spikes
from benchmarks.simulation.records import NETWORK_S, request_table, to_ns
from benchmarks.simulation.server import Served, serve
from benchmarks.simulation.steps import Machine, serve_steps
from benchmarks.simulation.table import over_seeds
from benchmarks.simulation.weather import (
    Weather,
    arrivals,
    host_stalls,
    lasting_noise,
    private_stalls,
    stalls,
)

ARM, CONTROL = "compiled", "eager"
TOKEN_S = 0.02
MEAN_TOKENS = 80
Columns = Literal["server", "no stalls", "client"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A server, its traffic and its stalls. `load` is the share of slots that are taken on the average.

    `close` puts the compiles within ten seconds. `columns`: all that our servers report, the same without the time
    that compiles held requests up, or client times alone. Without a `machine`, requests take their slot for as long as
    their work says (`benchmarks.simulation.server`).
    """

    load: float = 0.6
    stall_s: float = 4.0
    compiles: int = 4
    close: bool = False
    cox: float = 0.0
    collections_s: float = 0.0
    private_stalls: int = 0
    host_stalls: int = 0
    replicas: int = 1
    slots: int = 16
    duration_s: float = 600.0
    machine: Machine | None = None
    columns: Columns = "server"


STEPS = Machine()
SHARING = Machine(sharing=1.0)
STATIC = Machine(policy="static", slots=8)
PROMPTS = Machine(slots=64, prompt_s=0.1)  # the prompts are the bottleneck, not the slots
CASES = {
    "load 40 %": Case(load=0.4),
    "load 60 %": Case(load=0.6),
    "load 80 %": Case(load=0.8),
    "load 95 %": Case(load=0.95),
    "stalls of 0.5 s": Case(stall_s=0.5, load=0.7),
    "stalls of 1 s": Case(stall_s=1.0, load=0.7),
    "stalls of 20 s": Case(stall_s=20.0, compiles=2),
    "stalls of 20 s, load 85 %": Case(stall_s=20.0, compiles=2, load=0.85),
    "six close together": Case(compiles=6, stall_s=2.0, close=True, load=0.7),
    "collections": Case(collections_s=5.0, load=0.7),
    "private stalls": Case(private_stalls=6, load=0.7),
    "private stalls, load 85 %": Case(private_stalls=6, load=0.85),
    "host stalls": Case(host_stalls=5, load=0.7),
    "bursts that jam": Case(cox=0.5, load=0.7),
    "all of it": Case(cox=0.3, load=0.75, collections_s=10.0, private_stalls=3, host_stalls=3),
    "steps": Case(machine=STEPS, load=0.7),
    "steps, load 90 %": Case(machine=STEPS, load=0.9),
    "steps that grow": Case(machine=SHARING, load=0.7),
    "steps that grow, jams and stalls": Case(machine=SHARING, load=0.75, cox=0.3, private_stalls=4, collections_s=10.0),
    "prompts bound": Case(machine=PROMPTS, load=0.5),
    "shortest first": Case(machine=Machine(shortest_first=True), load=0.8),
    "rows bound by memory": Case(machine=Machine(slots=64, memory=1600), load=0.25, collections_s=20.0),
    "static batches": Case(machine=STATIC, load=0.4),
    "static batches, load 60 %": Case(machine=STATIC, load=0.6),
    "two replicas": Case(machine=STEPS, replicas=2, load=0.6),
    "two replicas, load 85 %": Case(machine=STEPS, replicas=2, load=0.85),
    "two replicas, private stalls": Case(machine=STEPS, replicas=2, load=0.75, private_stalls=6),
    "no stalls reported": Case(columns="no stalls", load=0.75, private_stalls=3),
    "client times alone": Case(columns="client", load=0.75, private_stalls=3),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lived:
    """A run and what it would have been without its compiles; (n,) in the order of the requests."""

    run: Run
    e2e_delay_ms: Floats  # what compiles added
    direct_ms: Floats  # the part of the delay in which a compile ran


def live(case: Case, seed: int) -> Lived:
    """The case served twice on the same arrivals, work, noise and other stalls."""
    rng = np.random.default_rng([seed, 11])
    machine = case.machine
    slots = machine.slots if machine else case.slots
    work_s = MEAN_TOKENS * TOKEN_S
    busy = case.load * slots
    if machine is None:
        rate = busy / work_s
    elif machine.policy == "static":
        # A batch lasts as long as its longest answer, some 2.5 times the mean.
        rate = busy / (2.5 * MEAN_TOKENS * machine.token_s(slots) + machine.prompt_s)
    else:
        rate = busy / (MEAN_TOKENS * machine.token_s(int(busy)) + busy * machine.prompt_s)
    weather = Weather(duration_s=case.duration_s, rate=rate * case.replicas, cox=case.cox)
    times = arrivals(weather, rng)
    count = len(times)
    noise = lasting_noise(weather, 0.1, rng)
    tokens = 1 + rng.poisson(MEAN_TOKENS * np.exp(0.6 * rng.standard_normal(count) - 0.18))
    jitter = np.exp(0.05 * rng.standard_normal(count))
    there, back = rng.exponential(NETWORK_S, (2, count))
    host = host_stalls(weather, case.host_stalls, rng)
    outside = []
    for _ in range(case.replicas):
        count_collections = rng.poisson(case.duration_s / case.collections_s) if case.collections_s else 0
        own = private_stalls(weather, case.private_stalls, rng)
        outside.append([*host, *own, *stalls(weather, count_collections, 0.05, 0.2, rng)])
    must = _first_of_new_shapes(case, times, rng)

    def served(compiles: Bools | None) -> Served:
        if machine is not None:
            return serve_steps(
                times,
                tokens,
                lambda at: float(np.exp(noise[min(int(at), len(noise) - 1)])),
                machine,
                replicas=case.replicas,
                outside=outside,
                compile_s=case.stall_s,
                compiles=compiles,
            )
        made = serve(
            times,
            tokens * TOKEN_S * np.exp(noise[times.astype(int)]) * jitter,
            tokens,
            slots=slots,
            outside=outside[0],
            compile_s=case.stall_s,
            compiles=compiles,
        )
        # What comes during a pause begins at its end.
        held = made.start_s < times - 1e-6
        until = np.array([pause.start_s + pause.seconds for pause in made.pauses] or [0.0])
        begin = np.where(held, until[np.minimum(np.searchsorted(until, times), len(until) - 1)], made.start_s)
        return replace(
            made,
            start_s=np.maximum(begin, times),
            replica=np.zeros(count, dtype=np.int64),
            batch=np.arange(count),
        )

    seen, without = served(must), served(None)
    direct = _overlap(seen, np.maximum(seen.end_s, seen.arrival_s))
    requests = _requests(case, seen, tokens, there, back, direct)
    records = RunRecords(
        directory=Path("made-up"),
        experiment={
            "name": "made up",
            "arms": [{"name": CONTROL, "control": True}, {"name": ARM, "engine": {"slots": slots}}],
        },
        environment={},
        trials=(),
        generators=(),
        requests=requests,
        events=_events(seen),
        steps=None,
        bed=None,
        problems=(),
    )
    return Lived(
        run=Run.of(records),
        e2e_delay_ms=(seen.end_s - without.end_s) * 1e3,
        direct_ms=direct * 1e3,
    )


def _first_of_new_shapes(case: Case, times: Floats, rng: np.random.Generator) -> Bools:
    """Marks the requests that come first after as many moments as there are compiles."""
    moments = rng.uniform(40.0, case.duration_s - 60.0, case.compiles)
    if case.close:
        moments = moments[0] + rng.uniform(0.0, 10.0, case.compiles)
    must = np.zeros(len(times), dtype=np.bool_)
    must[np.minimum(np.searchsorted(times, moments), len(times) - 1)] = True
    return must


def _overlap(served: Served, until: Floats) -> Floats:
    """Seconds of each request's stay in which its replica compiled."""
    seconds = np.zeros(len(served.arrival_s))
    for pause in served.compiled:
        start = np.maximum(served.arrival_s, pause.start_s)
        held = np.clip(np.minimum(until, pause.start_s + pause.seconds) - start, 0.0, None)
        seconds += np.where(served.replica == pause.replica, held, 0.0)
    return seconds


def _requests(case: Case, served: Served, tokens: Ints, there: Floats, back: Floats, direct: Floats) -> pa.Table:
    columns: dict[str, object] = {}
    if case.columns != "client":
        columns = {
            "queue_ns": ((served.start_s - served.arrival_s) * 1e9).astype(np.int64),
            "server_recv_ns": to_ns(served.arrival_s),
            "server_end_ns": to_ns(served.end_s),
            "batch_id": served.batch,
        }
    if case.columns == "server":
        columns["compile_stall_ns"] = (direct * 1e9).astype(np.int64)
    return request_table(
        to_ns(served.arrival_s - there),
        request_id=[f"{index}" for index in range(len(tokens))],
        arm=ARM,
        replica=[f"{ARM}-{number}" for number in served.replica],
        first_token_ns=to_ns(served.first_token_s + back),
        end_ns=to_ns(served.end_s + back),
        output_tokens=tokens,
        **columns,
    )


def _events(served: Served) -> pa.Table:
    rows = [
        {
            "event_id": f"e{number}",
            "trial": 1,
            "arm": ARM,
            "replica": f"{ARM}-{pause.replica}",
            "kind": "recompile",
            "start_ns": int(to_ns(pause.start_s)),
            "end_ns": int(to_ns(pause.start_s + pause.seconds)),
            "request_ids": [str(pause.request)],
            "phase": "serving",
        }
        for number, pause in enumerate(served.compiled)
    ]
    return pa.Table.from_pylist(rows, schema=COMPILE_EVENTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One run against its truth."""

    spikes: int
    caused: int  # of them, those of which compiles made half of the excess and more
    called: int  # spikes that were put down to compiles
    right: int  # both
    delayed: int  # requests that a compile delayed by 50 ms and a tenth of their time
    delayed_called: int
    called_requests: int
    called_right: int
    direct_s: float
    delay_s: float
    judged_s: float  # the delay as it is judged


def judge(case: Case, seed: int) -> Judged:
    """The case as it is judged."""
    lived = live(case, seed)
    run = lived.run
    requests, attribution = run.requests, run.attribution
    spikes = find_spikes(requests, attribution, run.events, control=CONTROL)
    beyond = excursions(requests, attribution, arm=ARM, control=CONTROL)
    start = requests.start_ns[beyond.rows]
    caused = called = right = 0
    for spike in spikes:
        own = (start >= spike.start_ns) & (start <= spike.end_ns)
        excess, delay = beyond.excess_ms[own], lived.e2e_delay_ms[beyond.rows[own]]
        true = float(np.minimum(np.maximum(delay, 0.0), excess).sum()) >= 0.5 * float(excess.sum())
        blamed = spike.cause != "other"
        caused, called, right = caused + true, called + blamed, right + (true and blamed)
    delayed = lived.e2e_delay_ms > np.maximum(50.0, 0.1 * requests.e2e_ms)
    judged_ms = attribution.stall_ms + attribution.backlog_ms
    judged = judged_ms > np.maximum(50.0, 0.1 * requests.e2e_ms)
    return Judged(
        spikes=len(spikes),
        caused=caused,
        called=called,
        right=right,
        delayed=int(delayed.sum()),
        delayed_called=int((delayed & judged).sum()),
        called_requests=int(judged.sum()),
        called_right=int((judged & (lived.e2e_delay_ms > 0.5 * judged_ms)).sum()),
        direct_s=float(lived.direct_ms.sum()) / 1e3,
        delay_s=float(lived.e2e_delay_ms.sum()) / 1e3,
        judged_s=float(judged_ms.sum()) / 1e3,
    )


def share(part: float, whole: float) -> float:
    """The part of the whole; NaN of nothing."""
    return part / whole if whole else float("nan")


HEAD = ("spikes", "caused", "recall", "precise", "requests", "precise", "direct", "judged")


def line(name: str, runs: Sequence[Judged]) -> str:
    """What the runs of a case show, under HEAD: spikes, those that compiles caused, recall and precision; recall and
    precision of delayed requests; direct and judged seconds of the true delay."""

    def total(key: str) -> float:
        return float(sum(getattr(run, key) for run in runs))

    cells = [f"{total('spikes'):.0f}", f"{total('caused'):.0f}"]
    for part, whole in (
        ("right", "caused"),
        ("right", "called"),
        ("delayed_called", "delayed"),
        ("called_right", "called_requests"),
        ("direct_s", "delay_s"),
        ("judged_s", "delay_s"),
    ):
        cells.append(_percent(share(total(part), total(whole))))
    return f"{name:<34}" + "".join(f"{cell:>11}" for cell in cells)


def _percent(value: float) -> str:
    return "–" if np.isnan(value) else f"{100 * value:.1f}"


def _main(seeds: int, names: Sequence[str]) -> None:
    print(f"{f'{seeds} runs of each':<34}" + "".join(f"{name:>11}" for name in HEAD), flush=True)
    everything: list[Judged] = []
    for name in names or CASES:
        runs = over_seeds(partial(judge, CASES[name]), range(seeds))
        everything += runs
        print(line(name, runs), flush=True)
    print(line("all", everything))


if __name__ == "__main__":
    _main(int(sys.argv[1]) if len(sys.argv) > 1 else 5, sys.argv[2:])
