"""Whether spikes are put down to the compiles that caused them, on made-up servers.

The same traffic is served twice, with compiles and without. The difference is the delay that compiles truly caused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.simulation.engine import Engine, Served, serve_behind_splitter
from benchmarks.simulation.fleet import CONTROL, SLOTS
from benchmarks.simulation.fleet import TREATMENT as ARM
from benchmarks.simulation.records import NETWORK_S, request_table, to_ns
from benchmarks.simulation.table import Table
from benchmarks.simulation.weather import (
    Weather,
    arrivals,
    collections,
    host_stalls,
    lasting_noise,
    private_stalls,
)
from tailgate.analysis.arrays import Bools, Floats, Ints
from tailgate.analysis.records.request_columns import RequestColumns
from tailgate.analysis.records.run_records import RunRecords
from tailgate.analysis.records.schemas import COMPILE_EVENTS
from tailgate.analysis.run.attribution import CAUSES, OTHER
from tailgate.analysis.run.run import Run
from tailgate.analysis.run.spikes import Spike, excursions, find_spikes

MEAN_TOKENS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A server, its traffic and its stalls. `load` is the share of rows that are taken on the average.

    `close` puts the compiles within ten seconds. `reports`: whether the server reports how long compiles delayed
    requests.
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
    duration_s: float = 600.0
    engine: Engine = SLOTS.engine
    reports: bool = True


STEPS = Engine(kind="alternating", prompt_s=0.02, token_s=0.0, row_s=0.0)
SHARING = replace(STEPS, row_s=STEPS.step_s / STEPS.rows)  # a step of all rows takes twice as long as one of none
STATIC = replace(STEPS, kind="static", rows=8, together=8)
PROMPTS = replace(STEPS, rows=64, prompt_s=0.1)  # the prompts are the bottleneck, not the rows
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
    "steps": Case(engine=STEPS, load=0.7),
    "steps, load 90 %": Case(engine=STEPS, load=0.9),
    "steps that grow": Case(engine=SHARING, load=0.7),
    "steps that grow, jams and stalls": Case(engine=SHARING, load=0.75, cox=0.3, private_stalls=4, collections_s=10.0),
    "prompts bound": Case(engine=PROMPTS, load=0.5),
    "shortest first": Case(engine=replace(STEPS, shortest_first=True), load=0.8),
    "static batches": Case(engine=STATIC, load=0.4),
    "static batches, load 60 %": Case(engine=STATIC, load=0.6),
    "two replicas": Case(engine=STEPS, replicas=2, load=0.6),
    "two replicas, load 85 %": Case(engine=STEPS, replicas=2, load=0.85),
    "two replicas, private stalls": Case(engine=STEPS, replicas=2, load=0.75, private_stalls=6),
    "client times alone": Case(reports=False, load=0.75, private_stalls=3),
}


def live(case: Case, seed: int) -> tuple[Run, Floats]:
    """Serve the case twice on the same arrivals, work, noise and other stalls.

    Return the run with compiles, and what they added to E2E of each of its requests, in ms.
    """
    rng = np.random.default_rng([seed, 11])
    engine = case.engine
    busy = case.load * engine.rows
    if engine.kind == "static":
        # A batch lasts as long as its longest answer, some 2.5 times the mean.
        rate = busy / (2.5 * MEAN_TOKENS * engine.decode_s(engine.rows) + engine.prompt_s)
    else:
        rate = busy / (MEAN_TOKENS * engine.decode_s(int(busy)) + busy * engine.prompt_s)
    weather = Weather(duration_s=case.duration_s, rate=rate * case.replicas, cox=case.cox)
    times = arrivals(weather, rng)
    count = len(times)
    noise = lasting_noise(weather, 0.1, rng)
    tokens = 1 + rng.poisson(MEAN_TOKENS * np.exp(0.6 * rng.standard_normal(count) - 0.18))
    there, back = rng.exponential(NETWORK_S, (2, count))
    host = host_stalls(weather, case.host_stalls, rng)
    outside = []
    for _ in range(case.replicas):
        own = private_stalls(weather, case.private_stalls, rng)
        outside.append([*host, *own, *collections(weather, case.collections_s, rng)])
    must = _first_of_new_shapes(case, times, rng)

    def served(compiles: Bools | None) -> Served:
        return serve_behind_splitter(
            times,
            tokens,
            engine=engine,
            slower=np.exp(noise),
            outside=outside,
            compile_s=case.stall_s,
            compiles=compiles,
        )

    seen, without = served(must), served(None)
    direct = _overlap(seen, np.maximum(seen.end_s, seen.arrival_s))
    requests = _requests(case, seen, tokens, there, back, direct)
    records = RunRecords(
        directory=Path("made-up"),
        experiment={
            "name": "made up",
            "arms": [{"name": CONTROL, "control": True}, {"name": ARM, "engine": {"slots": engine.rows}}],
        },
        environment={},
        trials=(),
        generators=(),
        requests=RequestColumns.of(requests),
        events=_events(seen),
        steps=None,
        machines=None,
        problems=(),
    )
    return Run.of(records), np.maximum(seen.end_s - without.end_s, 0.0) * 1e3


def _first_of_new_shapes(case: Case, times: Floats, rng: np.random.Generator) -> Bools:
    """Mark the first request after each of as many moments as there are compiles."""
    moments = rng.uniform(40.0, case.duration_s - 60.0, case.compiles)
    if case.close:
        moments = moments[0] + rng.uniform(0.0, 10.0, case.compiles)
    must = np.zeros(len(times), dtype=np.bool_)
    must[np.minimum(np.searchsorted(times, moments), len(times) - 1)] = True
    return must


def _overlap(served: Served, until: Floats) -> Floats:
    """Return the seconds of each request's stay in which its replica compiled."""
    seconds = np.zeros(len(served.arrival_s))
    for pause in served.compiled:
        start = np.maximum(served.arrival_s, pause.start_s)
        held = np.clip(np.minimum(until, pause.start_s + pause.seconds) - start, 0.0, None)
        seconds += np.where(served.replica == pause.replica, held, 0.0)
    return seconds


def _requests(case: Case, served: Served, tokens: Ints, there: Floats, back: Floats, direct: Floats) -> pa.Table:
    return request_table(
        to_ns(served.arrival_s - there),
        request_id=[f"{index}" for index in range(len(tokens))],
        arm=ARM,
        replica=[f"{ARM}-{number}" for number in served.replica],
        first_token_ns=to_ns(served.first_token_s + back),
        end_ns=to_ns(served.end_s + back),
        output_tokens=tokens,
        compile_stall_ns=(direct * 1e9).astype(np.int64) if case.reports else None,
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
    """The spikes of one run against its truth: a compile caused a spike if it made half of the excess and more."""

    spikes: int
    caused: int
    blamed: int  # spikes that are put down to compiles
    right: int  # both
    shown: int  # spikes that compiles caused, found by a baseline of the requests that no compile delayed in truth
    met: int  # of these, those that a spike overlaps which is put down to compiles


def judge(case: Case, seed: int) -> Judged:
    """Judge one run of the case."""
    run, delay_ms = live(case, seed)
    requests, attribution = run.requests, run.attribution
    spikes = find_spikes(requests, attribution, run.events, control=CONTROL)
    rows, beyond = excursions(requests, attribution, arm=ARM, control=CONTROL)
    start = requests.start_ns[rows]
    caused = []
    for spike in spikes:
        own = (start >= spike.start_ns) & (start <= spike.end_ns)
        excess, delay = beyond[own], delay_ms[rows[own]]
        caused.append(float(np.minimum(delay, excess).sum()) >= 0.5 * float(excess.sum()))
    blamed = [_is_attributed(spike) for spike in spikes]
    cause = np.where(delay_ms > 1.0, CAUSES.index("during a compile"), OTHER).astype(np.int8)
    truth = replace(attribution, most_ms=delay_ms, cause=cause)
    shown = [spike for spike in find_spikes(requests, truth, run.events, control=CONTROL) if _is_attributed(spike)]
    seen = [spike for spike in spikes if _is_attributed(spike)]
    return Judged(
        spikes=len(spikes),
        caused=sum(caused),
        blamed=sum(blamed),
        right=sum(truly and said for truly, said in zip(caused, blamed, strict=True)),
        shown=len(shown),
        met=sum(any(own.start_ns < true.end_ns and true.start_ns < own.end_ns for own in seen) for true in shown),
    )


def _is_attributed(spike: Spike) -> bool:
    return spike.cause != CAUSES[OTHER]


def share(runs: Sequence[Judged], part: str, whole: str) -> float:
    """Return the part of the whole over all runs; NaN of nothing."""
    known = sum(getattr(run, whole) for run in runs)
    return sum(getattr(run, part) for run in runs) / known if known else float("nan")


def attribution_table(table: Table) -> None:
    """Recall and precision of spikes that compiles caused, over all kinds of servers and of each kind."""
    runs = {name: table.over_seeds(partial(judge, case)) for name, case in CASES.items()}
    whole = [run for kind in runs.values() for run in kind]
    table.add("recall of spikes that compiles caused", share(whole, "right", "caused"), least=0.95)
    table.add("precision of spikes that are put down to compiles", share(whole, "right", "blamed"), least=0.98)
    table.add("  recall, of spikes by the true baseline", share(whole, "met", "shown"))
    for name, kind in runs.items():
        if any(run.caused for run in kind):
            table.add(f"  recall: {name}", share(kind, "right", "caused"))
        if any(run.blamed for run in kind):
            table.add(f"  precision: {name}", share(kind, "right", "blamed"))
