"""Which decode steps a trace makes: how many rows run together and how many positions they hold, step by step.

Traffic chooses the lengths of prompts, but how many requests run at once follows from how long a step takes, too. So a
server is played: so many slots, steps that take so long whatever their batch, prefills that take no time. It is a
model of the batch sizes, not of latency.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from analysis.arrays import Ints
from analysis.statistics.exposure import Counts, ExposureError

MOST_STEPS = 20_000_000  # memory for more of them would not be small


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeSteps:
    """The decode steps in order, shape (m,): rows of each, and the positions of its longest row, the new one included.

    `left_out` requests came after the most steps that are played; the last step ends at `end_s` of the trace.
    """

    batch: Ints
    context: Ints
    left_out: int
    end_s: float


def decode_steps(
    offset_ns: Counts,
    prompt_tokens: Counts,
    output_tokens: Counts,
    *,
    slots: int,
    step_s: float,
    most_steps: int = MOST_STEPS,
) -> DecodeSteps:
    """The steps of a server with `slots` rows whose decode steps take `step_s`, all columns (n,) in order of time.

    A prefill brings the first token, so an answer of k tokens takes k − 1 steps. Requests wait for a slot in the order
    in which they came.
    """
    if slots < 1 or not step_s > 0:
        raise ExposureError(f"slots is {slots} and a step takes {step_s} s: give at least 1 slot and more than 0 s")
    arrival = np.asarray(offset_ns, dtype=np.float64) / 1e9
    prompts = np.asarray(prompt_tokens, dtype=np.int64).tolist()
    steps = (np.asarray(output_tokens, dtype=np.int64) - 1).tolist()
    count = len(prompts)
    batch: list[int] = []
    context: list[int] = []
    length: list[int] = []
    running: list[tuple[int, int]] = []  # (step at which it ends, positions before its first step less that step)
    now_s, made, coming = 0.0, 0, 0
    while (running or coming < count) and made < most_steps:
        if not running and coming < count:
            now_s = max(now_s, float(arrival[coming]))
        while coming < count and len(running) < slots and arrival[coming] <= now_s:
            if steps[coming] > 0:
                running.append((made + steps[coming], prompts[coming] - made))
            coming += 1
        if not running:
            continue
        until = min(end for end, _ in running) - made
        if coming < count and len(running) < slots:
            until = min(until, max(1, math.ceil((float(arrival[coming]) - now_s) / step_s)))
        batch.append(len(running))
        context.append(made + 1 + max(base for _, base in running))
        length.append(until)
        made += until
        now_s += until * step_s
        running = [row for row in running if row[0] > made]
    lengths = np.asarray(length, dtype=np.int64)
    first = np.cumsum(lengths) - lengths
    within = np.arange(int(lengths.sum())) - np.repeat(first, lengths)
    return DecodeSteps(
        batch=np.repeat(np.asarray(batch, dtype=np.int64), lengths),
        context=np.repeat(np.asarray(context, dtype=np.int64), lengths) + within,
        left_out=count - coming,
        end_s=now_s,
    )
