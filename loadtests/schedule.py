"""What is sent, when, and to which arm: the whole traffic of one trial, fixed before it starts.

`build_schedule` is pure but for reading a trace: one seed and the trial number give the same table everywhere.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from loadtests import arrivals
from loadtests.traces import Trace, read_trace
from loadtests.workload import (
    FitName,
    Lengths,
    OverLimitPolicy,
    fitted_lengths,
    growing_context,
    resampled_lengths,
    session_turns,
    within_limits,
)
from servers.config import ConfigError

IntArray = npt.NDArray[np.int64]

Design = Literal["mirrored", "split", "switchback"]
Arrivals = Literal["poisson", "gamma", "trace", "piecewise", "ramp", "steps"]
Workload = Literal["conversation", "code", "trace"]

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
_METADATA_KEY = b"tailgate.schedule"

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
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficConfig:
    """Which traffic one trial sends. Settings that contradict each other, or would have no effect, raise ConfigError.

    `rate` is in requests/s: to each arm when mirrored, in all when split or switchback. It is 0 (not given) when the
    times come from `rates` or a trace. A trial lasts `duration_s`; its first `rampup_s` carry a load that rises from
    nothing and are marked "rampup". `rates` is [[start_s, rate], ...] for piecewise, [first, last] for ramp and
    [rate, rate, ...] for steps, which share the duration equally.
    """

    design: Design = "mirrored"
    duration_s: float = 60.0
    rampup_s: float = 0.0
    arrivals: Arrivals = "poisson"
    rate: float = 0.0
    burstiness: float = 1.0
    rates: tuple[float | tuple[float, ...], ...] = ()
    workload: Workload = "conversation"
    length_scale: float = 1.0
    over_limit: OverLimitPolicy = "clip"
    trace: str = ""
    trace_start_s: float = 0.0
    time_scale: float = 1.0
    turns_mean: float = 1.0
    think_time_s: float = 10.0
    timeout_s: float = 60.0
    max_concurrency: int = 0
    ignore_eos: bool = True
    direct: bool = False
    workers: int = 1
    block_s: float = 30.0

    def __post_init__(self) -> None:
        _choice("design", self.design, get_args(Design))
        _choice("arrivals", self.arrivals, get_args(Arrivals))
        _choice("workload", self.workload, get_args(Workload))
        _choice("over_limit", self.over_limit, get_args(OverLimitPolicy))
        _range("duration_s", self.duration_s, 0.001, 1e7)
        _range("rampup_s", self.rampup_s, 0, 1e7)
        _range("block_s", self.block_s, 0.001, 1e7)
        _range("rate", self.rate, 0, 1e9)
        _range("burstiness", self.burstiness, 0.001, 1e6)
        _range("length_scale", self.length_scale, 1e-6, 1e6)
        _range("trace_start_s", self.trace_start_s, 0, 1e9)
        _range("time_scale", self.time_scale, 1e-6, 1e6)
        _range("turns_mean", self.turns_mean, 1, 1000)
        _range("think_time_s", self.think_time_s, 0.001, 1e6)
        _range("timeout_s", self.timeout_s, 0.001, 1e6)
        _range("max_concurrency", self.max_concurrency, 0, 1_000_000)
        _range("workers", self.workers, 1, 1024)
        if self.rampup_s >= self.duration_s:
            raise ConfigError(
                f"traffic.rampup_s is {self.rampup_s} but the whole trial lasts duration_s = {self.duration_s}: "
                "lower rampup_s or raise duration_s"
            )
        self._check_rate()
        self._check_trace()
        self._check_design()

    @property
    def open_loop(self) -> bool:
        """True when requests start at their scheduled time whatever is still under way."""
        return self.max_concurrency == 0

    @property
    def piecewise_rates(self) -> tuple[tuple[float, float], ...]:
        """`rates` as (start_s, rate) pairs; for piecewise arrivals."""
        pairs = [item for item in self.rates if isinstance(item, tuple) and len(item) == 2]
        if not pairs or len(pairs) != len(self.rates):
            raise ConfigError(
                f"traffic.rates is {_plain(self.rates)}: give [[0, rate], [start_s, rate], ...] for piecewise"
            )
        return tuple((float(start), float(rate)) for start, rate in pairs)

    @property
    def step_rates(self) -> tuple[float, ...]:
        """`rates` as plain numbers; for ramp and steps arrivals."""
        numbers = [float(item) for item in self.rates if not isinstance(item, tuple)]
        wrong_count = not numbers or (self.arrivals == "ramp" and len(numbers) != 2)
        if wrong_count or len(numbers) != len(self.rates):
            form = "[first rate, last rate]" if self.arrivals == "ramp" else "[rate, rate, ...]"
            raise ConfigError(f"traffic.rates is {_plain(self.rates)}: give {form} for {self.arrivals}")
        return tuple(numbers)

    def _check_rate(self) -> None:
        constant = self.arrivals in ("poisson", "gamma")
        listed = self.arrivals in ("piecewise", "ramp", "steps")
        if constant and self.rate <= 0:
            raise ConfigError(f'traffic.rate is {self.rate}: give requests/s above 0 for arrivals = "{self.arrivals}"')
        if not constant and self.rate:
            source = "traffic.rates" if listed else "the trace (set its pace with time_scale)"
            raise ConfigError(
                f'traffic.rate is {self.rate} but arrivals = "{self.arrivals}" takes its rate from {source}: '
                "remove rate"
            )
        if not listed and self.rates:
            raise ConfigError(
                f'traffic.rates is {_plain(self.rates)} but arrivals = "{self.arrivals}" does not use it: '
                'remove it or use arrivals = "piecewise", "ramp" or "steps"'
            )
        if self.burstiness != 1 and self.arrivals in ("poisson", "trace"):
            raise ConfigError(
                f'traffic.burstiness is {self.burstiness} but arrivals = "{self.arrivals}" does not use it: '
                'remove it or use arrivals = "gamma"'
            )
        if listed:
            self._check_rates()

    def _check_rates(self) -> None:
        pairs = self.piecewise_rates if self.arrivals == "piecewise" else ()
        rates = [rate for _, rate in pairs] if pairs else list(self.step_rates)
        for rate in rates:
            _range("rates", rate, 0, 1e9)
        if not any(rates):
            raise ConfigError(f"traffic.rates is {_plain(self.rates)}: give at least one rate above 0")
        starts = [start for start, _ in pairs]
        rising = all(before < after for before, after in pairwise(starts))
        if pairs and not (starts[0] == 0 and rising and starts[-1] < self.duration_s):
            raise ConfigError(
                f"traffic.rates has segments from {starts} s: start the first at 0, let them rise, "
                f"and start the last before duration_s = {self.duration_s}"
            )

    def _check_trace(self) -> None:
        uses = [key for key in ("arrivals", "workload") if getattr(self, key) == "trace"]
        if uses and not self.trace:
            raise ConfigError(f'traffic.{uses[0]} is "trace" but traffic.trace is empty: give the path of a trace')
        if self.trace and not uses:
            raise ConfigError(
                f'traffic.trace is "{self.trace}" but neither arrivals nor workload is "trace": set one or remove trace'
            )
        for key, value, unused in (("time_scale", self.time_scale, 1.0), ("trace_start_s", self.trace_start_s, 0.0)):
            if value != unused and self.arrivals != "trace":
                raise ConfigError(
                    f'traffic.{key} is {value} but arrivals = "{self.arrivals}" does not replay a trace: '
                    f'remove {key} or use arrivals = "trace"'
                )
        if self.turns_mean != 1 and self.arrivals == "trace":
            raise ConfigError(
                f'traffic.turns_mean is {self.turns_mean} but arrivals = "trace" holds every turn already: '
                "remove turns_mean or use other arrivals"
            )

    def _check_design(self) -> None:
        if self.direct and self.design == "split":
            raise ConfigError(
                'traffic.direct is true but design = "split" needs the splitter to choose the arm: '
                'remove direct or use design = "mirrored" or "switchback"'
            )
        if self.design == "switchback" and abs(math.remainder(self.rampup_s, self.block_s)) > 1e-9:
            raise ConfigError(
                f"traffic.rampup_s is {self.rampup_s} but a switchback has blocks of block_s = {self.block_s}: "
                "give a multiple of it, so that no block is part ramp-up"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One row of a schedule."""

    index: int
    offset_ns: int
    session_id: str
    turn: int
    prompt_tokens: int
    max_tokens: int
    prompt_seed: int
    arm: str | None
    phase: str
    prefix_seed: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """The planned requests of one trial in order of time (columns as in `SCHEDULE`), and what they were made from."""

    table: Any  # pyarrow.Table
    design: Design
    arms: tuple[str, ...]
    trial: int
    seed: int
    duration_s: float
    block_s: float
    dropped: dict[str, int | str]  # see `build_schedule`

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
        """Requests planned for each arm; under split, all of them under "*"."""
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
        return Schedule(
            table=self.table.filter(mine),
            design=self.design,
            arms=self.arms,
            trial=self.trial,
            seed=self.seed,
            duration_s=self.duration_s,
            block_s=self.block_s,
            dropped=self.dropped,
        )

    def requests(self) -> Iterator[PlannedRequest]:
        """The rows one by one."""
        for batch in self.table.to_batches(max_chunksize=16_384):
            for row in batch.to_pylist():
                yield PlannedRequest(**row)

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
        if facts_text is None or table.schema != SCHEDULE:
            raise ConfigError(f'"{path}" is no schedule: columns are {table.schema.names}, expected {SCHEDULE.names}')
        facts = json.loads(facts_text)
        return cls(table=table, **{**facts, "arms": tuple(facts["arms"])})


def build_schedule(
    config: TrafficConfig,
    *,
    arms: Sequence[str],
    seed: int,
    trial: int,
    max_prompt_tokens: int,
    max_new_tokens: int,
    trace: Trace | None = None,
) -> Schedule:
    """The traffic of trial number `trial`: the same for equal arguments, independent between trials.

    Arrivals, lengths, prompts, assignment, turns, think times and ramp-up draw from streams of their own, so that
    changing the settings of one leaves the others as they are. `trace` is read from config.trace when not given.
    `dropped` holds the over-limit policy and counts ("policy", "input_over", "output_over", "requests_dropped") and
    "turns_after_end": turns that would start after the trial and are not sent. A schedule without any request is a
    ConfigError.
    """
    _check_arms(config, arms)
    for key, value in (("seed", seed), ("trial", trial)):
        if value < 0:
            raise ConfigError(f"{key} is {value}: give 0 or more")
    if trace is None and config.trace:
        trace = read_trace(config.trace)
    rng = {
        stream: np.random.default_rng(np.random.SeedSequence(entropy=seed, spawn_key=(trial, number)))
        for stream, number in _STREAMS.items()
    }
    duration_ns = round(config.duration_s * 1e9)

    starts_ns, window = _starts(config, trace, rng["arrivals"])
    turns = session_turns(
        starts_ns,
        turns_mean=config.turns_mean,
        think_time_s=config.think_time_s,
        turns_rng=rng["turns"],
        think_rng=rng["think"],
    )
    count = len(turns.session)
    lengths = _lengths(config, trace, window, count, rng["lengths"]).scaled(config.length_scale)
    lengths = growing_context(lengths, turns, max_new_tokens=max_new_tokens)
    prefix_seeds = _seeds(len(starts_ns), rng["prompts"])[turns.session]
    prompt_seeds = _seeds(count, rng["samples"])

    # All is drawn; from here on rows only go. What is never sent is not counted as over a limit. Within a session time
    # rises, so what the end cuts is always the session's tail.
    started = arrivals.rampup_kept(starts_ns, config.rampup_s, rng=rng["rampup"])[turns.session]
    in_time = turns.offset_ns < duration_ns
    rows = np.flatnonzero(started & in_time)
    lengths, within, over = within_limits(
        lengths.rows(rows),
        turns.rows(rows),
        policy=config.over_limit,
        max_prompt_tokens=max_prompt_tokens,
        max_new_tokens=max_new_tokens,
    )
    rows = rows[within]
    if not len(rows):
        raise ConfigError(
            f"trial {trial} would send no request in {config.duration_s} s "
            f"({over.requests_dropped} dropped as too long): raise the rate, duration_s or the model's limits"
        )
    order = np.argsort(turns.offset_ns[rows], kind="stable")
    rows, lengths = rows[order], lengths.rows(order)
    turns = turns.rows(rows)
    offsets = turns.offset_ns
    table = pa.table(
        [
            pa.array(np.arange(len(offsets))),
            pa.array(offsets),
            pc.binary_join_element_wise(str(trial), pc.cast(pa.array(turns.session), pa.string()), "-"),
            pa.array(turns.turn.astype(np.int32)),
            pa.array(lengths.input_tokens.astype(np.int32)),
            pa.array(lengths.output_tokens.astype(np.int32)),
            pa.array(prompt_seeds[rows]),
            _arm_column(config, arms, offsets, duration_ns, rng["assignment"]),
            _named(["rampup", "measure"], (offsets >= round(config.rampup_s * 1e9)).astype(np.int64)),
            pa.array(prefix_seeds[rows]),
        ],
        schema=SCHEDULE,
    )
    return Schedule(
        table=table,
        design=config.design,
        arms=tuple(arms),
        trial=trial,
        seed=seed,
        duration_s=config.duration_s,
        block_s=config.block_s,
        dropped={**asdict(over), "turns_after_end": int((started & ~in_time).sum())},
    )


def switchback_order(blocks: int, arms: int, *, rng: np.random.Generator) -> IntArray:
    """The arm (0 to arms - 1) of each block, shape (blocks,): every arm once in each group of `arms` blocks.

    The order within a group is random; the last group may be cut short. More blocks leave the earlier ones as they
    are.
    """
    groups = -(-blocks // arms)
    ordered = np.tile(np.arange(arms), (groups, 1))
    return rng.permuted(ordered, axis=1).reshape(-1)[:blocks]


def _starts(config: TrafficConfig, trace: Trace | None, rng: np.random.Generator) -> tuple[IntArray, slice]:
    """Sorted starts (ns) of sessions, and the trace rows that they are when a trace is replayed."""
    everything = slice(None)
    if config.arrivals == "trace" and trace is not None:
        rows = arrivals.replay_window(
            trace.offset_ns, config.duration_s, time_scale=config.time_scale, start_s=config.trace_start_s
        )
        starts = arrivals.replay(
            trace.offset_ns, config.duration_s, time_scale=config.time_scale, start_s=config.trace_start_s
        )
        return starts, rows
    # Rates are of requests, and a session brings turns_mean of them.
    per_session = 1 / config.turns_mean
    duration_s, burstiness = config.duration_s, config.burstiness
    if config.arrivals == "piecewise":
        segments = [(start, rate * per_session) for start, rate in config.piecewise_rates]
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


def _lengths(
    config: TrafficConfig, trace: Trace | None, window: slice, count: int, rng: np.random.Generator
) -> Lengths:
    """`count` rows of input and output lengths: the replayed rows themselves, rows of the trace, or a fit."""
    if config.workload == "trace" and trace is not None:
        if config.arrivals != "trace":
            return resampled_lengths(trace.input_tokens, trace.output_tokens, count, rng=rng)
        return Lengths(
            input_tokens=trace.input_tokens[window].astype(np.int64),
            output_tokens=trace.output_tokens[window].astype(np.int64),
        )
    fit: FitName = "code" if config.workload == "code" else "conversation"
    return fitted_lengths(fit, count, rng=rng)


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


def _choice(key: str, value: object, allowed: Sequence[object]) -> None:
    if value not in allowed:
        raise ConfigError(f"traffic.{key} is {value!r}: use one of {', '.join(str(item) for item in allowed)}")


def _range(key: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"traffic.{key} is {value}: give a value from {low} to {high}")


def _plain(value: object) -> object:
    """Tuples as lists, the way they are written in TOML."""
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
