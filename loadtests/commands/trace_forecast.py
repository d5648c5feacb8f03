"""`tailgate inspect --trace`: what the prompt lengths of a trace will do to each compile policy. Nothing is run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from analysis.statistics.exposure import (
    ExposureError,
    Padding,
    best_ladder,
    first_seen,
    padding,
    unseen_probability,
)
from analysis.wording import counted
from loadtests.commands.terminal_table import aligned
from loadtests.experiments.config_errors import as_config_error
from loadtests.traffic.traces import Trace, read_trace
from servers import stdout
from servers.fields import ConfigError
from servers.ladders import default_lengths

SCHEMA = 1
_MARKS = (100, 1_000, 10_000, 100_000, 1_000_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What is asked of a trace. Lengths are prompt tokens; each prompt runs as a prefill of its own.

    A prompt longer than `max_prompt_tokens` is left out (0: the longest of the trace is the limit). `graphs` buckets,
    each a multiple of `multiple`, are what the best ladder may have. `recompile_limit` is the compiler's: more shapes
    than that run eagerly. `compile_seconds` is what one compile takes, for the stalls; 0 when unknown.
    """

    max_prompt_tokens: int = 0
    graphs: int = 8
    multiple: int = 1
    ladder: tuple[int, ...] = ()
    recompile_limit: int = 8
    compile_seconds: float = 0.0


def show_forecast(
    trace: str, *, time_unit: Literal["", "s", "ms"] = "", as_json: bool = False, ladder: str = "", **settings: Any
) -> int:
    """Print the forecast of a trace file for the `settings` of `Forecast`; return the exit code."""
    asked = Forecast(ladder=_buckets(ladder), **settings)
    with as_config_error(ExposureError):
        figures = forecast(read_trace(trace, blocks=False, time_unit=time_unit), asked)
    stdout.write(forecast_text(figures), figures, as_json=as_json)
    return 0


def _buckets(text: str) -> tuple[int, ...]:
    """Return (256, 1024) of "256,1024". Raises ConfigError."""
    parts = text.split(",") if text else []
    if len(parts) > 1024 or not all(re.fullmatch(r"[0-9]{1,9}", part.strip()) and int(part) for part in parts):
        raise ConfigError(f'--ladder "{text}" is no list of buckets: give up to 1,024 lengths, such as 256,1024,4096')
    return tuple(int(part) for part in parts)


def forecast_text(figures: dict[str, Any]) -> str:
    """The forecast for people."""
    trace = figures["trace"]
    tokens = trace["prompt_tokens"]
    lines = [
        trace["account"],
        f"prompt tokens p50 {tokens['p50']:,.0f}, p90 {tokens['p90']:,.0f}, p99 {tokens['p99']:,.0f}, max "
        f"{tokens['max']:,}",
    ]
    if trace["too_long"]:
        lines.append(f"{trace['too_long']:,} longer than {trace['max_prompt_tokens']:,} tokens are left out")
    seen = figures["lengths"]
    growth = ", ".join(f"{count:,} after {int(mark):,}" for mark, count in seen["after"].items())
    hourly = seen["new_per_hour"]
    lines += [
        "",
        f"never-seen prompt length: {growth}{', ' if growth else ''}{seen['distinct']:,} after all {seen['steps']:,} "
        "steps",
        f"  new share: {seen['first_tenth_new_share']:.1%} of the first tenth, {seen['last_tenth_new_share']:.1%} of "
        f"the last; the next one is new with {seen['next_is_new']:.1%}"
        + (f", {hourly:,.0f} an hour" if hourly is not None else ""),
    ]
    rows = [["prefill policy", "graphs before", "compiles serving", "padded/true", ""]]
    seconds = any(row["warm_up_s"] is not None for row in figures["policies"])
    if seconds:
        rows[0][3:3] = ["warm-up", "stalled"]
    for row in figures["policies"]:
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


def forecast(trace: Trace, settings: Forecast) -> dict[str, Any]:
    """Return the forecast as plain values: the trace, unseen lengths over time, and one row for each policy."""
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
        "lengths": _exposure(duration_s, lengths),
        "policies": _policies(lengths, limit, settings),
    }


def _exposure(duration_s: float, lengths: Any) -> dict[str, Any]:
    """How many lengths came for the first time, as they came."""
    new, size, chance = first_seen(lengths), len(lengths), unseen_probability(lengths)
    seen = np.cumsum(new)
    tenth = max(1, size // 10)
    return {
        "steps": size,
        "distinct": int(seen[-1]),
        "after": {str(mark): int(seen[mark - 1]) for mark in _MARKS if mark < size},
        "first_tenth_new_share": float(new[:tenth].mean()),
        "last_tenth_new_share": float(new[-tenth:].mean()),
        "next_is_new": chance,
        "new_per_hour": chance * size / duration_s * 3600 if duration_s > 0 else None,
    }


def _policies(lengths: Any, limit: int, settings: Forecast) -> list[dict[str, Any]]:
    row = partial(_row, settings)

    def bucketed(name: str, padded: Padding) -> dict[str, Any]:
        note = ", ".join(map(str, padded.ladder))
        if padded.too_long:
            fit = "fits" if padded.too_long == 1 else "fit"
            note += f"; {counted(padded.too_long, 'step', '{:,}'.format)} {fit} none"
        own = {"ladder": list(padded.ladder), "too_long": padded.too_long}
        return {**row(name, len(padded.ladder), 0, padded.factor, note), **own}

    best = best_ladder(lengths, settings.graphs, multiple=settings.multiple, last=limit)
    given = [bucketed("buckets, as given", padding(lengths, settings.ladder))] if settings.ladder else []
    padded_factor = len(lengths) * limit / float(lengths.sum())
    automatic = "one for the first length, one once it changes; a length of 1 apart"
    return [
        row("eager", 0, 0, 1.0, "exact shapes, nothing to compile"),
        row("one padded shape", 1, 0, padded_factor, f"every prefill runs at {limit}"),
        bucketed("buckets, powers of two", padding(lengths, default_lengths(limit))),
        *given,
        bucketed(f"buckets, best {settings.graphs}", best),
        row("dynamic, marked", 1, 0, 1.0, "one graph for all sizes; slower kernels than a fixed one"),
        *_static_rows(lengths, settings),
        row("automatic dynamic (default)", 0, _automatic_compiles(lengths), 1.0, automatic),
    ]


def _static_rows(lengths: Any, settings: Forecast) -> list[dict[str, Any]]:
    """A graph for each length: as the compiler limits them, and without limit."""
    _, first, times = np.unique(lengths, return_index=True, return_counts=True)
    distinct, limit = len(times), settings.recompile_limit
    note = counted(distinct, "shape", "{:,}".format)
    if distinct > limit:
        # Compiled shapes stay compiled; all others run eagerly for ever.
        eager_share = 1.0 - float(times[np.argsort(first)[:limit]].sum()) / len(lengths)
        note += f"; after {limit}, {eager_share:.0%} of the steps run eagerly, silently"
    return [
        _row(settings, "static, each shape", 0, min(distinct, limit), 1.0, note),
        _row(settings, "static, no limit", 0, distinct, 1.0, f"one compile in {len(lengths) / distinct:.3g} steps"),
    ]


def _automatic_compiles(lengths: Any) -> int:
    """Return how many graphs torch's default compiles: static first, then dynamic; a length of 1 keeps its own."""
    others = lengths[lengths != lengths[0]]
    return 1 + bool((others > 1).any()) + bool((others == 1).any())


def _row(settings: Forecast, name: str, before: int, serving: int, factor: float, note: str) -> dict[str, Any]:
    return {
        "policy": name,
        "graphs_before_serving": before,
        "compiles_while_serving": serving,
        "padded_over_true": factor,
        "warm_up_s": before * settings.compile_seconds if settings.compile_seconds else None,
        "stalled_s": serving * settings.compile_seconds if settings.compile_seconds else None,
        "note": note,
    }
