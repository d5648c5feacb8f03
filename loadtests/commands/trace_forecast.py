"""`tailgate inspect --trace`: how much the prompts of a trace are padded by which buckets. Nothing is run."""

from __future__ import annotations

from typing import Any

import numpy as np

from tailgate.analysis.arrays import Ints
from tailgate.analysis.wording import counted
from tailgate.loadtests.traffic.traces import Trace
from tailgate.servers.complaint import ConfigError
from tailgate.servers.config import default_lengths
from tailgate.servers.stdout import aligned

BUCKETS = 8  # of the best ladder


def forecast(trace: Trace, max_prompt_tokens: int = 0) -> dict[str, Any]:
    """Return the lengths of a trace, and how much ladders of buckets pad them, as plain values. Raises ConfigError.

    Each prompt is alone in its step. Longer ones than `max_prompt_tokens` are left out (0: none is).
    """
    lengths = trace.input_tokens.astype(np.int64)
    limit = max_prompt_tokens or int(lengths.max())
    kept = lengths[lengths <= limit]
    if not len(kept):
        raise ConfigError(
            f"no prompt of the trace has at most {limit} tokens (the shortest has {lengths.min()}): "
            "raise --max-prompt-tokens"
        )
    p50, p90, p99 = np.quantile(kept, (0.5, 0.9, 0.99))
    best = best_ladder(kept, BUCKETS, limit)
    ladders = {"one length": (limit,), "default": default_lengths(limit), f"best {BUCKETS}": best}
    return {
        "account": trace.account,
        "requests": len(kept),
        "too_long": len(lengths) - len(kept),
        "max_prompt_tokens": limit,
        "prompt_tokens": {"p50": p50, "p90": p90, "p99": p99, "max": int(kept.max())},
        "distinct": len(np.unique(kept)),
        "ladders": [
            {
                "name": name,
                "buckets": ladder,
                "padded_over_true": float(np.array(ladder)[np.searchsorted(ladder, kept)].sum() / kept.sum()),
            }
            for name, ladder in ladders.items()
        ],
    }


def forecast_text(figures: dict[str, Any]) -> str:
    """Return the forecast for a terminal."""
    tokens = figures["prompt_tokens"]
    lines = [
        figures["account"],
        f"prompt tokens p50 {tokens['p50']:,.0f}, p90 {tokens['p90']:,.0f}, p99 {tokens['p99']:,.0f}, max "
        f"{tokens['max']:,}",
        f"{figures['requests']:,} prompts of {counted(figures['distinct'], 'length', '{:,}'.format)}",
    ]
    if figures["too_long"]:
        longer = counted(figures["too_long"], "prompt", "{:,}".format)
        lines.append(f"left out: {longer} of over {figures['max_prompt_tokens']:,} tokens")
    rows = [["buckets", "graphs", "padded/true", ""]]
    for row in figures["ladders"]:
        buckets = ", ".join(map(str, row["buckets"]))
        rows.append([row["name"], str(len(row["buckets"])), f"{row['padded_over_true']:.2f} ×", buckets])
    return "\n".join([*lines, "", *aligned(rows)])


def best_ladder(lengths: Ints, buckets: int, last: int) -> tuple[int, ...]:
    """Return the ladder of at most `buckets` lengths, up to `last`, that pads `lengths` (n,) least.

    Dynamic programming, O(buckets · d²) for d distinct lengths; none may exceed `last`.
    """
    edges, counts = np.unique(lengths, return_counts=True)
    if edges[-1] != last:
        edges, counts = np.append(edges, last), np.append(counts, 0)
    size, before = len(edges), np.concatenate([[0], np.cumsum(counts)])  # prompts below each edge
    cost = np.concatenate([[0], edges * before[1:]])  # tokens run for the first j edges: in one bucket at first
    cuts: list[Ints] = []
    for _ in range(min(buckets, size) - 1):
        best, cut = cost.copy(), np.zeros(size + 1, dtype=np.int64)
        for end in range(1, size + 1):
            totals = cost[:end] + edges[end - 1] * (before[end] - before[:end])
            cut[end] = np.argmin(totals)  # 0 where one bucket fewer is as good
            best[end] = totals[cut[end]]
        cost = best
        cuts.append(cut)
    chosen, end = [size - 1], size
    for cut in reversed(cuts):
        if (end := int(cut[end])) == 0:
            break
        chosen.append(end - 1)
    return tuple(int(edges[place]) for place in reversed(chosen))
