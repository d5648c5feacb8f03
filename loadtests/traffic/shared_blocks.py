"""Leading blocks that prompts share, as a trace says: their seeds in a schedule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from loadtests.traffic.lengths import IntArray
from loadtests.traffic.settings import TrafficConfig
from loadtests.traffic.traces import Trace


def block_columns(
    config: TrafficConfig, trace: Trace | None, trace_row: IntArray | None, rows: IntArray, rng: np.random.Generator
) -> dict[str, Any]:
    """ "blocks" and "block_tokens" of the prompts of `rows`; empty where the traffic shares none.

    Turns of made-up sessions share their context instead. `trace_row` is the row of the trace that each request is.
    """
    if trace is None or trace_row is None or not len(trace.block_ids) or config.turns_mean != 1:
        return {}
    ids = [trace.blocks(row) for row in trace_row[rows].tolist()]
    flat = np.concatenate(ids) if ids else np.zeros(0, dtype=np.int64)
    ends = np.cumsum([0, *(len(own) for own in ids)])
    return {
        "blocks": pa.ListArray.from_arrays(
            pa.array(ends.astype(np.int32)), pa.array(_mixed(flat, int(rng.integers(0, 2**63 - 1))))
        ),
        "block_tokens": pa.array(np.full(len(rows), trace.block_tokens * config.length_scale)),
    }


def _mixed(ids: IntArray, salt: int) -> IntArray:
    """A seed for each block id: equal for equal ids, from 0 to 2^63 - 1 (the finaliser of SplitMix64)."""
    words = ids.astype(np.uint64) ^ np.uint64(salt)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    seeds: IntArray = ((words ^ (words >> np.uint64(31))) >> np.uint64(1)).astype(np.int64)
    return seeds
