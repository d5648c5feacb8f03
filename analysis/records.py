"""The records of a run: three Arrow tables, appended while the run goes on and readable after a kill.

Times are integer nanoseconds since the epoch on a clock that is monotonic within a run. A table is an Arrow IPC
stream that grows by whole batches; a kill in the middle of a batch costs that batch and nothing before it.
"""

from __future__ import annotations

import contextlib
import json
import math
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
import pyarrow.parquet

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

REQUESTS = pa.schema(
    [
        ("request_id", pa.string()),
        ("session_id", pa.string()),
        ("turn", pa.int32()),
        ("trial", pa.int32()),
        ("arm", pa.string()),
        ("replica", pa.string()),
        ("pair_id", pa.string()),  # equal for the copies of one request under a mirrored design
        ("scheduled_ns", pa.int64()),
        ("sent_ns", pa.int64()),
        ("first_token_ns", pa.int64()),  # null when no token came
        ("end_ns", pa.int64()),
        ("status", pa.string()),  # OK or a gRPC status name; CANCELLED for requests cut by the end of the run
        ("error", pa.string()),
        ("prompt_tokens", pa.int32()),
        ("max_tokens", pa.int32()),
        ("output_tokens", pa.int32()),
        ("token_ns", pa.list_(pa.int64())),  # offsets from sent_ns, one per token
        ("queue_ns", pa.int64()),
        ("prefill_ns", pa.int64()),
        ("decode_ns", pa.int64()),
        ("compile_stall_ns", pa.int64()),
        ("batch_id", pa.int64()),
        ("batch_size", pa.int32()),
        ("padded_batch", pa.int32()),
        ("padded_length", pa.int32()),
        ("server_recv_ns", pa.int64()),
        ("server_end_ns", pa.int64()),
        ("phase", pa.string()),  # rampup | measure
    ]
)

COMPILE_EVENTS = pa.schema(
    [
        ("event_id", pa.string()),
        ("trial", pa.int32()),
        ("arm", pa.string()),
        ("replica", pa.string()),
        ("kind", pa.string()),  # compile | recompile | graph_capture | autotune | limit_hit | eager_fallback
        ("start_ns", pa.int64()),
        ("end_ns", pa.int64()),
        ("compile_id", pa.string()),
        ("frame", pa.string()),
        ("reason", pa.string()),
        ("shape", pa.string()),
        ("dynamic", pa.bool_()),
        ("cache", pa.string()),
        ("batch_id", pa.int64()),
        ("request_ids", pa.list_(pa.string())),
        ("backend_ns", pa.int64()),
        ("phase", pa.string()),  # warmup | serving
        ("autotune_ns", pa.int64()),  # share of the event that went into benchmarking kernels
        ("guards", pa.int32()),
        ("nodes", pa.int32()),  # of the traced graph
        ("kernels", pa.int32()),  # generated, or called from libraries
        ("breaks", pa.list_(pa.string())),  # graph breaks that the tracing met: place and cause
    ]
)

STEPS = pa.schema(
    [
        ("trial", pa.int32()),
        ("arm", pa.string()),
        ("replica", pa.string()),
        ("step_id", pa.int64()),
        ("kind", pa.string()),  # prefill | decode
        ("start_ns", pa.int64()),
        ("end_ns", pa.int64()),
        ("batch", pa.int32()),
        ("padded_batch", pa.int32()),
        ("tokens", pa.int64()),
        ("padded_tokens", pa.int64()),
        ("compiled", pa.bool_()),
    ]
)

REQUIRED_REQUEST_COLUMNS = ("arm", "end_ns", "status")
REQUIRED_EVENT_COLUMNS = ("arm", "kind", "start_ns", "end_ns")
REQUIRED_STEP_COLUMNS = ("arm", "start_ns", "end_ns")

_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_LARGEST_INT = 9.2e18


class RecordError(ValueError):
    """The records cannot be read or judged. The message is one line: what, where, remedy."""


class RecordWriter:
    """Rows appended to one Arrow IPC stream file; what `flush` wrote survives a kill of the process.

    An existing file is continued: a torn last batch is cut off first, and another schema raises RecordError.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._schema = schema
        self._rows: list[Mapping[str, Any]] = []
        # The whole batches are written beside the file and moved over it: a kill here loses nothing either.
        fresh = path.with_name(path.name + ".new")
        with fresh.open("wb") as file:
            file.write(schema.serialize().to_pybytes())
            for batch in _kept_batches(path, schema):
                file.write(batch.serialize().to_pybytes())
        fresh.replace(path)
        self._file = path.open("ab")

    def append(self, row: Mapping[str, Any]) -> None:
        """The row is part of the next batch; columns it lacks are null."""
        self._rows.append(row)

    def append_columns(self, columns: Mapping[str, Sequence[Any]]) -> None:
        """All rows of equally long `columns` are part of the next batch; columns it lacks are null."""
        names = list(columns)
        lengths = {len(columns[name]) for name in names}
        if len(lengths) > 1:
            raise RecordError(f"columns have {sorted(lengths)} rows: give columns of one length")
        self._rows.extend(dict(zip(names, values, strict=True)) for values in zip(*columns.values(), strict=True))

    def flush(self) -> None:
        """Every row appended so far is in the file, as one batch."""
        if self._rows:
            columns = [pa.array([row.get(field.name) for row in self._rows], field.type) for field in self._schema]
            batch = pa.RecordBatch.from_arrays(columns, schema=self._schema)
            self._file.write(batch.serialize().to_pybytes())
            self._rows = []
        self._file.flush()

    def close(self) -> None:
        """The rows are in the file and the stream is marked as ended. Closing twice does nothing more."""
        if self._file.closed:
            return
        self.flush()
        self._file.write(_END_OF_STREAM)
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _kept_batches(path: Path, schema: pa.Schema) -> list[pa.RecordBatch]:
    if not path.exists() or path.stat().st_size == 0:
        return []
    table, _ = _read_stream(path)
    if table is None:
        return []
    if not table.schema.equals(schema):
        raise RecordError(f"{path.name} holds other columns than those to append: write to another file")
    return list(table.to_batches())


def _read_stream(path: Path) -> tuple[pa.Table | None, bool]:
    """The whole batches of an Arrow file, and whether its tail is torn. No table when not even the schema is whole."""
    # Read, not memory-mapped: a writer that continues the file must be free to replace it.
    data = pa.py_buffer(path.read_bytes())
    if data.size == 0:
        return None, False
    batches: list[pa.RecordBatch] = []
    try:
        if data.slice(0, min(6, data.size)).to_pybytes() == b"ARROW1":
            return pa.ipc.open_file(data).read_all(), False
        stream = pa.ipc.open_stream(data)
    except (pa.ArrowInvalid, OSError):
        return None, True
    torn = False
    while True:
        try:
            batch = stream.read_next_batch()
            batch.validate()
        except StopIteration:
            break
        except (pa.ArrowInvalid, OSError):
            torn = True
            break
        batches.append(batch)
    return pa.Table.from_batches(batches, schema=stream.schema), torn


def _read_json_lines(path: Path) -> tuple[pa.Table | None, bool]:
    data = path.read_bytes()
    torn = False
    cut = data.rfind(b"\n") + 1
    tail = data[cut:]
    if tail.strip():
        try:
            json.loads(tail)
        except ValueError:
            data, torn = data[:cut], True
    if not data.strip():
        return None, torn
    # A block must hold at least one whole line; a request with thousands of token times is long.
    options = pa.json.ReadOptions(block_size=max(1 << 24, min(len(data) + 1, 1 << 30)))
    return pa.json.read_json(pa.BufferReader(data), read_options=options), torn


def read_table(path: Path, schema: pa.Schema, *, required: Sequence[str] = ()) -> tuple[pa.Table, bool]:
    """The rows of an Arrow, Parquet or JSON Lines file in `schema`, and whether the tail of the file is torn.

    Missing columns are null; a missing `required` column or a column of another kind raises RecordError.
    """
    try:
        if path.suffix == ".parquet":
            table, torn = pa.parquet.read_table(path), False
        elif path.suffix == ".jsonl":
            table, torn = _read_json_lines(path)
        else:
            table, torn = _read_stream(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise RecordError(f"{path.name} cannot be read ({_one_line(error)}): give the file again") from error
    if table is None:
        return schema.empty_table(), torn
    return conform(table, schema, required, path.name), torn


def _one_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def conform(table: pa.Table, schema: pa.Schema, required: Sequence[str], source: str) -> pa.Table:
    """The rows of `table` in `schema`, with null for columns that it lacks. RecordError names `source`.

    A missing `required` column or a column of another kind raises it.
    """
    columns: list[Any] = []
    for field in schema:
        found = table.schema.get_all_field_indices(field.name)
        if len(found) > 1:
            raise RecordError(f'{source}: column "{field.name}" appears {len(found)} times: keep one')
        if not found:
            if field.name in required:
                raise RecordError(f'{source}: column "{field.name}" is missing: {_wanted(required)}')
            columns.append(pa.nulls(table.num_rows, field.type))
            continue
        columns.append(_cast(table.column(found[0]), field, source))
    return pa.table(columns, schema=schema)


def _wanted(required: Sequence[str]) -> str:
    return "this table needs " + ", ".join(required)


def _cast(column: Any, field: pa.Field, source: str) -> Any:
    if column.type == field.type:
        return column
    try:
        if pa.types.is_timestamp(column.type):
            column = column.cast(pa.timestamp("ns", column.type.tz)).cast(pa.int64())
        if pa.types.is_floating(column.type) and pa.types.is_integer(field.type):
            # Not-a-number and values beyond any clock are unknown, not zero.
            usable = pc.and_kleene(pc.is_finite(column), pc.less(pc.abs(column), _LARGEST_INT))
            column = pc.round(pc.if_else(usable, column, None))
        text = pa.types.is_string(field.type)
        if text and pa.types.is_dictionary(column.type):
            column = pc.cast(column, pa.string())
        if not text and (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
            raise pa.ArrowInvalid("text")
        return column.cast(field.type)
    except (pa.ArrowException, ValueError) as error:
        raise RecordError(
            f'{source}: column "{field.name}" holds {column.type} that is not {field.type} '
            f"({_one_line(error)}): convert it"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecords:
    """All that a run directory holds, as it lies there."""

    directory: Path
    experiment: dict[str, Any]
    environment: dict[str, Any]
    trials: tuple[dict[str, Any], ...]  # trial.json of each trial, in order; empty for bare tables
    generators: tuple[dict[str, Any], ...]
    requests: pa.Table
    events: pa.Table | None  # None: no such file, so nothing is known of compiles
    steps: pa.Table | None
    problems: tuple[str, ...]  # what is torn or unreadable, in words
    parity: dict[str, Any] | None = None  # parity.json: the arms measured before the first trial; None if they were not


def read_run(directory: Path) -> RunRecords:
    """The records under `directory`: trial-NN/ folders, or the tables side by side in it.

    Raises RecordError when there is no table of requests or one that cannot be read.
    """
    if not directory.is_dir():
        raise RecordError(f"{directory} is not a directory: give the directory of a run")
    problems: list[str] = []
    folders = sorted(path for path in directory.glob("trial-*") if path.is_dir()) or [directory]
    tables: dict[str, list[pa.Table]] = {"requests": [], "compile_events": [], "steps": []}
    trials: list[dict[str, Any]] = []
    generators: list[dict[str, Any]] = []
    for position, folder in enumerate(folders, start=1):
        info = _read_json(folder / "trial.json", problems)
        if info is None and folder != directory:
            info = {"complete": False}
        number = _trial_number(info, folder, position)
        if info is not None:
            trials.append({**info, "trial": number})
        own: dict[str, dict[str, Any]] = {}
        for path in sorted(folder.glob("generator-*.json")):
            generator = _read_json(path, problems)
            if generator is not None:
                own[path.stem.removeprefix("generator-")] = {**generator, "trial": number}
        for stem, schema, required in (
            ("requests", REQUESTS, REQUIRED_REQUEST_COLUMNS),
            ("compile_events", COMPILE_EVENTS, REQUIRED_EVENT_COLUMNS),
            ("steps", STEPS, REQUIRED_STEP_COLUMNS),
        ):
            for path in _table_files(folder, stem):
                table, torn = read_table(path, schema, required=required)
                if torn:
                    problems.append(f"{_label(directory, path)} is cut off at its end")
                if stem == "requests":
                    table = _of_generator(table, path, own)
                tables[stem].append(_with_trial(table, number))
        generators += own.values()
    problems += _exported_problems(directory, problems)
    parity = _read_json(directory / "parity.json", problems)
    if not tables["requests"]:
        raise RecordError(f"{directory.name} holds no requests*.arrow, .parquet or .jsonl: give a run directory")
    return RunRecords(
        directory=directory,
        experiment=_read_toml(directory / "experiment.toml"),
        environment=_read_json(directory / "environment.json", problems) or {},
        trials=tuple(trials),
        generators=tuple(generators),
        requests=pa.concat_tables(tables["requests"]).combine_chunks(),
        events=pa.concat_tables(tables["compile_events"]) if tables["compile_events"] else None,
        steps=pa.concat_tables(tables["steps"]) if tables["steps"] else None,
        problems=tuple(problems),
        parity=parity,
    )


def _of_generator(table: pa.Table, path: Path, generators: dict[str, dict[str, Any]]) -> pa.Table:
    """The requests of one load process in the run's time; its account then says how many rows there are.

    A file that was copied from a load process's own disk is still in that host's time, as the account beside it says.
    """
    generator = generators.get(path.name.removeprefix("requests-").partition(".")[0])
    if generator is None:
        return table
    generator["rows"] = table.num_rows
    clock = generator.get("clock")
    if not isinstance(clock, Mapping) or clock.get("applied") is not False or not clock.get("offset_ns"):
        return table
    return pa.Table.from_batches([shifted(batch, int(clock["offset_ns"])) for batch in table.to_batches()], REQUESTS)


# The times of a request that its load process took; the others are the server's.
_CLIENT_TIMES = ("scheduled_ns", "sent_ns", "first_token_ns", "end_ns")


def shifted(batch: pa.RecordBatch, offset_ns: int) -> pa.RecordBatch:
    """The requests with `offset_ns` added to every time that the load process took, so that no latency changes."""
    if not offset_ns:
        return batch
    columns = [
        pc.add(column, offset_ns) if name in _CLIENT_TIMES else column
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def _exported_problems(directory: Path, problems: list[str]) -> list[str]:
    """What was wrong with the records before they were exported to `directory`: the files do not show it any more."""
    told = (_read_json(directory / "export.json", problems) or {}).get("problems")
    return [str(problem) for problem in told] if isinstance(told, list) else []


def _label(directory: Path, path: Path) -> str:
    return path.relative_to(directory).as_posix()


def _table_files(folder: Path, stem: str) -> list[Path]:
    for suffix in ("arrow", "parquet", "jsonl"):
        found = sorted(folder.glob(f"{stem}*.{suffix}"))
        if found:
            return found
    return []


def _read_json(path: Path, problems: list[str]) -> dict[str, Any] | None:
    if not path.exists():
        return None
    with contextlib.suppress(OSError, ValueError, RecursionError):
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
    problems.append(f"{path.name} is not readable JSON")
    return {} if path.name == "trial.json" else None


def _read_toml(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordError(f"{path.name} cannot be read ({_one_line(error)}): correct it") from error


def _trial_number(info: Mapping[str, Any] | None, folder: Path, position: int) -> int:
    given = (info or {}).get("trial")
    if isinstance(given, int) and not isinstance(given, bool):
        return given
    name = folder.name.removeprefix("trial-")
    return int(name) if name.isdecimal() else position


def _with_trial(table: pa.Table, number: int) -> pa.Table:
    index = table.schema.get_field_index("trial")
    return table.set_column(index, table.schema.field(index), pc.fill_null(table.column(index), number))


# What counts as one request's latency. Each array has one entry a request.


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """The requests of a run as columns, with latencies as they are judged.

    Latency counts from the scheduled time. A failed request counts with the deadline (or what it took, if longer) in
    each metric that it did not complete. A request cut off by the end of the trial counts with the time it had
    waited where that is longer than its arm's median, and is left out (NaN) where it is not.
    """

    arms: tuple[str, ...]
    arm: Ints  # index into arms
    replicas: tuple[str, ...]
    replica: Ints  # index into replicas, -1 where unknown
    trial: Ints
    pair: Ints  # equal for the copies of one request, -1 where there is none
    session: Ints  # -1 where unknown
    start_ns: Ints  # scheduled, or sent where no schedule is known
    scheduled: Bools  # whether start_ns is a scheduled time
    lag_ms: Floats  # sent - scheduled, NaN where unknown
    first_ns: Ints  # -1 where no token came
    end_ns: Ints
    ok: Bools
    failed: Bools
    cut: Bools
    broken: Bools  # times that are missing or run backwards; in no metric
    measured: Bools  # not ramp-up
    ttft_ms: Floats
    e2e_ms: Floats
    tpot_ms: Floats
    max_itl_ms: Floats
    output_tokens: Ints
    batch: Ints  # the server's id of the step that first ran it, -1 where unknown
    stall_ns: Floats  # what the server reported, NaN where it did not
    gaps_ms: npt.NDArray[np.float32]  # every token gap, request after request
    gap_offsets: Ints  # request i owns gaps_ms[gap_offsets[i]:gap_offsets[i + 1]]
    request_ids: pa.Array
    repeated: int  # rows dropped because their request id was already there

    def __len__(self) -> int:
        return len(self.arm)

    def metric_ms(self, name: str) -> Floats:
        """The latencies called `name`: ttft, e2e, tpot or max_itl. NaN where undefined."""
        try:
            return {
                "ttft": self.ttft_ms,
                "e2e": self.e2e_ms,
                "tpot": self.tpot_ms,
                "max_itl": self.max_itl_ms,
            }[name]
        except KeyError:
            raise RecordError(f'metric "{name}" is unknown: use ttft, e2e, tpot or max_itl') from None


METRICS = ("ttft", "e2e", "tpot", "max_itl")

# A request cancelled this close to the end of the trial was cut by it; earlier, the server or the client failed.
_CUT_SLACK_NS = 1_000_000_000


def requests_of(
    table: pa.Table,
    *,
    deadline_ms: float | None = None,
    ends_ns: Mapping[int, int] | None = None,
    cut_short: Collection[int] = (),
) -> Requests:
    """The columns of `table` (schema REQUESTS) with derived latencies.

    `ends_ns` is the planned end of each trial, `cut_short` the trials that did not reach it: connections that broke in
    their last second broke with the run, and their requests are cut off, not failed. Without `deadline_ms`, a failure
    counts as the longest time seen.
    """
    table, repeated = _without_repeats(table)
    rows = table.num_rows
    arm, arms = _codes(table.column("arm"))
    if rows and arm.min() < 0:
        raise RecordError(f"{int((arm < 0).sum())} requests name no arm: fill the column arm")
    replica, replicas = _codes(table.column("replica"))
    trial = _integers(table.column("trial"), 1)
    scheduled = _integers(table.column("scheduled_ns"), -1)
    sent = _integers(table.column("sent_ns"), -1)
    first = _integers(table.column("first_token_ns"), -1)
    end = _integers(table.column("end_ns"), -1)
    has_schedule = scheduled > 0
    start = np.where(has_schedule, scheduled, sent)
    status = np.asarray(table.column("status").fill_null("").to_numpy(zero_copy_only=False), dtype=object)
    last = _last_end(trial, np.maximum(end, start), ends_ns or {})
    unended = end <= 0
    end = np.where(unended, np.maximum(last, start), end)
    broken = (start <= 0) | (end < start) | ((first > 0) & ((first < start) | (first > end)))
    broken |= unended & (status == "OK")
    cancelled = status == "CANCELLED"
    cut = ~broken & ((cancelled & (end >= last - _CUT_SLACK_NS)) | (unended & (status != "OK")))
    if cut_short:
        with_the_run = np.isin(trial, list(cut_short)) & (end >= last - _CUT_SLACK_NS)
        cut |= ~broken & with_the_run & (status == "UNAVAILABLE")
    ok = ~broken & ~cut & (status == "OK")
    failed = ~broken & ~cut & ~ok
    output = _integers(table.column("output_tokens"), 0)
    gaps, offsets, broken_gaps = _token_gaps(table.column("token_ns"), rows)
    broken = broken | broken_gaps
    ok, failed, cut = ok & ~broken, failed & ~broken, cut & ~broken

    nothing = np.full(rows, math.nan)
    age = np.where(broken, math.nan, (end - start) / 1e6)
    seen = first > 0
    ttft = np.where(seen & ~broken, (first - start) / 1e6, math.nan)
    tpot = np.where(
        ok & seen & (output > 1), (end - np.where(seen, first, end)) / 1e6 / np.maximum(output - 1, 1), math.nan
    )
    has_gaps = np.diff(offsets) > 0
    max_itl = nothing.copy()
    if has_gaps.any():
        max_itl[has_gaps] = np.maximum.reduceat(gaps, offsets[:-1][has_gaps])
    max_itl[~ok & ~cut] = math.nan
    longest = float(np.nanmax(age)) if np.isfinite(age).any() else math.nan
    penalty = np.fmax(age, deadline_ms if deadline_ms is not None else longest)
    e2e = np.where(ok, age, math.nan)
    for number in range(len(arms)):
        own = arm == number
        e2e[own & cut] = _when_long(age[own & cut], e2e[own & ok])
        waiting = own & cut & ~seen
        ttft[waiting] = _when_long(age[waiting], ttft[own & ok])
    for metric in (e2e, tpot, max_itl):
        metric[failed] = penalty[failed]
    ttft[failed & ~seen] = penalty[failed & ~seen]

    phase = np.asarray(table.column("phase").fill_null("measure").to_numpy(zero_copy_only=False), dtype=object)
    return Requests(
        arms=arms,
        arm=arm,
        replicas=replicas,
        replica=replica,
        trial=trial,
        pair=_codes(table.column("pair_id"))[0],
        session=_codes(table.column("session_id"))[0],
        start_ns=start,
        scheduled=has_schedule,
        lag_ms=np.where(has_schedule & (sent > 0), (sent - scheduled) / 1e6, math.nan),
        first_ns=first,
        end_ns=end,
        ok=ok,
        failed=failed,
        cut=cut,
        broken=broken,
        measured=phase != "rampup",
        ttft_ms=ttft,
        e2e_ms=e2e,
        tpot_ms=tpot,
        max_itl_ms=max_itl,
        output_tokens=np.maximum(output, 0),
        batch=_integers(table.column("batch_id"), -1),
        stall_ns=_floats(table.column("compile_stall_ns")),
        gaps_ms=gaps,
        gap_offsets=offsets,
        request_ids=table.column("request_id").combine_chunks(),
        repeated=repeated,
    )


def _when_long(age: Floats, completed: Floats) -> Floats:
    """The ages that exceed the median of `completed`, else NaN: a short wait cut off says nothing of the tail."""
    known = completed[np.isfinite(completed)]
    median = float(np.median(known)) if known.size else 0.0
    return np.where(age > median, age, math.nan)


def _without_repeats(table: pa.Table) -> tuple[pa.Table, int]:
    known = pc.is_valid(table.column("request_id"))
    if not pc.any(known).as_py():
        return table, 0
    identity = pa.table(
        {
            "trial": table.column("trial"),
            "arm": table.column("arm"),
            "request_id": table.column("request_id"),
            "row": pa.array(np.arange(table.num_rows)),
        }
    ).filter(known)
    kept = identity.group_by(["trial", "arm", "request_id"]).aggregate([("row", "min")]).column("row_min")
    repeated = identity.num_rows - len(kept)
    if not repeated:
        return table, 0
    keep = ~known.to_numpy(zero_copy_only=False)
    keep[kept.to_numpy()] = True
    return table.filter(pa.array(keep)), repeated


def _last_end(trial: Ints, end: Ints, planned: Mapping[int, int]) -> Ints:
    last = np.zeros(len(trial), dtype=np.int64)
    for number in np.unique(trial):
        own = trial == number
        seen = int(end[own].max())
        last[own] = min(seen, planned.get(int(number), seen))
    return last


def _integers(column: Any, missing: int) -> Ints:
    return np.asarray(pc.fill_null(column.cast(pa.int64()), missing).to_numpy(), dtype=np.int64)


def _floats(column: Any) -> Floats:
    return np.asarray(pc.fill_null(column.cast(pa.float64()), math.nan).to_numpy(), dtype=np.float64)


def _codes(column: Any) -> tuple[Ints, tuple[str, ...]]:
    """One small integer for each distinct text, in alphabetical order of the texts; -1 for null."""
    encoded = column.combine_chunks().dictionary_encode()
    names = [str(name) for name in encoded.dictionary.to_pylist()]
    order = sorted(range(len(names)), key=names.__getitem__)
    rank = np.full(len(names) + 1, -1, dtype=np.int64)
    rank[order] = np.arange(len(names))
    indices = np.asarray(pc.fill_null(encoded.indices.cast(pa.int64()), -1).to_numpy(zero_copy_only=False))
    return rank[indices.astype(np.int64)], tuple(names[index] for index in order)


def _token_gaps(column: Any, rows: int) -> tuple[npt.NDArray[np.float32], Ints, Bools]:
    """Gaps between tokens in ms, their offsets, and which requests have token times that run backwards."""
    lists = column.combine_chunks()
    lengths = np.asarray(pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False), dtype=np.int64)
    times = np.asarray(pc.fill_null(pc.list_flatten(lists), 0).to_numpy(zero_copy_only=False), dtype=np.int64)
    counts = np.maximum(lengths - 1, 0)
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    if not counts.any():
        return np.zeros(0, dtype=np.float32), offsets, np.zeros(rows, dtype=np.bool_)
    within = np.ones(len(times) - 1, dtype=np.bool_)
    ends = np.cumsum(lengths)
    edges = ends[(ends > 0) & (ends < len(times))] - 1
    within[edges] = False
    gaps = (np.diff(times)[within] / 1e6).astype(np.float32)
    backwards = np.zeros(rows, dtype=np.bool_)
    if gaps.size and gaps.min() < 0:
        owner = np.repeat(np.arange(rows), counts)
        backwards[owner[gaps < 0]] = True
    return gaps, offsets, backwards
