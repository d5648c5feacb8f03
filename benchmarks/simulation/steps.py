"""A made-up server that works in steps: prompts one by one, tokens for all rows at once, or whole batches.

A step takes longer the more rows it has, a prompt holds up all rows, and a new shape is compiled in the step that
meets it. Several replicas stand behind a splitter that sends each request to the one with the fewest in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from analysis.arrays import Bools, Floats, Ints
from benchmarks.simulation.server import Pause, Served

Policy = Literal["continuous", "static"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a step costs: `step_s` for a token of every row, longer by the share `sharing` when all rows are taken;
    `prompt_s` for a prompt. `shortest_first` takes the shortest answer of the queue, else the oldest. `policy` static
    answers a batch whole before it takes the next."""

    slots: int = 16
    step_s: float = 0.02
    sharing: float = 0.0
    prompt_s: float = 0.02
    policy: Policy = "continuous"
    shortest_first: bool = False
    memory: int = 0  # tokens that all rows may come to together; 0 is no limit

    def token_s(self, rows: int) -> float:
        """Seconds of a step with so many rows."""
        return self.step_s * (1.0 + self.sharing * rows / self.slots)


def serve_steps(
    arrival_s: Floats,
    tokens: Ints,
    speed: Callable[[float], float],
    machine: Machine,
    *,
    replicas: int = 1,
    outside: Sequence[Sequence[tuple[float, float]]] = ((),),
    compile_s: float = 0.0,
    compiles: Bools | None = None,
) -> Served:
    """Serve requests that arrive in order; a step at t takes `speed(t)` times its cost.

    `outside` holds for each replica the pauses (start, seconds) that come whatever it does.
    """
    count = len(arrival_s)
    must = np.zeros(count, dtype=np.bool_) if compiles is None else compiles
    served = [
        _Replica(
            number=number,
            machine=machine,
            speed=speed,
            tokens=tokens.tolist(),
            coming=deque(sorted(outside[number])),
            compile_s=compile_s,
            compiles=must.tolist(),
            arrival_s=arrival_s.tolist(),
            start_s=[0.0] * count,
            first_s=[0.0] * count,
            end_s=[0.0] * count,
            batch=[0] * count,
        )
        for number in range(replicas)
    ]
    where = np.zeros(count, dtype=np.int64)
    for index in range(count):
        now = float(arrival_s[index])
        for replica in served:
            replica.advance(now)
        least = min(range(replicas), key=lambda number: (served[number].in_flight(now), (number + index) % replicas))
        where[index] = least
        served[least].queue.append(index)
    for replica in served:
        replica.advance(float("inf"))

    def own(name: str) -> np.ndarray:
        columns = np.array([getattr(replica, name) for replica in served])
        return np.asarray(columns[where, np.arange(count)])

    return Served(
        arrival_s=arrival_s,
        start_s=own("start_s"),
        first_token_s=own("first_s"),
        end_s=own("end_s"),
        pauses=tuple(pause for replica in served for pause in replica.pauses),
        replica=where,
        batch=own("batch"),
    )


@dataclass(slots=True, kw_only=True, eq=False)
class _Replica:
    number: int
    machine: Machine
    speed: Callable[[float], float]
    tokens: list[int]
    coming: deque[tuple[float, float]]
    compile_s: float
    compiles: list[bool]
    arrival_s: list[float]
    start_s: list[float]
    first_s: list[float]
    end_s: list[float]
    batch: list[int]
    queue: deque[int] = field(default_factory=deque)
    rows: list[list[int]] = field(default_factory=list)  # [request, tokens still to come]
    done: deque[float] = field(default_factory=deque)  # ends to come, as far as they are decided
    clock: float = 0.0
    steps: int = 0
    prompt_was_last: bool = False
    pauses: list[Pause] = field(default_factory=list)

    def in_flight(self, now: float) -> int:
        """Requests that have come and whose answer has not ended."""
        while self.done and self.done[0] <= now:
            self.done.popleft()
        return len(self.queue) + len(self.rows) + len(self.done)

    def advance(self, until: float) -> None:
        """Run every step that begins before `until`."""
        while (self.queue or self.rows) and self.clock < until:
            if self.machine.policy == "static":
                self._whole_batch()
            elif self.queue and self._has_room() and not (self.rows and self.prompt_was_last):
                self._prompt()
            else:
                self._tokens()
        self.clock = max(self.clock, until if until < float("inf") else self.clock)

    def _run(self, seconds: float, compiling: int = -1) -> tuple[float, float]:
        """(begin, end) of a step of so many seconds, with what stops it."""
        while self.coming and self.coming[0][0] <= self.clock:
            start, length = self.coming.popleft()
            self.clock = max(self.clock, start + length)
        begin = self.clock
        end = begin + seconds * self.speed(begin)
        if compiling >= 0:
            self.pauses.append(Pause(replica=self.number, start_s=begin, seconds=self.compile_s, request=compiling))
            end += self.compile_s
        while self.coming and self.coming[0][0] < end:
            end += self.coming.popleft()[1]
        self.clock = end
        self.steps += 1
        return begin, end

    def _has_room(self) -> bool:
        if self.machine.memory and self.rows:
            taken = sum(self.tokens[index] for index, _ in self.rows)
            if taken + self.tokens[self._next()] > self.machine.memory:
                return False
        return len(self.rows) < self.machine.slots

    def _next(self) -> int:
        if self.machine.shortest_first:
            return min(self.queue, key=self.tokens.__getitem__)
        return self.queue[0]

    def _prompt(self) -> None:
        index = self._next()
        self.queue.remove(index)
        begin, end = self._run(self.machine.prompt_s, index if self.compiles[index] else -1)
        self.start_s[index], self.first_s[index], self.batch[index] = begin, end, self.steps
        self.prompt_was_last = True
        if self.tokens[index] > 1:
            self.rows.append([index, self.tokens[index] - 1])
        else:
            self._ended(index, end)

    def _tokens(self) -> None:
        _, end = self._run(self.machine.token_s(len(self.rows)))
        self.prompt_was_last = False
        left = []
        for row in self.rows:
            row[1] -= 1
            if row[1]:
                left.append(row)
            else:
                self._ended(row[0], end)
        self.rows = left

    def _whole_batch(self) -> None:
        taken = [self.queue.popleft() for _ in range(min(self.machine.slots, len(self.queue)))]
        compiling = next((index for index in taken if self.compiles[index]), -1)
        begin, first = self._run(self.machine.prompt_s, compiling)
        number = self.steps
        left = sorted((self.tokens[index] - 1, index) for index in taken)
        passed = 0
        for tokens, index in left:
            self.start_s[index], self.first_s[index], self.batch[index] = begin, first, number
            if tokens > passed:
                self._run((tokens - passed) * self.machine.token_s(len(taken)))
                passed = tokens
            self._ended(index, self.clock)

    def _ended(self, index: int, end: float) -> None:
        self.end_s[index] = end
        self.done.append(end)
