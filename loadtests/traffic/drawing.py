"""The whole traffic of one trial, drawn: starts → lengths → limits → columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from tailgate.analysis.arrays import Ints
from tailgate.loadtests.traffic import arrivals
from tailgate.loadtests.traffic.lengths import FITS, FitName, fitted_lengths, scaled
from tailgate.loadtests.traffic.prompts import PromptText, load_prompt_text
from tailgate.loadtests.traffic.schedule import BLOCKS, EVERY_ARM, SCHEDULE, Schedule
from tailgate.loadtests.traffic.settings import TrafficConfig
from tailgate.loadtests.traffic.traces import BLOCK_TOKENS, Trace, read_trace
from tailgate.servers.complaint import ConfigError

# The streams of randomness, each seeded with its place here: drawing more from one never shifts another.
_STREAMS = ("arrivals", "lengths", "prompts", "assignment", "rampup", "blocks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What the files behind a `[traffic]` table hold, read once a run; None for what it does not name."""

    trace: Trace | None = None
    text: PromptText | None = None


def read_source(config: TrafficConfig, *, tokenizer: str = "", answers: bool = True) -> Source:
    """Read the trace that `config` names and the `tokenizer` of prompts of text. Raises ConfigError.

    Without `answers` nothing is generated, and a trace need not say how much.
    """
    trace = None
    if "trace" in (config.arrivals, config.workload) and not config.trace:
        raise ConfigError("[traffic] replays a trace and traffic.trace names none: add --trace FILE")
    if config.trace:
        trace = read_trace(config.trace, answers=answers, blocks=config.workload == "trace")
    return Source(trace=trace, text=load_prompt_text(tokenizer) if tokenizer else None)


def build_schedule(
    config: TrafficConfig,
    source: Source,
    *,
    arms: Sequence[str],
    seed: int,
    trial: int,
    max_prompt_tokens: int,
    max_new_tokens: int,
    levels: Sequence[float] = (),
) -> Schedule:
    """Return the traffic of trial number `trial`: the same for equal arguments, independent between trials.

    Changing the settings of one stream leaves what the others draw. `levels` are the rates of a saturation search after
    its first trial. `max_new_tokens` 0 is for requests that generate nothing. Lengths over the limits are cut to them;
    `over` counts the requests. A schedule without any request is a ConfigError.
    """
    rng = {
        stream: np.random.default_rng(np.random.SeedSequence(entropy=seed, spawn_key=(trial, number)))
        for number, stream in enumerate(_STREAMS)
    }
    rates = tuple(levels)
    if config.arrivals == "users":
        raise ConfigError('traffic.arrivals is "users", who send the requests: use `tailgate ramp` or other arrivals')
    if config.arrivals == "saturation" and not rates:
        low, high = config.step_rates
        rates = arrivals.staircase(low, high, config.saturation_steps)

    starts_ns, window = _starts(config, source.trace, rates, rng["arrivals"])
    lengths, trace_rows = _lengths(config, source.trace, window, len(starts_ns), rng["lengths"])
    since_s, factors = np.array(config.length_factors).T
    lengths = scaled(lengths, factors[np.searchsorted(since_s * 1e9, starts_ns, side="right") - 1, None])
    seeds = rng["prompts"].integers(0, 2**63 - 1, size=len(starts_ns), dtype=np.int64)
    rows = np.flatnonzero(arrivals.rampup_kept(starts_ns, config.rampup_s, rng=rng["rampup"]))
    if not len(rows):
        raise ConfigError(f"trial {trial} would send no request in {config.duration_s} s: raise the rate or duration_s")
    # All is drawn; from here on rows only go. What is never sent is not counted as over a limit.
    offsets, (inputs, outputs) = starts_ns[rows], lengths[rows].T
    if not max_new_tokens:
        outputs = np.zeros_like(outputs)
    if source.text is not None:
        least = source.text.added + 1
        if least > max_prompt_tokens:
            raise ConfigError(
                f"the tokenizer adds {source.text.added} tokens to a text but engine.max_prompt_tokens is "
                f"{max_prompt_tokens}: raise it to {least} or more"
            )
        inputs = np.maximum(inputs, least)
    over = {
        "requests": len(rows),
        "input_over": int((inputs > max_prompt_tokens).sum()),
        "output_over": int((outputs > max_new_tokens).sum()),
    }
    columns = {
        "index": pa.array(np.arange(len(rows))),
        "offset_ns": pa.array(offsets),
        "prompt_tokens": pa.array(np.minimum(inputs, max_prompt_tokens).astype(np.int32)),
        "max_tokens": pa.array(np.minimum(outputs, max_new_tokens).astype(np.int32)),
        "prompt_seed": pa.array(seeds[rows]),
        "arm": _arm_column(config, arms, offsets, rng["assignment"]),
        "phase": _named(["rampup", "measure"], (offsets >= round(config.rampup_s * 1e9)).astype(np.int64)),
    }
    shared = {}
    facts: dict[str, Any] = {}
    if (trace := source.trace) is not None:
        facts["trace"] = {"format": trace.format, "rows_read": len(trace), "failed": trace.failed}
        if trace_rows is not None and len(trace.blocks.flatten()):
            shared = _block_columns(trace, trace_rows[rows], config.length_scale, rng["blocks"])
    return Schedule(
        table=pa.table({**columns, **shared}, schema=pa.schema([*SCHEDULE, *(BLOCKS if shared else ())])),
        arms=tuple(arms),
        over=over,
        steps=tuple(
            {
                "start_s": config.rampup_s + index * config.step_s,
                "end_s": config.rampup_s + (index + 1) * config.step_s,
                "rate": rate,
            }
            for index, rate in enumerate(rates)
        ),
        prompts=facts,
    )


def switchback_order(blocks: int, arms: int, *, rng: np.random.Generator) -> Ints:
    """Return the arm (0 to arms - 1) of each block, shape (blocks,): every arm once in each group of `arms` blocks, in
    random order. The last group may be cut short."""
    groups = -(-blocks // arms)
    ordered = np.tile(np.arange(arms), (groups, 1))
    return rng.permuted(ordered, axis=1).reshape(-1)[:blocks]


def _starts(
    config: TrafficConfig, trace: Trace | None, levels: Sequence[float], rng: np.random.Generator
) -> tuple[Ints, slice]:
    """Return sorted starts (ns), and the trace rows that they are when a trace is replayed."""
    if config.arrivals == "trace" and trace is not None:
        return arrivals.replay(
            trace.offset_ns, config.duration_s, time_scale=config.time_scale, start_s=config.trace_start_s
        )
    profile = arrivals.rate_profile(config, levels)
    return arrivals.renewals(profile, burstiness=config.burstiness, rng=rng), slice(None)


def _lengths(
    config: TrafficConfig, trace: Trace | None, window: slice, count: int, rng: np.random.Generator
) -> tuple[Ints, Ints | None]:
    """Return `count` rows (input, output) of lengths, and which rows of the trace they are if they are any."""
    if config.workload != "trace" or trace is None:
        fit: FitName = next((name for name in FITS if name == config.workload), "conversation")
        return fitted_lengths(fit, count, rng=rng), None
    if config.arrivals == "trace":
        rows = np.arange(len(trace), dtype=np.int64)[window]
    else:
        rows = rng.integers(0, len(trace), size=count)
    return np.column_stack([trace.input_tokens[rows], trace.output_tokens[rows]]).astype(np.int64), rows


def _arm_column(config: TrafficConfig, arms: Sequence[str], offsets: Ints, rng: np.random.Generator) -> Any:
    if config.design == "mirrored":
        return _named([EVERY_ARM], np.zeros(len(offsets), dtype=np.int64))
    if config.design == "split":
        return pa.nulls(len(offsets), pa.string())
    block_ns = round(config.block_s * 1e9)
    order = switchback_order(-(-round(config.duration_s * 1e9) // block_ns), len(arms), rng=rng)
    return _named(arms, order[offsets // block_ns])


def _named(names: Sequence[str], which: Ints) -> Any:
    """Return a string column with names[which[i]] in row i."""
    return pa.array(list(names), pa.string()).take(pa.array(which))


def _block_columns(trace: Trace, rows: Ints, scale: float, rng: np.random.Generator) -> dict[str, Any]:
    """Return the leading blocks that the prompts of `rows` of the trace share, each of `BLOCK_TOKENS` times `scale`."""
    own = trace.blocks.take(pa.array(rows))
    ids = own.flatten().dictionary_encode()  # by first appearance: more rows leave the earlier seeds as they are
    seeds = rng.integers(0, 2**63 - 1, size=len(ids.dictionary))
    return {
        "blocks": pa.ListArray.from_arrays(own.offsets, pa.array(seeds).take(ids.indices)),
        "block_tokens": pa.array(np.full(len(rows), BLOCK_TOKENS * scale)),
    }
