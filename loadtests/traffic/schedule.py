"""What is sent, when, and to which arm: the whole traffic of one trial, fixed before it starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from tailgate.analysis.arrays import Ints
from tailgate.analysis.records.schemas import Columns
from tailgate.servers.complaint import ConfigError, named

EVERY_ARM = "*"

_SCHEDULE: Columns = (
    ("index", pa.int64(), "Number of the request in its trial, from 0."),
    ("offset_ns", pa.int64(), "When it is due, from the start of the trial."),
    ("prompt_tokens", pa.int32(), "Tokens of the prompt."),
    ("max_tokens", pa.int32(), "Tokens of the answer."),
    ("prompt_seed", pa.int64(), "Names the token sequence."),
    ("arm", pa.string(), "A name: pinned to that arm; `*`: a copy to every arm; null: the splitter chooses."),
    ("phase", pa.string(), "`rampup` or `measure`."),
)
_BLOCKS: Columns = (
    ("blocks", pa.list_(pa.int64()), "A seed for each leading block; equal where prompts share the block."),
    ("block_tokens", pa.float64(), "Tokens of a block."),
)
SCHEDULE = pa.schema([(name, kind) for name, kind, _ in _SCHEDULE])
BLOCKS = pa.schema([(name, kind) for name, kind, _ in _BLOCKS])  # of a trace whose prompts share blocks
MEANINGS = {name: text for name, _, text in (*_SCHEDULE, *_BLOCKS)}


class PlannedRequest(NamedTuple):
    """One row of a schedule, columns as in `SCHEDULE`. A plain tuple: rows are made while the load runs."""

    index: int  # type: ignore[assignment]  # a row's number matters more than tuple.index
    offset_ns: int
    prompt_tokens: int
    max_tokens: int
    prompt_seed: int
    arm: str | None
    phase: str
    blocks: Sequence[int] | None = None
    block_tokens: float | None = None


def planned_requests(table: Any, *, at_once: int = 1024) -> Iterator[PlannedRequest]:
    """Yield the rows of a table with the columns of a schedule, converted `at_once` at a time."""
    columns_here = set(table.schema.names)
    for start in range(0, table.num_rows, at_once):
        rows = table.slice(start, at_once)
        # Column by column: far the quickest.
        columns = [
            rows.column(name).to_pylist() if name in columns_here else repeat(None, rows.num_rows)
            for name in PlannedRequest._fields
        ]
        yield from map(PlannedRequest._make, zip(*columns, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """The planned requests of one trial for `arms`, in order of time, and what they were made from. `over` counts them
    and those that were cut to a limit; `steps` are the rates of a saturation search; `prompts` tells what was read of a
    trace."""

    table: Any  # pyarrow.Table
    arms: tuple[str, ...]
    over: Mapping[str, int] = field(default_factory=dict)  # see `drawing.build_schedule`
    steps: tuple[Mapping[str, float], ...] = ()
    prompts: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def offset_ns(self) -> Ints:
        """Sorted offsets from the start of the trial, int64, shape (n,)."""
        return self.ints("offset_ns")

    def ints(self, column: str) -> Ints:
        """Return an integer column as int64, shape (n,)."""
        return np.asarray(self.table[column].to_numpy(), dtype=np.int64)

    @property
    def planned(self) -> dict[str, int]:
        """Requests planned for each arm; under "*" those for which the splitter chooses, as it does for all or none."""
        arm = self.table["arm"]
        if arm.null_count:
            return {EVERY_ARM: len(self)}
        counts = {row["values"]: row["counts"] for row in arm.value_counts().to_pylist()}
        return {name: counts.get(name, 0) + counts.get(EVERY_ARM, 0) for name in self.arms}

    def planned_before(self, offset_ns: int, *, arms: Mapping[str, int] = MappingProxyType({})) -> dict[str, int]:
        """Return `planned` of what is due before the offset, and for an arm in `arms` also before that arm's."""

        def before(arm: str) -> int:
            due = self.offset_ns < min(offset_ns, arms.get(arm, offset_ns))
            return replace(self, table=self.table.filter(pa.array(due))).planned.get(arm, 0)

        return {arm: before(arm) for arm in self.planned}

    def share(self, worker: int, workers: int) -> Schedule:
        """Return the rows of one of `workers` load processes: those whose index is `worker` modulo `workers`."""
        mine = pa.array(self.ints("index") % workers == worker)
        return replace(self, table=self.table.filter(mine))

    def to_bytes(self) -> bytes:
        """Return the table as an Arrow IPC stream, which `parse` takes."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.table.schema) as writer:
            writer.write_table(self.table, max_chunksize=65_536)
        return bytes(sink.getvalue())

    def write(self, path: Path) -> None:
        """Write the table to `path`, which never holds a part of one."""
        partial = path.with_name(path.name + ".partial")
        partial.write_bytes(self.to_bytes())
        partial.replace(path)

    @classmethod
    def read(cls, path: Path, arms: tuple[str, ...]) -> Schedule:
        """Return the schedule at `path`. Raises ConfigError for a file that is missing, cut short or no schedule."""
        try:
            return cls.parse(path.read_bytes(), arms)
        except (OSError, pa.ArrowException, ValueError) as error:
            raise ConfigError(f'schedule "{path}" cannot be read ({named(error)}): build it again') from None

    @classmethod
    def parse(cls, content: bytes, arms: tuple[str, ...]) -> Schedule:
        """Return the schedule whose table `content` holds."""
        table = pa.ipc.open_stream(content).read_all()
        table.validate(full=True)  # a damaged offset would be followed out of the file's memory
        if table.schema not in (SCHEDULE, pa.schema([*SCHEDULE, *BLOCKS])):
            raise ValueError(f"columns are {table.schema.names}, expected {SCHEDULE.names}")
        return cls(table=table, arms=arms)
