"""`tailgate inspect --trace`: what the prompt lengths of a trace will do to each compile policy. Nothing is run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from analysis.arrays import Ints
from analysis.statistics.exposure import ExposureError, Padding, best_ladder, padding, unseen_probability
from analysis.wording import counted
from loadtests.experiments.config_errors import as_config_error
from loadtests.traffic.traces import Trace, read_trace
from servers import stdout
from servers.complaint import ConfigError
from servers.config import default_lengths
from servers.terminal_table import aligned

SCHEMA = 2
RECOMPILE_LIMIT = 8  # torch's own: more shapes than that run eagerly


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What one compile policy makes of a trace: graphs made before serving, compiles while serving, tokens that run for
    each token that was asked for."""

    policy: str
    graphs_before_serving: int = 0
    compiles_while_serving: int = 0
    padded_over_true: float = 1.0
    ladder: tuple[int, ...] = ()
    note: str = ""


def show_forecast(
    trace: str,
    *,
    time_unit: Literal["", "s", "ms"],
    as_json: bool,
    max_prompt_tokens: int,
    graphs: int,
    ladder: str,
    compile_seconds: float,
) -> int:
    """Print the forecast of a trace file; return the exit code. The arguments are the options of the command."""
    read = read_trace(trace, blocks=False, time_unit=time_unit)
    with as_config_error(ExposureError):
        figures = forecast(read, max_prompt_tokens=max_prompt_tokens, graphs=graphs, ladder=_buckets(ladder))
    stdout.write(forecast_text(figures, compile_seconds), figures, as_json=as_json)
    return 0


def _buckets(text: str) -> tuple[int, ...]:
    """Return (256, 1024) of "256,1024". Raises ConfigError."""
    parts = text.split(",") if text else []
    if len(parts) > 1024 or not all(re.fullmatch(r"[0-9]{1,9}", part.strip()) and int(part) for part in parts):
        raise ConfigError(f'--ladder "{text}" is no list of buckets: give up to 1,024 lengths, such as 256,1024,4096')
    return tuple(int(part) for part in parts)


def forecast_text(figures: dict[str, Any], compile_seconds: float = 0.0) -> str:
    """Return the forecast for a terminal; with `compile_seconds`, what one compile takes, also the lost time."""
    tokens, distinct, steps = figures["prompt_tokens"], figures["distinct"], figures["requests"]
    lines = [
        figures["account"],
        f"prompt tokens p50 {tokens['p50']:,.0f}, p90 {tokens['p90']:,.0f}, p99 {tokens['p99']:,.0f}, max "
        f"{tokens['max']:,}",
    ]
    if figures["too_long"]:
        lines.append(f"{figures['too_long']:,} longer than {figures['max_prompt_tokens']:,} tokens are left out")
    hourly = figures["new_per_hour"]
    pace = f", {hourly:,.0f} an hour" if hourly is not None else ""
    lines.append(
        f"{distinct:,} lengths in {steps:,} steps; the next one is new with {figures['next_is_new']:.1%}{pace}"
    )
    rows = [["prefill policy", "graphs before", "compiles serving", "padded/true", ""]]
    if compile_seconds:
        rows[0][3:3] = ["warm-up", "stalled"]
    for row in figures["policies"]:
        before, serving = row["graphs_before_serving"], row["compiles_while_serving"]
        note = row["note"] or ", ".join(map(str, row["ladder"]))
        cells = [row["policy"], f"{before:,}", f"{serving:,}", f"{row['padded_over_true']:.2f} ×", note]
        if compile_seconds:
            cells[3:3] = [f"{before * compile_seconds:,.0f} s", f"{serving * compile_seconds:,.0f} s"]
        rows.append(cells)
    return "\n".join([*lines, "", *aligned(rows)])


def forecast(
    trace: Trace, *, max_prompt_tokens: int = 0, graphs: int = 8, ladder: tuple[int, ...] = ()
) -> dict[str, Any]:
    """Return the forecast as plain values: the trace, how many lengths are new, and a row for each policy.

    Each prompt runs as a prefill of its own. One longer than `max_prompt_tokens` is left out (0: the longest of the
    trace is the limit). The best ladder has `graphs` buckets; `ladder` is one more to compare.
    """
    lengths = trace.input_tokens.astype(np.int64)
    limit = max_prompt_tokens or int(lengths.max())
    kept = lengths <= limit
    if not kept.any():
        raise ConfigError(
            f"no prompt of the trace has at most {limit} tokens (the shortest has {lengths.min()}): "
            "raise --max-prompt-tokens"
        )
    times, lengths = trace.offset_ns[kept], lengths[kept]
    p50, p90, p99 = np.quantile(lengths, (0.5, 0.9, 0.99))
    hours = float(times[-1] - times[0]) / 3600e9
    chance = unseen_probability(lengths)
    return {
        "schema": SCHEMA,
        "name": trace.name,
        "account": trace.account,
        "requests": len(lengths),
        "too_long": int((~kept).sum()),
        "max_prompt_tokens": limit,
        "prompt_tokens": {"p50": p50, "p90": p90, "p99": p99, "max": int(lengths.max())},
        "distinct": len(np.unique(lengths)),
        "next_is_new": chance,
        "new_per_hour": chance * len(lengths) / hours if hours > 0 else None,
        "policies": [asdict(policy) for policy in _policies(lengths, limit, graphs, ladder)],
    }


def _policies(lengths: Ints, limit: int, graphs: int, ladder: tuple[int, ...]) -> Iterator[Policy]:
    yield Policy(policy="eager", note="exact shapes, nothing to compile")
    yield Policy(
        policy="one padded shape",
        graphs_before_serving=1,
        padded_over_true=len(lengths) * limit / float(lengths.sum()),
        note=f"every prefill runs at {limit}",
    )
    yield _bucketed("buckets, powers of two", padding(lengths, default_lengths(limit)))
    if ladder:
        yield _bucketed("buckets, as given", padding(lengths, ladder))
    yield _bucketed(f"buckets, best {graphs}", best_ladder(lengths, graphs, last=limit))
    one = "one graph for all sizes; slower kernels than a fixed one"
    yield Policy(policy="dynamic, marked", graphs_before_serving=1, note=one)
    yield from _static(lengths)
    # torch's default: static first, then dynamic; a length of 1 keeps a graph of its own
    others = lengths[lengths != lengths[0]]
    compiles = 1 + bool((others > 1).any()) + bool((others == 1).any())
    automatic = "one for the first length, one once it changes; a length of 1 apart"
    yield Policy(policy="automatic dynamic (default)", compiles_while_serving=compiles, note=automatic)


def _bucketed(name: str, padded: Padding) -> Policy:
    note = ""
    if padded.too_long:
        fit = "fits" if padded.too_long == 1 else "fit"
        steps = counted(padded.too_long, "step", "{:,}".format)
        note = f"{', '.join(map(str, padded.ladder))}; {steps} {fit} none"
    return Policy(
        policy=name,
        graphs_before_serving=len(padded.ladder),
        padded_over_true=padded.factor,
        ladder=padded.ladder,
        note=note,
    )


def _static(lengths: Ints) -> Iterator[Policy]:
    """Yield a graph for each length: as the compiler limits them, and without limit."""
    _, first, times = np.unique(lengths, return_index=True, return_counts=True)
    distinct = len(times)
    note = counted(distinct, "shape", "{:,}".format)
    if distinct > RECOMPILE_LIMIT:
        # Compiled shapes stay compiled; all others run eagerly for ever.
        eager_share = 1.0 - float(times[np.argsort(first)[:RECOMPILE_LIMIT]].sum()) / len(lengths)
        note += f"; after {RECOMPILE_LIMIT}, {eager_share:.0%} of the steps run eagerly, silently"
    yield Policy(policy="static, each shape", compiles_while_serving=min(distinct, RECOMPILE_LIMIT), note=note)
    every = f"one compile in {len(lengths) / distinct:.3g} steps"
    yield Policy(policy="static, no limit", compiles_while_serving=distinct, note=every)
