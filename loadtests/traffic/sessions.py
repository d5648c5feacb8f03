"""Sessions as they are drawn for a trial: whose turn, how long, from which row of a trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loadtests.traffic.lengths import FITS, FitName, IntArray, Lengths, fitted_lengths
from loadtests.traffic.settings import TrafficConfig
from loadtests.traffic.source import Source
from loadtests.traffic.traces import Trace
from loadtests.traffic.turns import Turns, growing_context, session_turns


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sessions:
    """Every turn drawn, session by session and turn by turn; arrays have shape (n,).

    `own` are a turn's input and answer; `context` are the tokens of the whole context up to it, its input included.
    """

    turns: Turns
    own: Lengths
    context: IntArray
    trace_row: IntArray | None  # the row of the trace that each turn is


def draw_sessions(
    config: TrafficConfig,
    source: Source,
    starts_ns: IntArray,
    window: slice,
    *,
    max_new_tokens: int,
    rng: Mapping[str, np.random.Generator],
) -> Sessions:
    """The sessions that start at `starts_ns`; `window` are the trace's rows when it is replayed.

    Where `max_new_tokens` is 0 nothing is generated, whatever a trace says of its answers.
    """
    counts = rng["turns"].geometric(1 / config.turns_mean, size=len(starts_ns))
    own, trace_row = _lengths(config, source.trace, window, int(counts.sum()), rng["lengths"])
    turns = session_turns(starts_ns, counts, think_time_s=config.think_time_s, rng=rng["think"])
    own = own.scaled(_factors(config, turns.offset_ns))
    if not max_new_tokens:
        own = own.without_answers()
    context = growing_context(own, turns, max_new_tokens=max_new_tokens)
    return Sessions(turns=turns, own=own, context=context, trace_row=trace_row)


def _factors(config: TrafficConfig, offset_ns: IntArray) -> npt.NDArray[np.float64]:
    """The factor on the lengths of what is due at each offset, shape (n,)."""
    starts_s, factors = np.array(config.length_factors).T
    chosen: npt.NDArray[np.float64] = factors[np.searchsorted(starts_s * 1e9, offset_ns, side="right") - 1]
    return chosen


def _lengths(
    config: TrafficConfig, trace: Trace | None, window: slice, count: int, rng: np.random.Generator
) -> tuple[Lengths, IntArray | None]:
    """`count` rows of input and output lengths, and which rows of the trace they are if they are any."""
    if config.workload == "trace" and trace is not None:
        if config.arrivals == "trace":
            rows = np.arange(len(trace), dtype=np.int64)[window]
        else:
            rows = rng.integers(0, len(trace), size=count)
        lengths = Lengths(
            input_tokens=trace.input_tokens[rows].astype(np.int64),
            output_tokens=trace.output_tokens[rows].astype(np.int64),
        )
        return lengths, rows
    fit: FitName = next((name for name in FITS if name == config.workload), "conversation")
    return fitted_lengths(fit, count, rng=rng), None
