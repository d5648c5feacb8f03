"""Leading blocks that prompts share, as a trace says: their seeds in a schedule, and how much of it they make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from loadtests.traffic.lengths import IntArray
from loadtests.traffic.settings import TrafficConfig
from loadtests.traffic.traces import Trace

_COUNTED_BLOCKS = 5_000_000


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


def shared_facts(columns: Mapping[str, Any], prompt_tokens: IntArray) -> dict[str, Any]:
    """How much of the prompts stands in blocks that an earlier prompt began with; empty where none share blocks."""
    if "blocks" not in columns or len(columns["blocks"].flatten()) > _COUNTED_BLOCKS:
        return {}
    block_tokens = float(columns["block_tokens"][0].as_py()) if len(prompt_tokens) else 0.0
    seen: set[int] = set()
    shared = 0.0
    for blocks, size in zip(columns["blocks"].to_pylist(), prompt_tokens.tolist(), strict=True):
        # A prompt that was cut holds fewer blocks than the trace says.
        held = blocks[: max(0, -(-size // max(1, round(block_tokens))))]
        known = next((index for index, block in enumerate(held) if block not in seen), len(held))
        shared += min(known * block_tokens, size)
        seen.update(held)
    return {
        "block_tokens": block_tokens,
        "blocks": len(seen),
        "shared_pct": 100.0 * shared / float(prompt_tokens.sum()),
    }


def _mixed(ids: IntArray, salt: int) -> IntArray:
    """A seed for each block id: equal for equal ids, from 0 to 2^63 - 1 (the finaliser of SplitMix64)."""
    words = ids.astype(np.uint64) ^ np.uint64(salt)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    seeds: IntArray = ((words ^ (words >> np.uint64(31))) >> np.uint64(1)).astype(np.int64)
    return seeds
