"""Kinds of servers on which a verdict must hold, each with two arms that get the same requests and a known truth.

What differs between arms is a start's luck, a speed that wanders, or the time of a step: never a factor on latencies,
which no real server has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from analysis.statistics.compare import Sample
from benchmarks.simulation.calibration import joined
from benchmarks.simulation.scenario import BLOCK_S, Scenario, arrivals, lasting_noise
from benchmarks.simulation.server import Floats, serve

PREFILL_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How both arms serve, in seconds of work and of wall time.

    `batching`: "slots" are freed one by one, "static" ones when the whole batch is done. `replicas` share the arm's
    slots. `wander`: standard deviation of the log speed of each arm by itself, which lasts for `wander_s`. `luck`:
    that of each start of an arm. `bursts_s`: mean time between bursts, which bring `burst` times the rate for
    `burst_s`. `trials` of `duration_s` each.
    """

    name: str
    duration_s: float = 1200.0
    trials: int = 1
    rate: float = 4.0
    cox: float = 0.0
    slots: int = 16
    replicas: int = 1
    batching: str = "slots"
    work_s: float = 1.6
    shared: float = 0.12
    private: float = 0.03
    lasting_s: float = 20.0
    jitter: float = 0.08
    wander: float = 0.0
    wander_s: float = 180.0
    luck: float = 0.0
    bursts_s: float = 0.0
    burst_s: float = 30.0
    burst: float = 4.0
    design: str = "mirrored"


KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(name="calm"),
        Kind(name="jams", bursts_s=240.0),
        Kind(name="drift", wander=0.03, wander_s=180.0),
        Kind(name="static", batching="static", work_s=0.6),
        Kind(name="replicas", replicas=2, cox=0.2),
        Kind(name="restarts", trials=3, duration_s=400.0, luck=0.03),
        Kind(name="heavy", rate=8.0, cox=0.2),
        Kind(name="split", design="split", cox=0.2),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """What one arm's clients saw in one trial, in ms; all of shape (n,)."""

    arrival_s: Floats
    ttft_ms: Floats
    e2e_ms: Floats


def pair(kind: Kind, rng: np.random.Generator, *, slower: float = 1.0) -> list[tuple[Latencies, Latencies]]:
    """(treatment, control) of each trial; the treatment's steps take `slower` times as long."""
    return [_trial(kind, rng, slower) for _ in range(kind.trials)]


def samples(trials: list[tuple[Latencies, Latencies]], metric: str, *, ratio: float = 1.0) -> tuple[Sample, Sample]:
    """The treatment's latencies times `ratio` and the control's, over all trials."""
    parts: list[list[Sample]] = [[], []]
    for number, arms in enumerate(trials):
        for place, arm in enumerate(arms):
            values = getattr(arm, metric) * (ratio if place == 0 else 1.0)
            block = (arm.arrival_s / BLOCK_S).astype(np.int64) + number * 10_000
            parts[place].append(Sample(values=values, block=block, trial=np.full(len(values), number + 1)))
    return joined(parts[0]), joined(parts[1])


def _trial(kind: Kind, rng: np.random.Generator, slower: float) -> tuple[Latencies, Latencies]:
    scenario = Scenario(duration_s=kind.duration_s, lasting_s=kind.lasting_s, rate=kind.rate, cox=kind.cox)
    shared = lasting_noise(scenario, kind.shared, rng)
    times, work = _traffic(kind, scenario, rng)
    arms = []
    for place, factor in enumerate((slower, 1.0)):
        if place and kind.design == "split":
            times, work = _traffic(kind, scenario, rng)
        arms.append(_arm(kind, scenario, times, work, shared, factor, rng))
    return arms[0], arms[1]


def _traffic(kind: Kind, scenario: Scenario, rng: np.random.Generator) -> tuple[Floats, Floats]:
    times = arrivals(scenario, rng)
    if kind.bursts_s:
        starts = np.sort(rng.uniform(0, kind.duration_s, rng.poisson(kind.duration_s / kind.bursts_s)))
        more = [
            start + rng.uniform(0, kind.burst_s, rng.poisson((kind.burst - 1.0) * kind.rate * kind.burst_s))
            for start in starts
        ]
        times = np.sort(np.concatenate([times, *more]))
        times = times[times < kind.duration_s]
    sigma = 0.86
    work = kind.work_s * np.exp(sigma * rng.standard_normal(len(times)) - sigma**2 / 2)
    return times, work


def _arm(
    kind: Kind,
    scenario: Scenario,
    times: Floats,
    work: Floats,
    shared: Floats,
    factor: float,
    rng: np.random.Generator,
) -> Latencies:
    luck = math.log(factor) + kind.luck * rng.standard_normal()
    wander = lasting_noise(replace(scenario, lasting_s=kind.wander_s), kind.wander, rng)
    replica = np.arange(len(times)) % kind.replicas
    ttft, e2e = np.empty(len(times)), np.empty(len(times))
    for number in range(kind.replicas):
        own = replica == number
        noise = (shared + wander + lasting_noise(scenario, kind.private, rng))[times[own].astype(int)]
        noise = noise + luck + rng.standard_normal(int(own.sum())) * kind.jitter
        first, end = (_static if kind.batching == "static" else _slots)(
            times[own], work[own] * np.exp(noise), kind.slots // kind.replicas
        )
        ttft[own], e2e[own] = (first - times[own]) * 1e3, (end - times[own]) * 1e3
    return Latencies(arrival_s=times, ttft_ms=ttft, e2e_ms=e2e)


def _slots(times: Floats, work: Floats, slots: int) -> tuple[Floats, Floats]:
    served = serve(times, work, np.zeros(len(times), dtype=np.int64), slots=slots, prefill_share=PREFILL_SHARE)
    return served.first_token_s, served.end_s


def _static(times: Floats, work: Floats, slots: int) -> tuple[Floats, Floats]:
    """A batch takes all that wait, up to `slots`, and the next starts when its longest is done."""
    start = np.empty(len(times))
    free, index = 0.0, 0
    while index < len(times):
        begin = max(free, float(times[index]))
        last = min(index + slots, int(np.searchsorted(times, begin, side="right")))
        start[index:last] = begin
        free = begin + float(work[index:last].max())
        index = last
    return start + work * PREFILL_SHARE, start + work
