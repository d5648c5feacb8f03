"""The whole traffic of one trial, drawn: starts → sessions → prompts → limits → order → columns.

Pure but for reading a trace: one seed and the trial number give the same schedule everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from loadtests.traffic import arrivals
from loadtests.traffic.lengths import IntArray, Lengths
from loadtests.traffic.limits import within_limits
from loadtests.traffic.prompt_forms import prompt_form, template_facts
from loadtests.traffic.rate_steps import staircase
from loadtests.traffic.schedule import EVERY_ARM, PROMPTS, SCHEDULE, Schedule
from loadtests.traffic.sessions import draw_sessions
from loadtests.traffic.settings import TrafficConfig
from loadtests.traffic.source import Source
from loadtests.traffic.traces import Trace
from servers.complaint import ConfigError

# The streams of randomness, each seeded with its place here: drawing more from one never shifts another.
_STREAMS = ("arrivals", "lengths", "prompts", "assignment", "turns", "think", "rampup", "samples", "blocks")


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
    """The traffic of trial number `trial`: the same for equal arguments, independent between trials.

    Arrivals, lengths, prompts, assignment, turns, think times, ramp-up and shared blocks draw from streams of their
    own, so that changing the settings of one leaves the others as they are. `levels` are the rates of a saturation
    search after its first trial. `max_new_tokens` 0 is for requests that generate nothing.

    `dropped` holds the over-limit policy and counts ("policy", "input_over", "output_over", "requests_dropped") and
    "turns_after_end": turns that would start after the trial and are not sent. A schedule without any request is a
    ConfigError.
    """
    _check_turns(config, len(arms))
    rng = {
        stream: np.random.default_rng(np.random.SeedSequence(entropy=seed, spawn_key=(trial, number)))
        for number, stream in enumerate(_STREAMS)
    }
    duration_ns = round(config.duration_s * 1e9)
    rates = tuple(levels)
    if config.arrivals == "users":
        raise ConfigError('traffic.arrivals is "users", who send the requests: use `tailgate ramp` or other arrivals')
    if config.arrivals == "saturation" and not rates:
        low, high = config.step_rates
        rates = staircase(low, high, config.saturation_steps)

    starts_ns, window = _starts(config, source, rates, rng["arrivals"])
    sessions = draw_sessions(config, source, starts_ns, window, max_new_tokens=max_new_tokens, rng=rng)
    form = prompt_form(config.prompts, sessions, source.text, max_new_tokens=max_new_tokens)
    turns = sessions.turns
    prefix_seeds = _seeds(len(starts_ns), rng["prompts"])[turns.session]
    prompt_seeds = _seeds(len(turns.session), rng["samples"])

    # All is drawn; from here on rows only go. What is never sent is not counted as over a limit. Within a session time
    # rises, so what the end cuts is always the session's tail.
    started = arrivals.rampup_kept(starts_ns, config.rampup_s, rng=rng["rampup"])[turns.session]
    in_time = turns.offset_ns < duration_ns
    planned = rows = np.flatnonzero(started & in_time)
    lengths, within, over = within_limits(
        Lengths(input_tokens=form.tokens[rows], output_tokens=sessions.own.output_tokens[rows]),
        turns.rows(rows),
        policy=config.over_limit,
        max_prompt_tokens=max_prompt_tokens,
        max_new_tokens=max_new_tokens,
    )
    rows = rows[within]
    # A chat that its template alone fills cannot be cut to fit.
    roomy = lengths.input_tokens >= form.smallest(rows)
    rows, lengths = rows[roomy], lengths.rows(roomy)
    dropped = {**asdict(over), "requests_dropped": over.requests_dropped + int((~roomy).sum())}
    if not len(rows):
        raise ConfigError(
            f"trial {trial} would send no request in {config.duration_s} s "
            f"({dropped['requests_dropped']} dropped as too long): raise the rate, duration_s or the model's limits"
        )
    order = np.argsort(turns.offset_ns[rows], kind="stable")
    rows, lengths = rows[order], lengths.rows(order)
    kept = turns.rows(rows)
    offsets = kept.offset_ns
    columns = {
        "index": pa.array(np.arange(len(offsets))),
        "offset_ns": pa.array(offsets),
        "session_id": pc.binary_join_element_wise(str(trial), pc.cast(pa.array(kept.session), pa.string()), "-"),
        "turn": pa.array(kept.turn.astype(np.int32)),
        "prompt_tokens": pa.array(lengths.input_tokens.astype(np.int32)),
        "max_tokens": pa.array(lengths.output_tokens.astype(np.int32)),
        "prompt_seed": pa.array(prompt_seeds[rows]),
        "arm": _arm_column(config, arms, offsets, duration_ns, rng["assignment"]),
        "phase": _named(["rampup", "measure"], (offsets >= round(config.rampup_s * 1e9)).astype(np.int64)),
        "prefix_seed": pa.array(prefix_seeds[rows]),
    }
    extra = {
        **_block_columns(config, source.trace, sessions.trace_row, rows, rng["blocks"]),
        **form.columns(rows, lengths.input_tokens),
    }
    facts: dict[str, Any] = {}
    if (trace := source.trace) is not None:
        facts["trace"] = {"format": trace.format, "rows_read": len(trace), "failed": trace.failed}
    if config.prompts == "chat":
        facts["template"] = template_facts(form, rows, planned, limit=max_prompt_tokens)
    schema = pa.schema([*SCHEDULE, *(PROMPTS.field(name) for name in extra)])
    return Schedule(
        table=pa.table({**columns, **extra}, schema=schema),
        design=config.design,
        arms=tuple(arms),
        trial=trial,
        seed=seed,
        duration_s=config.duration_s,
        block_s=config.block_s,
        dropped={**dropped, "turns_after_end": int((started & ~in_time).sum())},
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


def switchback_order(blocks: int, arms: int, *, rng: np.random.Generator) -> IntArray:
    """The arm (0 to arms - 1) of each block, shape (blocks,): every arm once in each group of `arms` blocks.

    The order within a group is random; the last group may be cut short. More blocks leave the earlier ones as they
    are.
    """
    groups = -(-blocks // arms)
    ordered = np.tile(np.arange(arms), (groups, 1))
    return rng.permuted(ordered, axis=1).reshape(-1)[:blocks]


def _starts(
    config: TrafficConfig, source: Source, levels: Sequence[float], rng: np.random.Generator
) -> tuple[IntArray, slice]:
    """Sorted starts (ns) of sessions, and the trace rows that they are when a trace is replayed."""
    everything = slice(None)
    if config.arrivals == "trace" and source.trace is not None:
        return arrivals.replay(
            source.trace.offset_ns, config.duration_s, time_scale=config.time_scale, start_s=config.trace_start_s
        )
    # Rates are of requests, and a session brings several of them.
    per_session = 1 / config.turns_mean
    profile = arrivals.rate_profile(config, levels) * [1, 1, per_session, per_session]
    return arrivals.renewals(profile, burstiness=config.burstiness, rng=rng), everything


def _seeds(count: int, rng: np.random.Generator) -> IntArray:
    return rng.integers(0, 2**63 - 1, size=count, dtype=np.int64)


def _arm_column(
    config: TrafficConfig, arms: Sequence[str], offsets: IntArray, duration_ns: int, rng: np.random.Generator
) -> Any:
    if config.design == "mirrored":
        return _named([EVERY_ARM], np.zeros(len(offsets), dtype=np.int64))
    if config.design == "split":
        return pa.nulls(len(offsets), pa.string())
    block_ns = round(config.block_s * 1e9)
    order = switchback_order(-(-duration_ns // block_ns), len(arms), rng=rng)
    return _named(arms, order[offsets // block_ns])


def _named(names: Sequence[str], which: IntArray) -> Any:
    """A string column with names[which[i]] in row i."""
    return pa.array(list(names), pa.string()).take(pa.array(which))


def _check_turns(config: TrafficConfig, arms: int) -> None:
    needed_s = arms * config.block_s
    if config.design == "switchback" and config.duration_s < needed_s:
        raise ConfigError(
            f"traffic.duration_s is {config.duration_s} but {arms} arms of block_s = {config.block_s} take "
            f"{needed_s} s for one turn each: raise duration_s or lower block_s"
        )


def _block_columns(
    config: TrafficConfig, trace: Trace | None, trace_row: IntArray | None, rows: IntArray, rng: np.random.Generator
) -> dict[str, Any]:
    """The leading blocks that prompts of `rows` share; empty where the traffic shares none.

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
