"""A made-up server that works in steps, so that what it does for one request holds up the others.

A step is a prefill, which takes longer for longer prompts, or gives every row in the batch one more token. What a
server of slots (`server.py`) lacks is here: long prompts stall the decoding of others, batches wait for their longest
member, and how long a request waits depends on what it meets.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from analysis.arrays import Bools, Floats, Ints
from benchmarks.simulation.server import Pause, Served


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """How a server batches and how fast it is.

    `kind`: "blocking" runs a prompt as one step, before anything else; "chunked" runs `chunk` tokens of one beside each
    decode step; "static" takes up what waits when its batch is empty, and nothing more until the last row has ended.
    `together`: prompts in one prefill, as long as their sum. `curve_tokens`: length at which attention doubles a
    prefill; 0 for none.
    """

    kind: Literal["blocking", "chunked", "static"] = "blocking"
    rows: int = 16
    token_s: float = 1e-4
    curve_tokens: int = 0
    together: int = 1
    step_s: float = 0.02
    row_s: float = 0.0005
    chunk: int = 512

    def prefill_s(self, prompts: Sequence[int]) -> float:
        """How long the prompts take, run as one step."""
        curve = self.curve_tokens or float("inf")
        return sum(self.token_s * prompt * (1.0 + prompt / curve) for prompt in prompts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stepped(Served):
    """What became of n requests: after its first token request i got one at each of `decoded_s[begun[i]:ended[i]]`."""

    decoded_s: Floats
    begun: Ints
    ended: Ints


def serve_in_steps(
    arrival_s: Floats,
    prompts: Ints,
    answers: Ints,
    *,
    engine: Engine,
    slower: Floats,
    outside: Sequence[tuple[float, float]] = (),
    compiles: Bools | None = None,
    compile_s: float = 0.0,
) -> Stepped:
    """Serve requests that arrive in order. `slower`: factor on every step, for each second of the run.

    `outside`: pauses (start, seconds) of the whole server. `compiles` marks requests whose prefill must be compiled.
    """
    count = len(arrival_s)
    began, first = np.zeros((2, count))
    begun, ended = np.zeros((2, count), dtype=np.int64)
    arrivals, tokens, lengths = arrival_s.tolist(), prompts.tolist(), answers.tolist()
    must = compiles.tolist() if compiles is not None else [False] * count
    factors = slower.tolist()
    stalls = deque(sorted(outside))
    decoded: list[float] = []
    pauses: list[Pause] = []
    queue: deque[int] = deque()
    running: list[tuple[int, int]] = []  # (decode steps by which it ends, request)
    now, coming, prefilled = 0.0, 0, 0

    def start(taken: Sequence[int]) -> None:
        for index in taken:
            first[index], begun[index] = now, len(decoded)
            heapq.heappush(running, (len(decoded) + lengths[index] - 1, index))

    def compiled(taken: Sequence[int]) -> float:
        """Work on these begins; how long their compiles take."""
        wait = 0.0
        began[list(taken)] = now
        for index in taken:
            if must[index]:
                pauses.append(Pause(start_s=now + wait, seconds=compile_s, request=index))
                wait += compile_s
        return wait

    while True:
        while running and running[0][0] <= len(decoded):
            ended[heapq.heappop(running)[1]] = len(decoded)
        if not queue and not running:
            if coming >= count:
                break
            now = max(now, arrivals[coming])
        while stalls and stalls[0][0] <= now:
            _, seconds = stalls.popleft()
            pauses.append(Pause(start_s=now, seconds=seconds))
            now += seconds
        while coming < count and arrivals[coming] <= now:
            queue.append(coming)
            coming += 1
        factor = factors[min(int(now), len(factors) - 1)]
        free = engine.rows - len(running)
        if engine.kind == "chunked":
            step = engine.step_s + engine.row_s * len(running)
            done = False
            if queue and free > 0:
                head = queue[0]
                if prefilled == 0:
                    now += compiled([head])
                part = min(engine.chunk, tokens[head] - prefilled)
                curve = engine.curve_tokens or float("inf")
                step += engine.token_s * part * (1.0 + 2.0 * prefilled / curve)
                prefilled += part
                done = prefilled >= tokens[head]
            now += step * factor
            if running:
                decoded.append(now)
            if done:
                prefilled = 0
                start([queue.popleft()])
            continue
        if queue and (free > 0 if engine.kind == "blocking" else not running):
            most = min(free, engine.together)
            taken = [queue.popleft() for _ in range(min(most, len(queue)))]
            now += compiled(taken)
            now += engine.prefill_s([tokens[index] for index in taken]) * factor
            start(taken)
            continue
        now += (engine.step_s + engine.row_s * len(running)) * factor
        decoded.append(now)
    steps = np.array(decoded)
    last = steps[np.maximum(ended - 1, 0)] if decoded else first
    return Stepped(
        arrival_s=arrival_s,
        start_s=began,
        first_token_s=first,
        end_s=np.where(ended > begun, last, first),
        pauses=tuple(pauses),
        decoded_s=steps,
        begun=begun,
        ended=ended,
    )
