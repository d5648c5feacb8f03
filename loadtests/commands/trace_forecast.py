"""What a trace will do to each compile policy, before any GPU time.

The shapes of prefills follow from the trace alone. Those of decode steps, rows and positions, also depend on how long a
step takes: more requests run at once on a slower server. So they are foretold for several such times.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from analysis.statistics.decoding import DecodeSteps, decode_steps
from analysis.statistics.exposure import Padding, batches, best_ladder, first_seen, padding, unseen_probability
from analysis.wording import counted
from loadtests.traffic.traces import Trace
from servers.fields import ConfigError
from servers.ladders import default_batches, default_lengths

SCHEMA = 1
_MARKS = (100, 1_000, 10_000, 100_000, 1_000_000)
_MOST_NAMED = 6  # shapes in a note


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What is asked of a trace. Lengths are prompt tokens.

    A prompt longer than `max_prompt_tokens` is left out (0: the longest of the trace is the limit). Up to `batch`
    prompts that come within `window_ms` of the first run as one prefill. `graphs` steps, each a multiple of `multiple`,
    are what the best ladder may have. `recompile_limit` is the compiler's: more shapes than that run eagerly.
    `compile_s` is what one compile takes, for the stalls; 0 when unknown. `slots` requests decode at once, and a decode
    step takes each of `step_ms`.
    """

    max_prompt_tokens: int = 0
    batch: int = 1
    window_ms: float = 0.0
    graphs: int = 8
    multiple: int = 1
    ladder: tuple[int, ...] = ()
    recompile_limit: int = 8
    compile_s: float = 0.0
    slots: int = 8
    step_ms: tuple[float, ...] = (10.0, 30.0, 100.0)


def forecast(trace: Trace, settings: Forecast) -> dict[str, Any]:
    """The forecast as plain values: the trace, unseen shapes over time, and one row for each policy."""
    lengths = trace.input_tokens.astype(np.int64)
    limit = settings.max_prompt_tokens or int(lengths.max())
    kept = lengths <= limit
    if not kept.any():
        raise ConfigError(
            f"no prompt of the trace has at most {limit} tokens (the shortest has {lengths.min()}): "
            "raise --max-prompt-tokens"
        )
    times, lengths = trace.offset_ns[kept], lengths[kept]
    p50, p90, p99 = np.quantile(lengths, (0.5, 0.9, 0.99))
    duration_s = float(times[-1] - times[0]) / 1e9
    prefills = batches(times, lengths, window_ns=round(settings.window_ms * 1e6), most=settings.batch)
    shapes = [_exposure("prompt length", duration_s, lengths)]
    if settings.batch > 1:
        name = f"(batch, length), batches of up to {settings.batch}"
        shapes.append(_exposure(name, duration_s, prefills.size, prefills.longest))
    return {
        "schema": SCHEMA,
        "trace": {
            "name": trace.name,
            "account": trace.account,
            "requests": len(lengths),
            "duration_s": duration_s,
            "too_long": int((~kept).sum()),
            "max_prompt_tokens": limit,
            "prompt_tokens": {"p50": p50, "p90": p90, "p99": p99, "max": int(lengths.max())},
        },
        "shapes": shapes,
        "policies": _policies(lengths, prefills.size, prefills.longest, limit, settings),
        "decode": [_decode(trace, kept, step_ms, settings) for step_ms in settings.step_ms],
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


def _policies(lengths: Any, sizes: Any, longest: Any, limit: int, settings: Forecast) -> list[dict[str, Any]]:
    batch_sizes = np.asarray(default_batches(settings.batch))
    # a batch runs at its longest prompt, and a bucketed one at the next batch size as well
    exact = float((sizes * longest).sum() / lengths.sum())
    weights = batch_sizes[np.searchsorted(batch_sizes, sizes)]
    rows_padded = float((weights * longest).sum() / lengths.sum())
    row = partial(_row, settings)

    def bucketed(name: str, padded: Padding) -> dict[str, Any]:
        note = ", ".join(map(str, padded.ladder))
        if padded.too_long:
            fit = "fits" if padded.too_long == 1 else "fit"
            note += f"; {counted(padded.too_long, 'step', '{:,}'.format)} {fit} none"
        graphs = len(padded.ladder) * len(batch_sizes)
        return {
            **row(name, graphs, 0, padded.factor * rows_padded, note),
            "ladder": list(padded.ladder),
            "too_long": padded.too_long,
        }

    padded_factor = len(sizes) * settings.batch * limit / float(lengths.sum())
    best = best_ladder(longest, settings.graphs, multiple=settings.multiple, last=limit, weights=weights)
    shapes = _Shapes.of(sizes, longest)
    rows = [
        row("eager", 0, 0, exact, "exact shapes, nothing to compile"),
        row("one padded shape", 1, 0, padded_factor, f"every prefill runs at {settings.batch} × {limit}"),
        bucketed("buckets, powers of two", padding(longest, default_lengths(limit), weights=weights)),
        bucketed(f"buckets, best {settings.graphs}", best),
        row("dynamic, marked", 1, 0, exact, "one graph for all sizes; slower kernels than a fixed one"),
        *_static_rows(shapes, exact, settings),
        row(
            "automatic dynamic (default)",
            0,
            len(automatic_compiles(sizes[shapes.first], longest[shapes.first])),
            exact,
            "one for the first shape, one for each dimension that then changes; sizes of 1 apart",
        ),
    ]
    if settings.ladder:
        rows.insert(3, bucketed("buckets, as given", padding(longest, settings.ladder, weights=weights)))
    return rows


def _decode(trace: Trace, kept: Any, step_ms: float, settings: Forecast) -> dict[str, Any]:
    """The decode steps of a server whose steps take `step_ms`, and what each policy pays for them."""
    columns = (column[kept] for column in (trace.offset_ns, trace.input_tokens, trace.output_tokens))
    steps = decode_steps(*columns, slots=settings.slots, step_s=step_ms / 1e3)
    count = len(steps.batch)
    longest_s = float(trace.output_tokens[kept].max()) * step_ms / 1e3
    shapes = _Shapes.of(steps.batch, steps.context)
    return {
        "step_ms": step_ms,
        "slots": settings.slots,
        "steps": count,
        "requests_left_out": steps.left_out,
        "distinct": len(shapes.first),
        "next_is_new": float((shapes.times == 1).sum() / count) if count else 1.0,
        "mean_batch": float(steps.batch.mean()) if count else None,
        "batches": np.unique(steps.batch).tolist(),
        "full_share": float((steps.batch == settings.slots).mean()) if count else None,
        "longest_context": int(steps.context.max(initial=0)),
        "behind_s": max(0.0, steps.end_s - longest_s - float(trace.offset_ns[kept][-1]) / 1e9),
        "policies": _decode_policies(steps, shapes, settings) if count else [],
    }


def _decode_policies(steps: DecodeSteps, shapes: _Shapes, settings: Forecast) -> list[dict[str, Any]]:
    rows = float(steps.batch.sum())
    ladder = np.asarray(default_batches(settings.slots))
    bucketed = float(ladder[np.searchsorted(ladder, steps.batch)].sum()) / rows
    doubled = float(np.maximum(steps.batch, 2).sum()) / rows
    padded = len(steps.batch) * settings.slots / rows
    sizes, contexts = steps.batch[shapes.first], steps.context[shapes.first]
    compiled = automatic_compiles(sizes, contexts)
    first_compiled = ", ".join(f"{sizes[at]}@{contexts[at]}" for at in compiled[:_MOST_NAMED])
    row = partial(_row, settings)
    return [
        row("eager", 0, 0, 1.0, "exact shapes, nothing to compile"),
        row("one padded shape", 1, 0, padded, f"every step runs {settings.slots} rows"),
        row("buckets, powers of two", len(ladder), 0, bucketed, ", ".join(map(str, ladder)) + " rows"),
        row("dynamic, marked", 1, 0, doubled, "one graph for all sizes; a single row runs as two"),
        *_static_rows(shapes, 1.0, settings),
        row("automatic dynamic (default)", 0, len(compiled), 1.0, f"at rows@positions {first_compiled}"),
    ]


@dataclass(frozen=True, slots=True)
class _Shapes:
    """The distinct shapes of steps, as they came: the step that had it first, and how many steps had it."""

    first: Any
    times: Any

    @classmethod
    def of(cls, sizes: Any, lengths: Any) -> _Shapes:
        # One number a shape: far quicker to sort than pairs.
        span = int(lengths.max(initial=0)) + 1
        _, first, times = np.unique(sizes * span + lengths, return_index=True, return_counts=True)
        order = np.argsort(first)
        return cls(first[order], times[order])


def _static_rows(shapes: _Shapes, factor: float, settings: Forecast) -> list[dict[str, Any]]:
    """A graph for each shape: as the compiler limits them, and without limit."""
    distinct, limit, steps = len(shapes.first), settings.recompile_limit, int(shapes.times.sum())
    note = counted(distinct, "shape", "{:,}".format)
    if distinct > limit:
        # compiled shapes stay compiled; all others run eagerly for ever
        eager_share = 1.0 - float(shapes.times[:limit].sum()) / steps
        note += f"; after {limit}, {eager_share:.0%} of the steps run eagerly, silently"
    return [
        _row(settings, "static, each shape", 0, min(distinct, limit), factor, note),
        _row(settings, "static, no limit", 0, distinct, factor, f"one compile in {steps / distinct:.3g} steps"),
    ]


def automatic_compiles(sizes: Iterable[Any], lengths: Iterable[Any]) -> list[int]:
    """Which of the shapes (size, length), in their order, torch's default compiles.

    Static first, then dynamic in a dimension that differed when it had to compile; a size of 1 keeps its own graph.
    """
    first: tuple[int, int] | None = None
    dynamic = [False, False]
    graphs: set[tuple[int | None, int | None]] = set()  # None serves every size above 1
    compiled = []
    for at, (size, length) in enumerate(zip(sizes, lengths, strict=True)):
        shape = (int(size), int(length))
        if any(
            all(own == other or (other is None and own > 1) for own, other in zip(shape, graph, strict=True))
            for graph in graphs
        ):
            continue
        first = first or shape
        dynamic = [was or own != other for was, own, other in zip(dynamic, shape, first, strict=True)]
        size_of, length_of = (None if free and own > 1 else own for free, own in zip(dynamic, shape, strict=True))
        graphs.add((size_of, length_of))
        compiled.append(at)
    return compiled


def _row(settings: Forecast, name: str, before: int, serving: int, factor: float, note: str) -> dict[str, Any]:
    return {
        "policy": name,
        "graphs_before_serving": before,
        "compiles_while_serving": serving,
        "padded_over_true": factor,
        "warm_up_s": before * settings.compile_s if settings.compile_s else None,
        "stalled_s": serving * settings.compile_s if settings.compile_s else None,
        "note": note,
    }
