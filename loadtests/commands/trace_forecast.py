"""`tailgate inspect --trace`: what the prompt lengths of a trace mean for each compile policy. Nothing is run.

References
----------
[1] Good, I. J. (1953). The population frequencies of species and the estimation of population parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tailgate.analysis.arrays import Ints
from tailgate.analysis.wording import counted
from tailgate.loadtests.traffic.traces import Trace
from tailgate.servers.complaint import ConfigError
from tailgate.servers.config import default_lengths
from tailgate.servers.stdout import aligned

RECOMPILE_LIMIT = 8  # torch's default: lengths beyond it run eagerly
BUCKETS = 8  # of the best ladder


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What one compile policy makes of a trace. `padded_over_true`: tokens run for each prompt token."""

    policy: str
    graphs_before_serving: int = 0
    compiles_while_serving: int = 0
    padded_over_true: float = 1.0
    note: str = ""


def forecast(trace: Trace, max_prompt_tokens: int = 0) -> dict[str, Any]:
    """Return the lengths of a trace and a row for each policy, as plain values. Raises ConfigError.

    Each prompt is a prefill of its own. Longer ones than `max_prompt_tokens` are left out (0: none is).
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
    return {
        "name": trace.name,
        "account": trace.account,
        "requests": len(kept),
        "too_long": len(lengths) - len(kept),
        "max_prompt_tokens": limit,
        "prompt_tokens": {"p50": p50, "p90": p90, "p99": p99, "max": int(kept.max())},
        "distinct": len(np.unique(kept)),
        "next_is_new": unseen_probability(kept),
        "policies": [asdict(policy) for policy in _policies(kept, limit)],
    }


def forecast_text(figures: dict[str, Any]) -> str:
    """Return the forecast for a terminal."""
    tokens = figures["prompt_tokens"]
    lines = [
        figures["account"],
        f"prompt tokens p50 {tokens['p50']:,.0f}, p90 {tokens['p90']:,.0f}, p99 {tokens['p99']:,.0f}, max "
        f"{tokens['max']:,}",
        f"{figures['distinct']:,} lengths in {figures['requests']:,} prompts; the next prompt has a new length with "
        f"probability {figures['next_is_new']:.1%}",
    ]
    if figures["too_long"]:
        longer = counted(figures["too_long"], "prompt", "{:,}".format)
        lines.append(f"left out: {longer} of over {figures['max_prompt_tokens']:,} tokens")
    rows = [["prefill policy", "graphs before serving", "compiles while serving", "padded/true", ""]]
    for row in figures["policies"]:
        counts = [f"{row['graphs_before_serving']:,}", f"{row['compiles_while_serving']:,}"]
        rows.append([row["policy"], *counts, f"{row['padded_over_true']:.2f} ×", row["note"]])
    return "\n".join([*lines, "", *aligned(rows)])


def unseen_probability(lengths: Ints) -> float:
    """Return the probability that the next length is new: lengths seen exactly once over all (Good [1]).

    It assumes that all lengths come from one distribution; traffic that drifts brings more.
    """
    counts = np.unique(lengths, return_counts=True)[1]
    return float((counts == 1).sum() / len(lengths))


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


def _policies(lengths: Ints, limit: int) -> Iterator[Policy]:
    yield Policy(policy="eager", note="exact shapes, nothing to compile")
    yield _padded("one padded shape", lengths, (limit,))
    yield _padded("buckets, powers of two", lengths, default_lengths(limit))
    yield _padded(f"buckets, best {BUCKETS}", lengths, best_ladder(lengths, BUCKETS, limit))
    yield Policy(policy="dynamic, marked", graphs_before_serving=1, note="one graph for all lengths; slower kernels")
    _, first, counts = np.unique(lengths, return_index=True, return_counts=True)
    note = f"{len(counts):,} lengths"
    if len(counts) > RECOMPILE_LIMIT:
        # The first lengths stay compiled; all others run eagerly from then on.
        eager = 1.0 - counts[np.argsort(first)[:RECOMPILE_LIMIT]].sum() / len(lengths)
        note += f"; after {RECOMPILE_LIMIT}, {eager:.0%} of the prompts run eagerly without a warning"
    yield Policy(policy="a graph for each length", compiles_while_serving=min(len(counts), RECOMPILE_LIMIT), note=note)
    # torch's default: static for the first length, then dynamic; a length of 1 keeps a graph of its own.
    others = lengths[lengths != lengths[0]]
    compiles = 1 + bool((others > 1).any()) + bool((others == 1).any())
    note = "one for the first length, one for all others; one more for a length of 1"
    yield Policy(policy="automatic dynamic (default)", compiles_while_serving=compiles, note=note)


def _padded(name: str, lengths: Ints, ladder: Sequence[int]) -> Policy:
    buckets = np.asarray(ladder)
    return Policy(
        policy=name,
        graphs_before_serving=len(ladder),
        padded_over_true=float(buckets[np.searchsorted(buckets, lengths)].sum() / lengths.sum()),
        note=", ".join(map(str, ladder)),
    )
