"""Traffic on made-up servers: what two arms of a run would show, with the truth beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from analysis.statistics.compare import Sample
from benchmarks.simulation.server import Bools, Floats, Served, serve

BLOCK_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What both arms live through.

    `rate` in requests/s to each arm. `cox`: standard deviation of the log rate, which wanders; 0 is a Poisson process.
    `shared` and `private`: standard deviations of noise in log work that lasts for about `lasting_s`, common to the
    arms and own to each. `jitter`: of what each request brings by itself. Compiles take `compile_s` for each shape that
    was not met in the warm-up; `collections_s` is the mean time between garbage collections of 50 to 200 ms on an arm,
    `host_stalls` how many times the host stops both arms for 0.5 to 3 s, `private_stalls` how many times the treatment
    stands still for 0.5 to 5 s for no reason of its requests. Prompts are padded to multiples of `step`.
    """

    duration_s: float = 600.0
    rate: float = 4.0
    cox: float = 0.0
    slots: int = 16
    work_s: float = 1.6
    shared: float = 0.12
    private: float = 0.03
    lasting_s: float = 20.0
    jitter: float = 0.08
    design: Literal["mirrored", "split", "separate"] = "mirrored"
    compile_s: float = 0.0
    new_shapes: int = 0
    collections_s: float = 0.0
    host_stalls: int = 0
    private_stalls: int = 0
    step: int = 1


def lasting_noise(scenario: Scenario, spread: float, rng: np.random.Generator) -> Floats:
    """Log noise for each second of the run, autocorrelated over `lasting_s`. Mean 0, standard deviation `spread`."""
    seconds = int(scenario.duration_s) + 1
    keep = math.exp(-1.0 / scenario.lasting_s)
    steps = rng.standard_normal(seconds) * spread
    noise = np.empty(seconds)
    noise[0] = steps[0]
    for second in range(1, seconds):
        noise[second] = keep * noise[second - 1] + math.sqrt(1 - keep * keep) * steps[second]
    return noise


def arrivals(scenario: Scenario, rng: np.random.Generator) -> Floats:
    """Rising arrival times in seconds."""
    highest = scenario.rate * math.exp(4 * scenario.cox)
    count = rng.poisson(highest * scenario.duration_s)
    times = np.sort(rng.uniform(0, scenario.duration_s, count))
    if scenario.cox:
        level = np.exp(lasting_noise(scenario, scenario.cox, rng) - scenario.cox**2 / 2)
        times = times[rng.uniform(size=count) < level[times.astype(int)] * scenario.rate / highest]
    return times


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """Two arms of one trial, and when the host stood still. `more` are arms like the control."""

    treatment: Served
    control: Served
    host_stalls: tuple[tuple[float, float], ...]
    more: tuple[Served, ...] = ()


def run(scenario: Scenario, rng: np.random.Generator, *, arms: int = 2) -> Run:
    """One trial. Under `mirrored` each request goes to all arms; else each arm has its own."""
    shared = lasting_noise(scenario, scenario.shared, rng)
    host = tuple((float(at), float(rng.uniform(0.5, 3.0))) for at in _times(scenario, scenario.host_stalls, rng))
    times = arrivals(scenario, rng)
    work, shape = _requests(scenario, len(times), rng)
    served = []
    for arm in range(arms):
        if arm and scenario.design == "separate":
            shared = lasting_noise(scenario, scenario.shared, rng)
        if arm and scenario.design != "mirrored":
            times = arrivals(scenario, rng)
            work, shape = _requests(scenario, len(times), rng)
        own = lasting_noise(scenario, scenario.private, rng)
        noise = (shared + own)[times.astype(int)] + rng.standard_normal(len(times)) * scenario.jitter
        stalls = [*host]
        if scenario.collections_s:
            count = rng.poisson(scenario.duration_s / scenario.collections_s)
            stalls += [(float(at), float(rng.uniform(0.05, 0.2))) for at in _times(scenario, count, rng)]
        compiles: Bools | None = None
        if arm == 0:
            # an arm's own stalls that no compile caused
            private = scenario.private_stalls
            stalls += [(float(at), float(rng.uniform(0.5, 5.0))) for at in _times(scenario, private, rng)]
            compiles = first_of_new_shapes(scenario, times, -(-shape // scenario.step), rng)
        served.append(
            serve(
                times,
                work * np.exp(noise),
                shape,
                slots=scenario.slots,
                outside=stalls,
                compile_s=scenario.compile_s,
                compiles=compiles,
            )
        )
    return Run(treatment=served[0], control=served[1], host_stalls=host, more=tuple(served[2:]))


def first_of_new_shapes(scenario: Scenario, times: Floats, shape: np.ndarray, rng: np.random.Generator) -> Bools | None:
    """Which requests are the first of a shape that has to be compiled: `new_shapes` of them, anywhere in the run."""
    if not scenario.new_shapes:
        return None
    _, first = np.unique(shape, return_index=True)
    late = first[times[first] > 30.0]
    chosen = rng.choice(late, size=min(scenario.new_shapes, len(late)), replace=False)
    must = np.zeros(len(times), dtype=np.bool_)
    must[chosen] = True
    return must


def sample(served: Served, *, ratio: float = 1.0, trial: int = 1, requests: Bools | None = None) -> Sample:
    """The end-to-end latencies times `ratio`, by 30 s block of the arrival."""
    chosen = slice(None) if requests is None else requests
    block = (served.arrival_s[chosen] / BLOCK_S).astype(np.int64) + trial * 10_000
    values = served.e2e_ms[chosen] * ratio
    return Sample(values=values, block=block, trial=np.full(len(values), trial))


def _times(scenario: Scenario, count: int, rng: np.random.Generator) -> Floats:
    return np.sort(rng.uniform(10.0, scenario.duration_s - 10.0, count))


def _requests(scenario: Scenario, count: int, rng: np.random.Generator) -> tuple[Floats, np.ndarray]:
    """Work in seconds, lognormal as the answers of conversations are, and the shape (prompt length) of each request."""
    sigma = 0.86
    work = scenario.work_s * np.exp(sigma * rng.standard_normal(count) - sigma**2 / 2)
    shape = np.rint(np.exp(6.633 + 0.985 * rng.standard_normal(count))).astype(np.int64)
    return work, shape
