"""What is sent, when, and to which arm: the whole traffic of one trial, fixed before it starts.

`build_schedule` is pure but for reading a trace: one seed and the trial number give the same table everywhere.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import repeat
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from loadtests.traffic import arrivals
from loadtests.traffic.lengths import Lengths, within_limits
from loadtests.traffic.rate_steps import staircase
from loadtests.traffic.sampling import draw, prompt_columns, shared_facts, smallest, source_facts, template_facts
from loadtests.traffic.settings import Arrivals, Design, TrafficConfig, Workload
from loadtests.traffic.source import Source, read_source
from servers.config import ConfigError

__all__ = [
    "EVERY_ARM",
    "SCHEDULE",
    "Arrivals",
    "Design",
    "PlannedRequest",
    "Schedule",
    "TrafficConfig",
    "Workload",
    "planned_requests",
]

IntArray = npt.NDArray[np.int64]

EVERY_ARM = "*"

SCHEDULE = pa.schema(
    [
        ("index", pa.int64()),
        ("offset_ns", pa.int64()),  # from the start of the trial
        ("session_id", pa.string()),
        ("turn", pa.int32()),
        ("prompt_tokens", pa.int32()),
        ("max_tokens", pa.int32()),
        ("prompt_seed", pa.int64()),  # one of its own for each request
        ("arm", pa.string()),  # null: the splitter chooses; "*": a copy to every arm; a name: pinned
        ("phase", pa.string()),  # rampup | measure
        ("prefix_seed", pa.int64()),  # one for each session: names its token sequence
    ]
)
# What else a prompt may be made from; a schedule holds those of these columns that it needs. See `PromptSource`.
PROMPTS = pa.schema(
    [
        ("blocks", pa.list_(pa.int64())),  # a seed for each leading block, equal where prompts share the block
        ("block_tokens", pa.float64()),
        ("parts", pa.list_(pa.int32())),  # content tokens of each message of a chat
        ("token_ids", pa.list_(pa.int32())),  # the prompt itself
    ]
)
_METADATA_KEY = b"tailgate.schedule"

# Requests of a closed loop without num_prompts, which are sent again and again.
_CLOSED_ROWS = 1024
_CLOSED_ROUNDS = 16

# The streams of randomness, each with a fixed number: drawing more from one never shifts another.
_STREAMS = {
    "arrivals": 0,
    "lengths": 1,
    "prompts": 2,
    "assignment": 3,
    "turns": 4,
    "think": 5,
    "rampup": 6,
    "samples": 7,
    "blocks": 8,
}


class PlannedRequest(NamedTuple):
    """One row of a schedule, columns as in `SCHEDULE`. A plain tuple: rows are made while the load runs."""

    index: int  # type: ignore[assignment]  # a row's number matters more than tuple.index
    offset_ns: int
    session_id: str
    turn: int
    prompt_tokens: int
    max_tokens: int
    prompt_seed: int
    arm: str | None
    phase: str
    prefix_seed: int
    blocks: Sequence[int] | None = None
    block_tokens: float | None = None
    parts: Sequence[int] | None = None
    token_ids: Sequence[int] | None = None


def planned_requests(rows: Any) -> Iterator[PlannedRequest]:
    """The rows of a table or record batch that has the columns of a schedule. Column by column: far the quickest."""
    here = set(rows.schema.names)
    columns = [
        rows.column(name).to_pylist() if name in here else repeat(None, rows.num_rows)
        for name in PlannedRequest._fields
    ]
    return map(PlannedRequest._make, zip(*columns, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """The planned requests of one trial in order of time, and what they were made from.

    Columns are those of `SCHEDULE` and some of `PROMPTS`. `loop` "closed": the rows have no times, and an arm gets the
    next one when it has answered another. `steps` are the rates of a saturation search; `prompts` tells what chat
    templates, conversations and shared blocks did to the prompts.
    """

    table: Any  # pyarrow.Table
    design: Design
    arms: tuple[str, ...]
    trial: int
    seed: int
    duration_s: float
    block_s: float
    dropped: dict[str, int | str]  # see `build_schedule`
    loop: Literal["open", "closed"] = "open"
    steps: tuple[Mapping[str, float], ...] = ()
    prompts: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def offset_ns(self) -> IntArray:
        """Sorted offsets from the start of the trial, int64, shape (n,)."""
        return self.ints("offset_ns")

    def ints(self, column: str) -> IntArray:
        """An integer column as int64, shape (n,)."""
        return np.asarray(self.table[column].to_numpy(), dtype=np.int64)

    @property
    def planned(self) -> dict[str, int]:
        """Requests planned for each arm; under split, all of them under "*"; a closed loop plans none."""
        if self.loop == "closed":
            return {}
        if self.design == "split":
            return {EVERY_ARM: len(self)}
        if self.design == "mirrored":
            return dict.fromkeys(self.arms, len(self))
        return {arm: int(pc.sum(pc.equal(self.table["arm"], arm)).as_py() or 0) for arm in self.arms}

    def share(self, worker: int, workers: int) -> Schedule:
        """The rows of one of `workers` load processes: those whose index is `worker` modulo `workers`."""
        if not 0 <= worker < workers:
            raise ConfigError(f"worker is {worker} of {workers}: give 0 to {workers - 1}")
        mine = pa.array(self.ints("index") % workers == worker)
        return replace(self, table=self.table.filter(mine))

    def requests(self) -> Iterator[PlannedRequest]:
        """The rows one by one."""
        for batch in self.table.to_batches(max_chunksize=16_384):
            yield from planned_requests(batch)

    def write(self, path: str | Path) -> None:
        """`path` holds the whole schedule as an Arrow IPC stream; it never holds a part of one."""
        facts = {
            "design": self.design,
            "arms": list(self.arms),
            "trial": self.trial,
            "seed": self.seed,
            "duration_s": self.duration_s,
            "block_s": self.block_s,
            "dropped": self.dropped,
            "loop": self.loop,
            "steps": [dict(step) for step in self.steps],
            "prompts": dict(self.prompts),
        }
        table = self.table.replace_schema_metadata({_METADATA_KEY: json.dumps(facts, sort_keys=True)})
        target = Path(path)
        partial = target.with_name(target.name + ".partial")
        with partial.open("wb") as sink:
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table, max_chunksize=65_536)
            sink.flush()
            os.fsync(sink.fileno())
        partial.replace(target)

    @classmethod
    def read(cls, path: str | Path) -> Schedule:
        """The schedule at `path`; a file that is missing, cut short or no schedule raises ConfigError."""
        try:
            with pa.OSFile(str(path), "rb") as source:
                table = pa.ipc.open_stream(source).read_all()
        except (OSError, pa.ArrowException) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ConfigError(f'schedule "{path}" cannot be read ({reason}): build it again') from None
        facts_text = (table.schema.metadata or {}).get(_METADATA_KEY)
        table = table.replace_schema_metadata(None)
        extra = [field for field in table.schema if field in list(PROMPTS)]
        if facts_text is None or table.schema != pa.schema([*SCHEDULE, *extra]):
            raise ConfigError(f'"{path}" is no schedule: columns are {table.schema.names}, expected {SCHEDULE.names}')
        facts = json.loads(facts_text)
        return cls(table=table, **{**facts, "arms": tuple(facts["arms"]), "steps": tuple(facts["steps"])})


def build_schedule(
    config: TrafficConfig,
    *,
    arms: Sequence[str],
    seed: int,
    trial: int,
    max_prompt_tokens: int,
    max_new_tokens: int,
    source: Source | None = None,
    model: str = "",
    levels: Sequence[float] = (),
    edges: Mapping[str, Sequence[int]] | None = None,
) -> Schedule:
    """The traffic of trial number `trial`: the same for equal arguments, independent between trials.

    Arrivals, lengths, prompts, assignment, turns, think times, ramp-up and shared blocks draw from streams of their
    own, so that changing the settings of one leaves the others as they are. `source` is what `read_source` found; it
    is read, with the tokenizer of `model`, when not given. `levels` are the rates of a saturation search after its
    first trial. `edges` are the prompt lengths at which each arm's padded size changes.

    `dropped` holds the over-limit policy and counts ("policy", "input_over", "output_over", "requests_dropped") and
    "turns_after_end": turns that would start after the trial and are not sent. A schedule without any request is a
    ConfigError.
    """
    _check_arms(config, arms)
    for key, value in (("seed", seed), ("trial", trial)):
        if value < 0:
            raise ConfigError(f"{key} is {value}: give 0 or more")
    source = source or read_source(config, seed=seed, model=model)
    rng = {
        stream: np.random.default_rng(np.random.SeedSequence(entropy=seed, spawn_key=(trial, number)))
        for stream, number in _STREAMS.items()
    }
    duration_ns = round(config.duration_s * 1e9)
    rates = tuple(levels)
    if config.arrivals == "saturation" and not rates:
        low, high = config.step_rates
        rates = staircase(low, high, config.saturation_steps)

    starts_ns, window = _starts(config, source, rates, rng["arrivals"])
    drawn = draw(config, source, starts_ns, window, max_new_tokens=max_new_tokens, rng=rng)
    turns = drawn.turns
    prefix_seeds = _seeds(len(starts_ns), rng["prompts"])[turns.session]
    prompt_seeds = _seeds(len(turns.session), rng["samples"])

    # All is drawn; from here on rows only go. What is never sent is not counted as over a limit. Within a session time
    # rises, so what the end cuts is always the session's tail.
    started = arrivals.rampup_kept(starts_ns, config.rampup_s, rng=rng["rampup"])[turns.session]
    if config.arrivals == "closed":
        started[:] = True
    in_time = turns.offset_ns < duration_ns
    planned = rows = np.flatnonzero(started & in_time)
    lengths, within, over = within_limits(
        Lengths(input_tokens=drawn.total[rows], output_tokens=drawn.own.output_tokens[rows]),
        turns.rows(rows),
        policy=config.over_limit,
        max_prompt_tokens=max_prompt_tokens,
        max_new_tokens=max_new_tokens,
    )
    rows = rows[within]
    # A chat that its template alone fills cannot be cut to fit.
    roomy = lengths.input_tokens >= smallest(config, drawn, source.text, rows)
    rows, lengths = rows[roomy], lengths.rows(roomy)
    dropped = {**asdict(over), "requests_dropped": over.requests_dropped + int((~roomy).sum())}
    if not len(rows):
        raise ConfigError(
            f"trial {trial} would send no request in {config.duration_s} s "
            f"({dropped['requests_dropped']} dropped as too long): raise the rate, duration_s or the model's limits"
        )
    order = np.argsort(turns.offset_ns[rows], kind="stable")
    if config.num_prompts:
        if len(order) < config.num_prompts:
            raise ConfigError(
                f"traffic.num_prompts is {config.num_prompts} but trial {trial} holds {len(order)} requests in "
                f"{config.duration_s:g} s: raise duration_s or the rate"
            )
        order = order[: config.num_prompts]
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
    extra = prompt_columns(
        config, source, drawn, rows, lengths.input_tokens, max_new_tokens=max_new_tokens, rng=rng["blocks"]
    )
    facts = source_facts(source)
    if shared := shared_facts(extra, lengths.input_tokens):
        facts["shared"] = shared
    if config.prompts == "chat":
        facts["template"] = template_facts(drawn, rows, planned, limit=max_prompt_tokens, edges=edges or {})
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
        loop="closed" if config.arrivals == "closed" else "open",
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
    trace = source.trace
    if config.arrivals == "closed":
        wanted = config.num_prompts or max(_CLOSED_ROWS, _CLOSED_ROUNDS * config.concurrency)
        spare = wanted + 64 if config.over_limit == "drop" else 0  # for those that are too long
        return np.zeros(wanted + spare, dtype=np.int64), everything
    if config.arrivals == "trace" and trace is not None:
        rows = arrivals.replay_window(
            trace.offset_ns, config.duration_s, time_scale=config.time_scale, start_s=config.trace_start_s
        )
        starts = arrivals.replay(
            trace.offset_ns, config.duration_s, time_scale=config.time_scale, start_s=config.trace_start_s
        )
        return starts, rows
    # Rates are of requests, and a session brings several of them.
    per_session = 1 / config.turns_mean
    if source.conversations is not None:
        kept = source.conversations.kept
        per_session = len(kept) / sum(len(conversation.exchanges) for conversation in kept)
    duration_s, burstiness = config.duration_s, config.burstiness
    if config.arrivals == "piecewise":
        segments = [(start, rate * per_session) for start, rate in config.piecewise_rates]
        return arrivals.piecewise(segments, duration_s, burstiness=burstiness, rng=rng), everything
    if config.arrivals == "saturation":
        later = [config.rampup_s + index * config.step_s for index in range(1, len(levels))]
        segments = [(start, rate * per_session) for start, rate in zip([0.0, *later], levels, strict=True)]
        return arrivals.piecewise(segments, duration_s, burstiness=burstiness, rng=rng), everything
    if config.arrivals == "ramp":
        first, last = config.step_rates
        return (
            arrivals.ramp(first * per_session, last * per_session, duration_s, burstiness=burstiness, rng=rng),
            everything,
        )
    if config.arrivals == "steps":
        rates = [rate * per_session for rate in config.step_rates]
        return arrivals.steps(rates, duration_s / len(rates), burstiness=burstiness, rng=rng), everything
    return arrivals.gamma(config.rate * per_session, burstiness, duration_s, rng=rng), everything


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


def _check_arms(config: TrafficConfig, arms: Sequence[str]) -> None:
    if not arms or len(set(arms)) != len(arms) or EVERY_ARM in arms:
        raise ConfigError(f'arms are {list(arms)}: give one or more different names, none of them "{EVERY_ARM}"')
    needed_s = len(arms) * config.block_s
    if config.design == "switchback" and config.duration_s < needed_s:
        raise ConfigError(
            f"traffic.duration_s is {config.duration_s} but {len(arms)} arms of block_s = {config.block_s} take "
            f"{needed_s} s for one turn each: raise duration_s or lower block_s"
        )
