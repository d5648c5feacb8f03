"""Traffic on servers of slots: what two arms of a run would show, with the truth."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from benchmarks.simulation.server import Served, serve
from benchmarks.simulation.weather import (
    BLOCK_S,
    Weather,
    answers,
    arrivals,
    collections,
    host_stalls,
    lasting_noise,
    private_stalls,
)
from tailgate.analysis.arrays import Bools, Floats, Ints
from tailgate.analysis.statistics.compare import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario(Weather):
    """What both arms live through.

    `jitter`: standard deviation of the noise in log work that each request brings by itself. Compiles take `compile_s`
    for each shape that was not met in the warm-up; `collections_s` is the mean time between garbage collections on an
    arm, `host_stalls` how many times the host stops both arms, `private_stalls` how many times the treatment
    stalls for no reason of its requests. Prompts are padded to multiples of `step`.
    """

    slots: int = 16
    work_s: float = 1.6
    jitter: float = 0.08
    compile_s: float = 0.0
    new_shapes: int = 0
    collections_s: float = 0.0
    host_stalls: int = 0
    private_stalls: int = 0
    step: int = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """Two arms of one trial."""

    treatment: Served
    control: Served


def run(scenario: Scenario, rng: np.random.Generator) -> Run:
    """Run one trial. Under `mirrored` each request goes to all arms; else each arm has its own."""
    shared = lasting_noise(scenario, scenario.shared, rng)
    host = host_stalls(scenario, scenario.host_stalls, rng)
    times = arrivals(scenario, rng)
    work, shape = _requests(scenario, len(times), rng)
    served = []
    for arm in range(2):
        if arm and scenario.design != "mirrored":
            times = arrivals(scenario, rng)
            work, shape = _requests(scenario, len(times), rng)
        own = lasting_noise(scenario, scenario.private, rng)
        noise = (shared + own)[times.astype(int)] + rng.standard_normal(len(times)) * scenario.jitter
        outside = [*host, *collections(scenario, scenario.collections_s, rng)]
        compiles: Bools | None = None
        if arm == 0:
            outside += private_stalls(scenario, scenario.private_stalls, rng)
            compiles = first_of_new_shapes(times, -(-shape // scenario.step), scenario.new_shapes, rng)
        served.append(
            serve(
                times,
                work * np.exp(noise),
                shape,
                slots=scenario.slots,
                outside=outside,
                compile_s=scenario.compile_s,
                compiles=compiles,
            )
        )
    return Run(treatment=served[0], control=served[1])


def first_of_new_shapes(times: Floats, shape: Ints, count: int, rng: np.random.Generator) -> Bools:
    """Mark requests that are the first of a shape to compile: `count` of them, past the first 30 s."""
    must = np.zeros(len(times), dtype=np.bool_)
    if count:
        _, first = np.unique(shape, return_index=True)
        late = first[times[first] > 30.0]
        must[rng.choice(late, size=min(count, late.size), replace=False)] = True
    return must


def sample(
    served: Served, *, metric: str = "e2e_ms", ratio: float = 1.0, trial: int = 1, block_s: float = BLOCK_S
) -> Sample:
    """Return the latencies times `ratio`, by block of the arrival."""
    values = getattr(served, metric) * ratio
    block = (served.arrival_s / block_s).astype(np.int64) + trial * 10_000
    return Sample(values=values, block=block, trial=np.full(len(values), trial))


def joined(samples: Iterable[Sample]) -> Sample:
    """Join the trials into one sample."""
    parts = list(samples)
    return Sample(
        values=np.concatenate([part.values for part in parts]),
        block=np.concatenate([part.block for part in parts]),
        trial=np.concatenate([part.trial for part in parts]),
    )


def _requests(scenario: Scenario, count: int, rng: np.random.Generator) -> tuple[Floats, Ints]:
    """Return the work in seconds and the shape (prompt length) of each request."""
    work = answers(scenario.work_s, count, rng)
    return work, np.rint(np.exp(6.633 + 0.985 * rng.standard_normal(count))).astype(np.int64)
