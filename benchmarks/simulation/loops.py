"""Users who think between requests, and schedules of many kinds, on a server of slots: whether starts wait for ends."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np

from analysis.arrays import Floats, Ints
from analysis.judging.checks.loop import Loop, loop_of
from benchmarks.simulation.table import Table
from benchmarks.simulation.weather import Weather, arrivals

DURATION_S = 600.0
WORK_S = 0.8
RATE = 4.0
USERS, THINK_S = (1, 8, 64), (0.005, 0.05, 0.5, 2.0, 5.0)

Times = tuple[Ints, Ints]  # start and end of each request, in ns


class Slots:
    """A server: what comes takes the slot that is free first. `stalls`: (start, seconds) in which nothing goes on."""

    def __init__(self, slots: int, spread: float, stalls: Sequence[tuple[float, float]], rng: np.random.Generator):
        self._free = [0.0] * slots
        self._spread, self._stalls, self._rng = spread, stalls, rng

    def end_s(self, start_s: float) -> float:
        """When a request that comes at `start_s` ends; requests come in order."""
        begin = max(start_s, heapq.heappop(self._free))
        end = begin + WORK_S * float(np.exp(self._spread * self._rng.standard_normal()))
        for at, seconds in self._stalls:
            if begin < at + seconds and end > at:
                end += at + seconds - max(begin, at)
        heapq.heappush(self._free, end)
        return end


def users(
    count: int, think_s: float, server: Slots, rng: np.random.Generator, *, duration_s: float = DURATION_S
) -> Times:
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
    return _ns(starts), _ns(ends)


def schedule(starts_s: Floats, server: Slots) -> Times:
    """An open loop."""
    return _ns(starts_s), _ns([server.end_s(start) for start in starts_s.tolist()])


def poisson(rng: np.random.Generator) -> Floats:
    return arrivals(Weather(duration_s=DURATION_S, rate=RATE), rng)


def wandering(rng: np.random.Generator) -> Floats:
    return arrivals(Weather(duration_s=DURATION_S, rate=RATE, cox=0.5), rng)


def on_and_off(rng: np.random.Generator) -> Floats:
    """Three times the rate for some 10 s, then nothing for some 20 s."""
    starts: list[float] = []
    at = 0.0
    while at < DURATION_S:
        burst = float(rng.exponential(10.0))
        starts += (at + np.sort(rng.uniform(0, burst, rng.poisson(3 * RATE * burst)))).tolist()
        at += burst + float(rng.exponential(20.0))
    return np.array(starts)


def paced(rng: np.random.Generator) -> Floats:
    return np.arange(0.0, DURATION_S, 1.0 / RATE) + rng.uniform(0.0, 0.002, int(DURATION_S * RATE))


def gamma(rng: np.random.Generator) -> Floats:
    """Gaps more even than those of a Poisson process."""
    return np.asarray(np.cumsum(rng.gamma(4.0, 1.0 / (4.0 * RATE), int(DURATION_S * RATE))))


def batches(rng: np.random.Generator) -> Floats:
    """Forty at once, every 10 s."""
    starts = np.repeat(np.arange(0.0, DURATION_S, 10.0), 40)
    return np.sort(starts + rng.uniform(0.0, 0.001, starts.size))


KINDS: dict[str, Callable[[np.random.Generator], Floats]] = {
    "Poisson": poisson,
    "a rate that wanders": wandering,
    "on and off": on_and_off,
    "paced": paced,
    "gamma, more even": gamma,
    "batches": batches,
}
SERVERS = {"noisy": 0.6, "even": 0.02, "that stalls": 0.6}


def server_of(name: str, rng: np.random.Generator, *, slots: int = 64) -> Slots:
    """A server of the kind, with work that varies by so much and, if it stalls, three stalls of 4 s."""
    stalls = [(float(at), 4.0) for at in np.sort(rng.uniform(40, 560, 3))] if name == "that stalls" else []
    return Slots(slots, SERVERS[name], stalls, rng)


def closed_loop(count: int, think_s: float, server: str, seed: int) -> Loop:
    """What is found of users."""
    rng = np.random.default_rng([1, seed])
    return loop_of(*users(count, think_s, server_of(server, rng, slots=max(4, count // 2)), rng))


def open_loop(kind: str, server: str, seed: int) -> Loop:
    """What is found of a schedule."""
    rng = np.random.default_rng([2, seed])
    return loop_of(*schedule(KINDS[kind](rng), server_of(server, rng)))


def loop_table(table: Table) -> None:
    """The share of closed loops that are taken for open ones, and of schedules for closed ones."""
    runs = max(1, table.seeds // 20)
    for server in SERVERS:
        for count in USERS:
            for think_s in THINK_S:
                loops = [closed_loop(count, think_s, server, seed) for seed in range(runs)]
                missed = sum(loop.known and not loop.closed for loop in loops) / runs
                # Who thinks for 5 s keeps 82 % of the rate in a stall of 1 s: nearly a schedule.
                most = 0.0 if think_s <= 2.0 else None
                name = f"{count} users who think {think_s:g} s, server {server}: taken for a schedule"
                table.add(name, missed, runs=runs, most=most)
        for kind in KINDS:
            schedules = [open_loop(kind, server, seed) for seed in range(runs)]
            name = f"schedule, {kind}, server {server}"
            closed = sum(loop.closed for loop in schedules) / runs
            table.add(f"{name}: taken for users", closed, runs=runs, most=0.0)
            table.add(f"  {name}: cannot be told", sum(not loop.known for loop in schedules) / runs, runs=runs)


def _ns(seconds: Sequence[float] | Floats) -> Ints:
    return (np.asarray(seconds) * 1e9).astype(np.int64)
