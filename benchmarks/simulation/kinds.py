"""Kinds of servers on which a verdict must hold, each with two arms that get the same requests and a known truth.

What differs between arms is the speed of a start, a speed that wanders, or the time of a step: never a factor on
latencies, which no real server has.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.simulation.engine import Served
from benchmarks.simulation.weather import BLOCK_S, Weather, answers, arrivals, lasting_noise
from tailgate.analysis.arrays import Floats
from tailgate.analysis.statistics.compare import Sample

PREFILL_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind(Weather):
    """How both arms serve, in seconds of work and of wall time.

    `batching`: "slots" are freed one by one, "static" ones when the whole batch is done. `replicas` share the arm's
    slots. `wander`: standard deviation of the log speed of each arm by itself, which lasts for `wander_s`.
    `start_spread`: that of each start of an arm. `bursts_s`: mean time between bursts, which bring `burst` times the
    rate for `burst_s`. `trials` of `duration_s` each. `kept`: the share of the treatment's requests that it gets.
    """

    duration_s: float = 1200.0
    trials: int = 1
    slots: int = 16
    replicas: int = 1
    batching: str = "slots"
    work_s: float = 1.6
    jitter: float = 0.08
    wander: float = 0.0
    wander_s: float = 180.0
    start_spread: float = 0.0
    bursts_s: float = 0.0
    burst_s: float = 30.0
    burst: float = 4.0
    kept: float = 1.0


KINDS: Mapping[str, Kind] = {
    "calm": Kind(),
    "jams": Kind(bursts_s=240.0),
    "drift": Kind(wander=0.03, wander_s=180.0),
    "static": Kind(batching="static", work_s=0.6),
    "replicas": Kind(replicas=2, cox=0.2),
    "restarts": Kind(trials=3, duration_s=400.0, start_spread=0.03),
    "heavy": Kind(rate=8.0, cox=0.2),
    "split": Kind(design="split", cox=0.2),
}


def pair(kind: Kind, rng: np.random.Generator, *, slower: float = 1.0) -> list[tuple[Served, Served]]:
    """Return (treatment, control) of each trial; the treatment's steps take `slower` times as long."""
    pairs = (trial(kind, rng, (slower, 1.0)) for _ in range(kind.trials))
    return [(treatment, control) for treatment, control in pairs]


def samples(
    trials: Sequence[tuple[Served, Served]], metric: str, *, ratio: float = 1.0, block_s: float = BLOCK_S
) -> tuple[Sample, Sample]:
    """Return the treatment's latencies times `ratio` and the control's, over all trials."""
    treatment, control = zip(*trials, strict=True)
    return sample(treatment, metric, ratio=ratio, block_s=block_s), sample(control, metric, block_s=block_s)


def sample(trials: Sequence[Served], metric: str = "e2e_ms", *, ratio: float = 1.0, block_s: float = BLOCK_S) -> Sample:
    """Return an arm's latencies times `ratio` over all trials, by block of the arrival."""
    blocks = ((served.arrival_s / block_s).astype(np.int64) for served in trials)
    return Sample(
        values=np.concatenate([getattr(served, metric) for served in trials]) * ratio,
        block=np.concatenate([block + number * 10_000 for number, block in enumerate(blocks, 1)]),
        trial=np.repeat(np.arange(1, len(trials) + 1), [len(served.arrival_s) for served in trials]),
    )


def trial(kind: Kind, rng: np.random.Generator, factors: Sequence[float]) -> list[Served]:
    """Run one trial with an arm for each factor, by which its steps take longer."""
    shared = lasting_noise(kind, kind.shared, rng)
    times, work = _traffic(kind, rng)
    arms = []
    for place, factor in enumerate(factors):
        if place and kind.design == "split":
            times, work = _traffic(kind, rng)
        arms.append(_arm(kind, times, work, shared, factor, rng))
    return arms


def _traffic(kind: Kind, rng: np.random.Generator) -> tuple[Floats, Floats]:
    times = arrivals(kind, rng)
    if kind.bursts_s:
        starts = np.sort(rng.uniform(0, kind.duration_s, rng.poisson(kind.duration_s / kind.bursts_s)))
        more = [
            start + rng.uniform(0, kind.burst_s, rng.poisson((kind.burst - 1.0) * kind.rate * kind.burst_s))
            for start in starts
        ]
        times = np.sort(np.concatenate([times, *more]))
        times = times[times < kind.duration_s]
    return times, answers(kind.work_s, len(times), rng)


def _arm(kind: Kind, times: Floats, work: Floats, shared: Floats, factor: float, rng: np.random.Generator) -> Served:
    speed = math.log(factor) + kind.start_spread * rng.standard_normal()
    wander = lasting_noise(kind, kind.wander, rng, lasting_s=kind.wander_s)
    replica = np.arange(len(times)) % kind.replicas
    start, first, end = np.empty((3, len(times)))
    serving = _static if kind.batching == "static" else on_slots
    for number in range(kind.replicas):
        own = replica == number
        noise = (shared + wander + lasting_noise(kind, kind.private, rng))[times[own].astype(int)]
        noise = noise + speed + rng.standard_normal(int(own.sum())) * kind.jitter
        served = serving(times[own], work[own] * np.exp(noise), kind.slots // kind.replicas)
        start[own], first[own], end[own] = served.start_s, served.first_token_s, served.end_s
    return Served(arrival_s=times, start_s=start, first_token_s=first, end_s=end, replica=replica)


def on_slots(times: Floats, work: Floats, slots: int) -> Served:
    """Serve requests in the order of their arrival, each in a slot that its work takes."""
    start = np.empty(len(times))
    busy: list[float] = []  # when each taken slot is free
    for index, arrival in enumerate(times.tolist()):
        begin = arrival if len(busy) < slots else max(arrival, heapq.heappop(busy))
        start[index] = begin
        heapq.heappush(busy, begin + float(work[index]))
    return Served(arrival_s=times, start_s=start, first_token_s=start + work * PREFILL_SHARE, end_s=start + work)


def _static(times: Floats, work: Floats, slots: int) -> Served:
    """Serve in batches of all that wait, up to `slots`; the next starts when the longest of the batch is done."""
    start = np.empty(len(times))
    free, index = 0.0, 0
    while index < len(times):
        begin = max(free, float(times[index]))
        last = min(index + slots, int(np.searchsorted(times, begin, side="right")))
        start[index:last] = begin
        free = begin + float(work[index:last].max())
        index = last
    return Served(arrival_s=times, start_s=start, first_token_s=start + work * PREFILL_SHARE, end_s=start + work)
