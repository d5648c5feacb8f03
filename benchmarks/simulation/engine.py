"""A made-up server that works in steps, so that what it does for one request holds up the others.

A step is a prefill, which takes longer for longer prompts, or gives every row in the batch one more token. Long prompts
stall the decoding of others, batches wait for their longest member, and a pause (a compile, a garbage collection, a
stalled host) stops everything.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from benchmarks.simulation.weather import Stalls
from tailgate.analysis.arrays import Bools, Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """How a server batches and how fast it is.

    `kind`: "blocking" runs a prompt as one step, before anything else; "alternating" runs one between two decode steps;
    "chunked" runs `chunk` tokens of one with each decode step; "static" takes up what waits when its batch is empty,
    and nothing more until the last row has ended. A prefill of up to `together` prompts takes `prompt_s` and `token_s`
    for each of their tokens. `curve_tokens`: length at which attention doubles a prefill; 0 for none. `shortest_first`:
    "alternating" takes the shortest answer of the queue, else the oldest. `decodes_on`: running answers go on while a
    prompt's shape is compiled.
    """

    kind: Literal["blocking", "alternating", "chunked", "static"] = "blocking"
    rows: int = 16
    prompt_s: float = 0.0
    token_s: float = 1e-4
    curve_tokens: int = 0
    together: int = 1
    step_s: float = 0.02
    row_s: float = 0.0005
    chunk: int = 512
    shortest_first: bool = False
    decodes_on: bool = False

    def prefill_s(self, prompts: Sequence[int]) -> float:
        """Return how long the prompts take, run as one step."""
        curve = self.curve_tokens or float("inf")
        return self.prompt_s + sum(self.token_s * prompt * (1.0 + prompt / curve) for prompt in prompts)

    def decode_s(self, rows: int) -> float:
        """Return how long a step takes that gives so many rows a token."""
        return self.step_s + self.row_s * rows


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

    `start_s`: when work on a request began. `replica` is empty where there is one.
    """

    arrival_s: Floats
    start_s: Floats
    first_token_s: Floats
    end_s: Floats
    pauses: tuple[Pause, ...] = ()
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stepped(Served):
    """How n requests ended; `decoded_s` are the ends of all decode steps.

    Request i has its first token at `first_token_s` and one more in each of the steps `begun[i]` to `ended[i]` − 1.
    """

    decoded_s: Floats
    begun: Ints
    ended: Ints


class Replica:
    """One server, which takes requests in the order of their arrival. `slower`: factor on every step, by second.

    `outside`: pauses (start, seconds) of the whole server. `compiles` marks requests whose prefill must be compiled.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Ints,
        answers: Ints,
        *,
        slower: Floats,
        outside: Sequence[tuple[float, float]] = (),
        compiles: Bools | None = None,
        compile_s: float = 0.0,
    ) -> None:
        count = len(prompts)
        self.engine = engine
        self.began_s, self.first_s, self.end_s = np.zeros((3, count))
        self.begun, self.ended = np.zeros((2, count), dtype=np.int64)
        self.decoded: list[float] = []
        self.pauses: list[Pause] = []
        self._prompts, self._answers, self._factors = prompts.tolist(), answers.tolist(), slower.tolist()
        self._must = compiles.tolist() if compiles is not None else [False] * count
        self._compile_s = compile_s
        self._stalls = deque(sorted(outside))
        self._queue: deque[int] = deque()
        self._running: list[tuple[int, int]] = []  # (decode steps by which it ends, request)
        self._now_s = 0.0
        self._prefilled = 0  # tokens of the prompt that is run in chunks
        self._prompt_was_last = False

    @property
    def in_flight(self) -> int:
        """Requests that have come and whose answer has not ended."""
        return len(self._queue) + len(self._running)

    def take(self, request: int, at_s: float) -> None:
        """Run until the request comes, and queue it."""
        self.advance(at_s)
        self._now_s = max(self._now_s, at_s)
        self._queue.append(request)

    def advance(self, until_s: float) -> None:
        """Run every step that begins before `until_s`."""
        while self.in_flight and self._now_s < until_s:
            self._end_rows()
            if not self.in_flight:
                return
            while self._stalls and self._stalls[0][0] <= self._now_s:
                self._pause(self._stalls.popleft()[1])
            if self._now_s < until_s:
                self._step(self._factors[min(int(self._now_s), len(self._factors) - 1)])

    def _end_rows(self) -> None:
        while self._running and self._running[0][0] <= len(self.decoded):
            request = heapq.heappop(self._running)[1]
            self.ended[request] = len(self.decoded)
            decoded = len(self.decoded) > self.begun[request]
            self.end_s[request] = self.decoded[-1] if decoded else self.first_s[request]

    def _step(self, factor: float) -> None:
        taken = self._next()
        if self.engine.kind == "chunked":
            self._chunk(taken, factor)
        elif taken:
            for request in taken:
                self._queue.remove(request)
            self._begin(taken)
            self._now_s += self.engine.prefill_s([self._prompts[request] for request in taken]) * factor
            self._answer(taken)
            self._prompt_was_last = True
        else:
            self._now_s += self.engine.decode_s(len(self._running)) * factor
            self.decoded.append(self._now_s)
            self._prompt_was_last = False

    def _next(self) -> list[int]:
        """Return the queued requests whose prompts run in this step."""
        engine, free = self.engine, self.engine.rows - len(self._running)
        waits = engine.kind == "static" or (engine.kind == "alternating" and self._prompt_was_last)
        if not self._queue or free <= 0 or (waits and self._running):
            return []
        if engine.kind != "alternating":
            return [self._queue[place] for place in range(min(free, engine.together, len(self._queue)))]
        request = min(self._queue, key=self._answers.__getitem__) if engine.shortest_first else self._queue[0]
        return [request]

    def _chunk(self, taken: Sequence[int], factor: float) -> None:
        """Run a decode step together with a part of the first prompt."""
        seconds = self.engine.decode_s(len(self._running))
        done = False
        for request in taken[:1]:
            if self._prefilled == 0:
                self._begin([request])
            part = min(self.engine.chunk, self._prompts[request] - self._prefilled)
            curve = self.engine.curve_tokens or float("inf")
            seconds += self.engine.token_s * part * (1.0 + 2.0 * self._prefilled / curve)
            self._prefilled += part
            done = self._prefilled >= self._prompts[request]
        self._now_s += seconds * factor
        if self._running:
            self.decoded.append(self._now_s)
        if done:
            self._prefilled = 0
            self._answer([self._queue.popleft()])

    def _begin(self, taken: Sequence[int]) -> None:
        """Begin work on these, with the compiles that they need."""
        self.began_s[list(taken)] = self._now_s
        for request in taken:
            if self._must[request]:
                self._pause(self._compile_s, request)

    def _pause(self, seconds: float, request: int = -1) -> None:
        self.pauses.append(Pause(start_s=self._now_s, seconds=seconds, request=request))
        end_s = self._now_s + seconds
        while request >= 0 and self.engine.decodes_on and self._running and self._now_s < end_s:
            self._now_s += self.engine.decode_s(len(self._running))
            self.decoded.append(self._now_s)
            self._end_rows()
        self._now_s = max(self._now_s, end_s)

    def _answer(self, taken: Sequence[int]) -> None:
        """Give these their first token and make them rows of the batch."""
        for request in taken:
            self.first_s[request], self.begun[request] = self._now_s, len(self.decoded)
            heapq.heappush(self._running, (len(self.decoded) + self._answers[request] - 1, request))


def serve_in_steps(arrival_s: Floats, prompts: Ints, answers: Ints, *, engine: Engine, **how: Any) -> Stepped:
    """Serve requests that arrive in order on one replica; `how` are the other arguments of `Replica`."""
    replica = Replica(engine, prompts, answers, **how)
    for request, at_s in enumerate(arrival_s.tolist()):
        replica.take(request, at_s)
    replica.advance(math.inf)
    return Stepped(
        arrival_s=arrival_s,
        start_s=replica.began_s,
        first_token_s=replica.first_s,
        end_s=replica.end_s,
        pauses=tuple(replica.pauses),
        decoded_s=np.array(replica.decoded),
        begun=replica.begun,
        ended=replica.ended,
    )


def serve_behind_splitter(
    arrival_s: Floats, answers: Ints, *, engine: Engine, outside: Sequence[Stalls], **how: Any
) -> Served:
    """Serve requests, each on the replica with the fewest in flight; `outside` holds the pauses of each replica."""
    replicas = [Replica(engine, np.zeros_like(answers), answers, outside=own, **how) for own in outside]
    where = np.zeros(len(arrival_s), dtype=np.int64)
    for request, at_s in enumerate(arrival_s.tolist()):
        for replica in replicas:
            replica.advance(at_s)
        turns = range(len(replicas))
        least = min(turns, key=lambda n, turn=request: (replicas[n].in_flight, (n + turn) % len(replicas)))  # type: ignore[misc]
        where[request] = least
        replicas[least].take(request, at_s)
    for replica in replicas:
        replica.advance(math.inf)

    def own(name: str) -> Floats:
        return np.array([getattr(replica, name) for replica in replicas])[where, np.arange(len(where))]

    return Served(
        arrival_s=arrival_s,
        start_s=own("began_s"),
        first_token_s=own("first_s"),
        end_s=own("end_s"),
        pauses=tuple(replace(item, replica=n) for n, replica in enumerate(replicas) for item in replica.pauses),
        replica=where,
    )
