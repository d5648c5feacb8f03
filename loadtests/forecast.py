"""What a trace will do to each compile policy, before any GPU time: `tailgate forecast`.

Only prefill is foretold: its length is the dimension that traffic chooses. Decode steps have one length and the batch
sizes up to the slots, which every policy can warm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.exposure import Padding, batches, best_ladder, first_seen, padding, unseen_probability
from loadtests.columns import aligned
from loadtests.traces import Trace
from servers.config import SHORTEST_BUCKET, ConfigError, doubling

SCHEMA = 1
_MARKS = (100, 1_000, 10_000, 100_000, 1_000_000)
_MOST_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What is asked of a trace. Lengths are prompt tokens, times seconds.

    A prompt longer than `max_prompt_tokens` is left out (0: the longest of the trace is the limit). Up to `batch`
    prompts that come within `window_s` of the first run as one prefill. `graphs` steps, each a multiple of `multiple`,
    are what the best ladder may have. `recompile_limit` is the compiler's: more shapes than that run eagerly.
    `compile_s` is what one compile takes, for the stalls; 0 when unknown.
    """

    max_prompt_tokens: int = 0
    batch: int = 1
    window_s: float = 0.0
    graphs: int = 8
    multiple: int = 1
    ladder: tuple[int, ...] = ()
    recompile_limit: int = 8
    compile_s: float = 0.0

    def __post_init__(self) -> None:
        for flag, value, low, high in (
            ("--max-prompt-tokens", self.max_prompt_tokens, 0, _MOST_TOKENS),
            ("--batch", self.batch, 1, 4096),
            ("--window-ms", self.window_s * 1e3, 0, 3.6e6),
            ("--graphs", self.graphs, 1, 1024),
            ("--multiple", self.multiple, 1, _MOST_TOKENS),
            ("--recompile-limit", self.recompile_limit, 1, 100_000),
            ("--compile-seconds", self.compile_s, 0, 86_400),
        ):
            if not low <= value <= high:
                raise ConfigError(f"{flag} is {value:g}: give {low:g} to {high:g}")
        if len(self.ladder) > 1024:
            raise ConfigError(f"--ladder has {len(self.ladder)} steps: give up to 1024")
        bad = [step for step in self.ladder if not 1 <= step <= _MOST_TOKENS]
        if bad:
            raise ConfigError(f"--ladder has a step of {bad[0]} tokens: give steps from 1 to {_MOST_TOKENS}")


def forecast(trace: Trace, asked: Forecast) -> dict[str, Any]:
    """The forecast as plain values: the trace, unseen shapes over time, and one row for each policy."""
    lengths = trace.input_tokens.astype(np.int64)
    limit = asked.max_prompt_tokens or int(lengths.max())
    kept = lengths <= limit
    if not kept.any():
        raise ConfigError(
            f"no prompt of the trace has at most {limit} tokens (the shortest has {lengths.min()}): "
            "raise --max-prompt-tokens"
        )
    times, lengths = trace.offset_ns[kept], lengths[kept]
    p50, p90, p99 = np.quantile(lengths, (0.5, 0.9, 0.99))
    duration_s = float(times[-1] - times[0]) / 1e9
    prefills = batches(times, lengths, window_ns=round(asked.window_s * 1e9), most=asked.batch)
    shapes = [_exposure("prompt length", duration_s, lengths)]
    if asked.batch > 1:
        shapes.append(
            _exposure(f"(batch, length), batches of up to {asked.batch}", duration_s, prefills.size, prefills.longest)
        )
    return {
        "schema": SCHEMA,
        "trace": {
            "name": trace.name,
            "requests": len(lengths),
            "duration_s": duration_s,
            "too_long": int((~kept).sum()),
            "max_prompt_tokens": limit,
            "prompt_tokens": {"p50": p50, "p90": p90, "p99": p99, "max": int(lengths.max())},
        },
        "shapes": shapes,
        "policies": _policies(lengths, prefills.size, prefills.longest, limit, asked),
    }


def _exposure(name: str, duration_s: float, *columns: Any) -> dict[str, Any]:
    """How many rows of the columns came for the first time, as they came."""
    new = first_seen(*columns)
    seen = np.cumsum(new)
    size = len(new)
    chance = unseen_probability(*columns)
    tenth = max(1, size // 10)
    return {
        "name": name,
        "steps": size,
        "distinct": int(seen[-1]),
        "after": {str(mark): int(seen[mark - 1]) for mark in _MARKS if mark < size},
        "first_tenth_new_share": float(new[:tenth].mean()),
        "last_tenth_new_share": float(new[-tenth:].mean()),
        "next_is_new": chance,
        "new_per_hour": chance * size / duration_s * 3600 if duration_s > 0 else None,
    }


def _policies(lengths: Any, sizes: Any, longest: Any, limit: int, asked: Forecast) -> list[dict[str, Any]]:
    new = first_seen(sizes, longest)
    distinct = int(new.sum())
    eager_share = 0.0
    if distinct > asked.recompile_limit:
        # compiled shapes stay compiled; all others run eagerly for ever
        last = int(np.flatnonzero(new)[asked.recompile_limit - 1])
        known = {(int(size), int(length)) for size, length in zip(sizes[: last + 1], longest[: last + 1], strict=True)}
        eager_share = 1 - sum((int(s), int(n)) in known for s, n in zip(sizes, longest, strict=True)) / len(sizes)
    batch_sizes = np.asarray(doubling(1, asked.batch))
    doubled = doubling(SHORTEST_BUCKET, limit)
    # a batch runs at its longest prompt, and a bucketed one at the next batch size as well
    exact = float((sizes * longest).sum() / lengths.sum())
    weights = batch_sizes[np.searchsorted(batch_sizes, sizes)]
    rows_padded = float((weights * longest).sum() / lengths.sum())

    def bucketed(name: str, found: Padding) -> dict[str, Any]:
        steps = ", ".join(str(step) for step in found.ladder)
        note = f"{steps}" + (f"; {found.too_long:,} steps fit none" if found.too_long else "")
        graphs = len(found.ladder) * len(batch_sizes)
        row = _row(name, graphs, 0, found.factor * rows_padded, note, asked)
        return {**row, "ladder": list(found.ladder), "too_long": found.too_long}

    rows = [
        _row("eager", 0, 0, exact, "exact shapes, nothing to compile", asked),
        _row(
            "one padded shape",
            1,
            0,
            len(sizes) * asked.batch * limit / float(lengths.sum()),
            f"every prefill runs at {asked.batch} × {limit}",
            asked,
        ),
        bucketed("buckets, powers of two", padding(longest, doubled, weights=weights)),
        bucketed(
            f"buckets, best {asked.graphs}",
            best_ladder(longest, asked.graphs, multiple=asked.multiple, last=limit, weights=weights),
        ),
        _row("dynamic, marked", 1, 0, exact, "one graph for all sizes; slower kernels than a fixed one", asked),
        _row(
            "static, each shape",
            0,
            min(distinct, asked.recompile_limit),
            exact,
            f"{distinct:,} shapes; after {asked.recompile_limit}, {eager_share:.0%} of the steps run eagerly, silently"
            if eager_share
            else f"{distinct:,} shapes",
            asked,
        ),
        _row(
            "static, no limit",
            0,
            distinct,
            exact,
            f"one compile in {len(sizes) / distinct:.3g} steps",
            asked,
        ),
        _row(
            "automatic dynamic (default)",
            0,
            _automatic(sizes, longest),
            exact,
            "one for the first shape, one for each dimension that then changes; sizes of 1 apart",
            asked,
        ),
    ]
    if asked.ladder:
        rows.insert(3, bucketed("buckets, as given", padding(longest, asked.ladder, weights=weights)))
    return rows


def _automatic(sizes: Any, longest: Any) -> int:
    """Compiles of torch's default: static first, then dynamic where a size changed; a size of 1 keeps its own graph."""
    compiles, dynamic_size, dynamic_length = 1, False, False
    graphs: set[tuple[object, object]] = {(int(sizes[0]), int(longest[0]))}
    for size, length in zip(sizes.tolist(), longest.tolist(), strict=True):
        key = (
            "*" if dynamic_size and size > 1 else size,
            "*" if dynamic_length and length > 1 else length,
        )
        if key in graphs or (size, length) in graphs:
            continue
        dynamic_size = dynamic_size or size != int(sizes[0])
        dynamic_length = dynamic_length or length != int(longest[0])
        key = ("*" if dynamic_size and size > 1 else size, "*" if dynamic_length and length > 1 else length)
        graphs.add(key)
        compiles += 1
    return compiles


def _row(name: str, before: int, serving: int, factor: float, note: str, asked: Forecast) -> dict[str, Any]:
    return {
        "policy": name,
        "graphs_before_serving": before,
        "compiles_while_serving": serving,
        "padded_over_true": factor,
        "warm_up_s": before * asked.compile_s if asked.compile_s else None,
        "stalled_s": serving * asked.compile_s if asked.compile_s else None,
        "note": note,
    }


def forecast_text(found: dict[str, Any]) -> str:
    """The forecast for people."""
    trace = found["trace"]
    tokens = trace["prompt_tokens"]
    lines = [
        f"{trace['name']}: {trace['requests']:,} requests in {trace['duration_s']:,.0f} s; prompt tokens p50 "
        f"{tokens['p50']:,.0f}, p90 {tokens['p90']:,.0f}, p99 {tokens['p99']:,.0f}, max {tokens['max']:,}",
    ]
    if trace["too_long"]:
        lines.append(f"{trace['too_long']:,} longer than {trace['max_prompt_tokens']:,} tokens are left out")
    for shape in found["shapes"]:
        growth = ", ".join(f"{count:,} after {int(mark):,}" for mark, count in shape["after"].items())
        hourly = shape["new_per_hour"]
        lines += [
            "",
            f"never-seen {shape['name']}: {growth}{', ' if growth else ''}{shape['distinct']:,} after all "
            f"{shape['steps']:,} steps",
            f"  new share: {shape['first_tenth_new_share']:.1%} of the first tenth, "
            f"{shape['last_tenth_new_share']:.1%} of the last; the next one is new with {shape['next_is_new']:.1%}"
            + (f", {hourly:,.0f} an hour" if hourly is not None else ""),
        ]
    rows = [["prefill policy", "graphs before", "compiles serving", "padded/true", ""]]
    seconds = any(row["warm_up_s"] is not None for row in found["policies"])
    if seconds:
        rows[0][3:3] = ["warm-up", "stalled"]
    for row in found["policies"]:
        cells = [
            row["policy"],
            f"{row['graphs_before_serving']:,}",
            f"{row['compiles_while_serving']:,}",
            f"{row['padded_over_true']:.2f} ×",
            row["note"],
        ]
        if seconds:
            cells[3:3] = [f"{row['warm_up_s']:,.0f} s", f"{row['stalled_s']:,.0f} s"]
        rows.append(cells)
    return "\n".join([*lines, "", *aligned(rows)])
