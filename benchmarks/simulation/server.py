"""A made-up server: slots, a queue, noise that lasts, and pauses that stop everything.

Time without pauses is the server's own time. Requests start in order as slots are free and take as long as their work
says; a pause stops the server's own time for all of them at once, which is what a compile, a garbage collection or a
stalled host does.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tailgate.analysis.arrays import Bools, Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """A replica stalled from `start_s` for `seconds`. `request`: the one whose shape had to be compiled, or -1."""

    start_s: float
    seconds: float
    request: int = -1
    replica: int = 0


def _none() -> Ints:
    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Served:
    """How n requests ended, in seconds from the start of the trial; all of shape (n,).

    `start_s`: when work on a request began. `shape` and `replica` are empty where the server has none.
    """

    arrival_s: Floats
    start_s: Floats
    first_token_s: Floats
    end_s: Floats
    pauses: tuple[Pause, ...] = ()
    shape: Ints = field(default_factory=_none)
    replica: Ints = field(default_factory=_none)

    @property
    def compiled(self) -> list[Pause]:
        """The pauses in which a shape was compiled."""
        return [pause for pause in self.pauses if pause.request >= 0]

    @property
    def e2e_ms(self) -> Floats:
        return (self.end_s - self.arrival_s) * 1e3

    @property
    def ttft_ms(self) -> Floats:
        return (self.first_token_s - self.arrival_s) * 1e3


def serve(
    arrival_s: Floats,
    work_s: Floats,
    shape: Ints,
    *,
    slots: int,
    prefill_share: float = 0.1,
    outside: Sequence[tuple[float, float]] = (),
    compile_s: float = 0.0,
    compiles: Bools | None = None,
) -> Served:
    """Serve requests that arrive in order and take `work_s` of the server's own time each.

    `outside`: pauses (start, seconds) that come whatever the server does. `compiles` marks requests whose shape must be
    compiled for `compile_s` when they start.
    """
    count = len(arrival_s)
    own_start, own_end = np.empty(count), np.empty(count)
    # (real start, own time at it, seconds, request); own time stops meanwhile
    pauses: list[tuple[float, float, float, int]] = []
    waiting = sorted(outside)
    coming = 0
    busy: list[float] = []

    def own_time(real: float) -> float:
        """Return the server's own time at `real`, with the pauses known so far."""
        for start, own, seconds, _ in reversed(pauses):
            if start <= real:
                return own + max(0.0, real - start - seconds)
        return real

    must = np.zeros(count, dtype=np.bool_) if compiles is None else compiles
    for index in range(count):
        arrival = float(arrival_s[index])
        while coming < len(waiting) and waiting[coming][0] <= arrival:
            start, seconds = waiting[coming]
            coming += 1
            pauses[:] = _settled([*pauses, (start, own_time(start), seconds, -1)])
        begin = own_time(arrival)
        if len(busy) >= slots:
            begin = max(begin, heapq.heappop(busy))
        if must[index]:
            pauses[:] = _settled([*pauses, (0.0, begin, compile_s, index)])
        own_start[index] = begin
        own_end[index] = begin + work_s[index]
        heapq.heappush(busy, float(own_end[index]))
    for start, seconds in waiting[coming:]:
        pauses = _settled([*pauses, (start, own_time(start), seconds, -1)])
    own_at = np.array([own for _, own, _, _ in pauses])
    total = np.concatenate([[0.0], np.cumsum([seconds for _, _, seconds, _ in pauses])])

    def real_time(own: Floats) -> Floats:
        # what happens at the very instant at which a pause begins happens before it
        return np.asarray(own + total[np.searchsorted(own_at, own, side="left")])

    first = own_start + work_s * prefill_share
    return Served(
        arrival_s=arrival_s,
        start_s=real_time(own_start),
        first_token_s=real_time(first),
        end_s=real_time(own_end),
        shape=shape,
        pauses=tuple(Pause(start_s=s, seconds=d, request=r) for s, _, d, r in pauses),
    )


def _settled(pauses: list[tuple[float, float, float, int]]) -> list[tuple[float, float, float, int]]:
    """Return the pauses in order, each with its real start: those before it push it back."""
    settled: list[tuple[float, float, float, int]] = []
    stood = 0.0
    for _, own, seconds, request in sorted(pauses, key=lambda item: item[1]):
        settled.append((own + stood, own, seconds, request))
        stood += seconds
    return settled
