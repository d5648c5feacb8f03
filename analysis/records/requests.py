"""The records of a run: three tables in files (see `tables`), and the requests in them as they are judged.

Times are integer nanoseconds since the epoch on a clock that is monotonic within a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from analysis.records.columns import Columns, parts
from analysis.records.documents import read_document, read_toml
from analysis.records.sums import sums_path
from analysis.records.tables import THREADS, RecordError, RecordWriter, Take, conform, one_line, read_pieces, read_table

__all__ = [
    "COMPILE_EVENTS",
    "METRICS",
    "REQUESTS",
    "REQUIRED_REQUEST_COLUMNS",
    "STEPS",
    "Codes",
    "RecordError",
    "RecordWriter",
    "Requests",
    "RunRecords",
    "conform",
    "fingerprints",
    "read_run",
    "read_table",
    "requests_of",
    "shifted",
]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Codes = npt.NDArray[np.signedinteger[Any]]  # whole numbers that are small, held in 32 bits; those of few names in 16
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

# What judging reads of a request, as it is held in memory: names that many requests share are kept once. The servers'
# times are needed by those alone who follow the backlog of a compile.
_OF_QUEUES = ("queue_ns", "server_recv_ns", "server_end_ns")
_SHARED_NAME = pa.dictionary(pa.int32(), pa.string())
_SHARED_NAMES = ("arm", "replica", "status", "error", "phase")
_JUDGED_REQUESTS = pa.schema(
    [
        pa.field(name, _SHARED_NAME if name in _SHARED_NAMES else REQUESTS.field(name).type)
        for name in (
            *("request_id", "session_id", "trial", "arm", "replica", "pair_id", "scheduled_ns", "sent_ns"),
            *("first_token_ns", "end_ns", "status", "error", "prompt_tokens", "max_tokens", "output_tokens"),
            *("token_ns", "compile_stall_ns", "batch_id", "phase"),
            *_OF_QUEUES,
        )
    ]
)

REQUIRED_REQUEST_COLUMNS = ("arm", "end_ns", "status")
REQUIRED_EVENT_COLUMNS = ("arm", "kind", "start_ns", "end_ns")
REQUIRED_STEP_COLUMNS = ("arm", "start_ns", "end_ns")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecords:
    """All that a run directory holds, as it lies there."""

    directory: Path
    experiment: dict[str, Any]
    environment: dict[str, Any]
    trials: tuple[dict[str, Any], ...]  # trial.json of each trial, in order; empty for bare tables
    generators: tuple[dict[str, Any], ...]
    requests: pa.Table  # the columns of REQUESTS that are judged by
    events: pa.Table | None  # None: no such file, so nothing is known of compiles
    steps: pa.Table | None
    problems: tuple[str, ...]  # what is torn, damaged or unreadable, in words
    stated: bool = False  # its files say what they should hold
    parity: dict[str, Any] | None = None  # parity.json: the arms measured before the first trial; None if they were not


def read_run(directory: Path) -> RunRecords:
    """The records under `directory`: trial-NN/ folders, or the tables side by side in it.

    Raises RecordError when there is no table of requests or one that cannot be read.
    """
    if not directory.is_dir():
        raise RecordError(f"{directory} is not a directory: give the directory of a run")
    files = _Files(directory)
    experiment = files.toml(directory / "experiment.toml")
    environment = files.document(directory / "environment.json") or {}
    folders = sorted(path for path in directory.glob("trial-*") if path.is_dir()) or [directory]
    tables: dict[str, Columns] = {}
    trials: list[dict[str, Any]] = []
    numbers: list[int] = []  # of each folder's trial
    for position, folder in enumerate(folders, start=1):
        info = files.document(folder / "trial.json")
        if info is None and (folder / "trial.json").exists():
            info = {}
        elif info is None and folder != directory:
            info = {"complete": False}
        numbers.append(_trial_number(info, folder, position))
        if info is not None:
            trials.append({**info, "trial": numbers[-1]})
        for stem, schema, required in (
            ("compile_events", COMPILE_EVENTS, REQUIRED_EVENT_COLUMNS),
            ("steps", STEPS, REQUIRED_STEP_COLUMNS),
        ):
            for path in _table_files(folder, stem):
                into = tables.setdefault(stem, Columns(schema))
                take = _taking(into, numbers[-1])
                files.table(stem, path, read_pieces(path, schema, take, required=required))
    events = tables["compile_events"].table() if "compile_events" in tables else None
    # Most of the memory that judging takes is that of requests, so that no column is read which nobody asks for.
    unasked = () if may_serve(events) else _OF_QUEUES
    judged = pa.schema(field for field in _JUDGED_REQUESTS if field.name not in unasked)
    requests = None
    generators: list[dict[str, Any]] = []
    for number, folder in zip(numbers, folders, strict=True):
        own: dict[str, dict[str, Any]] = {}
        for path in sorted(folder.glob("generator-*.json")):
            generator = files.document(path)
            if generator is not None:
                own[path.stem.removeprefix("generator-")] = {**generator, "trial": number}
        for path in _table_files(folder, "requests"):
            requests = requests or Columns(judged, narrow=True)
            account = own.get(_load_process(path))
            if account is not None:
                account["rows"] = 0
            take = _taking(requests, number, account)
            problems = read_pieces(path, judged, take, required=REQUIRED_REQUEST_COLUMNS, written=REQUESTS)
            files.table("requests", path, problems)
        generators += own.values()
        files.document(folder / "compiler.json")
    exported = files.document(directory / "export.json") or {}
    parity = files.document(directory / "parity.json")
    if requests is None:
        raise RecordError(f"{directory.name} holds no requests*.arrow, .parquet or .jsonl: give a run directory")
    return RunRecords(
        directory=directory,
        experiment=experiment,
        environment=environment,
        trials=tuple(trials),
        generators=tuple(generators),
        requests=requests.table(),
        events=events,
        steps=tables["steps"].table() if "steps" in tables else None,
        # What was wrong with the records before they were exported does not show in the files any more.
        problems=(*files.problems(), *_texts(exported.get("problems"))),
        stated=files.stated,
        parity=parity,
    )


def _taking(into: Columns, number: int, account: dict[str, Any] | None = None) -> Take:
    """What puts rows of the trial `number` into `into`, in the run's time; `account` as in `_of_generator`."""

    def take(table: pa.Table, expected: int) -> None:
        into.append(_with_trial(_of_generator(table, account), number), expected)

    return take


def may_serve(events: pa.Table | None) -> bool:
    """Whether any event may be of the time in which the arms served."""
    if events is None or not events.num_rows:
        return False
    return not pc.all(pc.fill_null(pc.equal(events.column("phase"), "warmup"), False)).as_py()


class _Files:
    """The files of a run as they are read: what is wrong with each, and which of them say what they should hold."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._problems: list[str] = []
        self._documents: dict[str, bool] = {}  # of each file, whether it says what it should hold
        self._tables: dict[str, dict[str, bool]] = {}  # the same, by table

    def document(self, path: Path) -> dict[str, Any] | None:
        """The JSON document at `path`; None where there is none, or none that can be believed."""
        document = read_document(path)
        if document is None:
            return None
        if document.problem:
            self._add(path, document.problem)
        if document.content is not None:
            self._documents[_label(self._directory, path)] = document.stated
        return document.content

    def toml(self, path: Path) -> dict[str, Any]:
        """The TOML document at `path`, empty where there is none. RecordError where it cannot be read."""
        try:
            document = read_toml(path)
        except (OSError, ValueError) as error:
            raise RecordError(f"{path.name} cannot be read ({one_line(error)}): correct it") from error
        if document is None:
            return {}
        if document.problem:
            self._add(path, document.problem)
        self._documents[_label(self._directory, path)] = document.stated
        return document.content or {}

    def table(self, stem: str, path: Path, problems: Sequence[str]) -> None:
        """The file at `path` of the table `stem` was read, with these problems."""
        for problem in problems:
            self._add(path, problem)
        self._tables.setdefault(stem, {})[_label(self._directory, path)] = sums_path(path).exists()

    @property
    def stated(self) -> bool:
        """Whether the tables say what they should hold."""
        return any(any(kind.values()) for kind in self._tables.values())

    def problems(self) -> list[str]:
        """All that is wrong. Where some files of a kind say what they should hold, one that does not was changed."""
        kinds = [kind for kind in (self._documents, *self._tables.values()) if any(kind.values())]
        silent = [name for kind in kinds for name, stated in kind.items() if not stated]
        told = [f"{name} does not say what it should hold, as others of the run do" for name in silent]
        return [*self._problems, *told]

    def _add(self, path: Path, problem: str) -> None:
        self._problems.append(f"{_label(self._directory, path)} {problem}")


def _texts(value: Any) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else []


def _load_process(path: Path) -> str:
    return path.name.removeprefix("requests-").partition(".")[0]


def _of_generator(table: pa.Table, account: dict[str, Any] | None) -> pa.Table:
    """Some requests of one load process in the run's time; its account then counts them among its rows.

    A file that was copied from a load process's own disk is still in that host's time, as the account beside it says.
    """
    if account is None:
        return table
    account["rows"] += table.num_rows
    clock = account.get("clock")
    if not isinstance(clock, Mapping) or clock.get("applied") is not False or not clock.get("offset_ns"):
        return table
    moved = [shifted(batch, int(clock["offset_ns"])) for batch in table.to_batches()]
    return pa.Table.from_batches(moved, table.schema)


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


def _label(directory: Path, path: Path) -> str:
    return path.relative_to(directory).as_posix()


def _table_files(folder: Path, stem: str) -> list[Path]:
    for suffix in ("arrow", "parquet", "jsonl"):
        found = sorted(folder.glob(f"{stem}*.{suffix}"))
        if found:
            return found
    return []


def _trial_number(info: Mapping[str, Any] | None, folder: Path, position: int) -> int:
    given = (info or {}).get("trial")
    if isinstance(given, int) and not isinstance(given, bool) and 0 <= given < 1 << 31:
        return given
    name = folder.name.removeprefix("trial-")
    return int(name) if name.isdecimal() else position


def _with_trial(table: pa.Table, number: int) -> pa.Table:
    index = table.schema.get_field_index("trial")
    if not table.column(index).null_count:
        return table
    return table.set_column(index, table.schema.field(index), pc.fill_null(table.column(index), number))


# What counts as one request's latency. Each array has one entry a request.


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """The requests of a run as columns, with latencies as they are judged.

    An answer that is OK and empty, or that names an error, has failed. Latency counts from the scheduled time. A
    failed request counts with the deadline (or what it took, if longer) in each metric that it did not complete. A
    request cut off by the end of the trial counts with the time it had waited where that is longer than its arm's
    median, and is left out (NaN) where it is not.
    """

    arms: tuple[str, ...]
    arm: Codes  # index into arms
    replicas: tuple[str, ...]
    replica: Codes  # index into replicas, -1 where unknown
    trial: Codes
    pair: Codes  # equal for the copies of one request, -1 where there is none; below len(self)
    start_ns: Ints  # scheduled, or sent where no schedule is known
    scheduled: Bools  # whether start_ns is a scheduled time
    sent_ns: Ints  # -1 where unknown
    first_ns: Ints  # -1 where no token came
    end_ns: Ints
    ok: Bools
    failed: Bools
    shed: Bools  # failed for want of room or time: RESOURCE_EXHAUSTED, DEADLINE_EXCEEDED
    cut: Bools
    broken: Bools  # times that are missing or run backwards; in no metric
    measured: Bools  # not ramp-up
    ttft_ms: Floats
    e2e_ms: Floats
    tpot_ms: Floats
    max_itl_ms: Floats
    prompt_tokens: Codes  # -1 where unknown
    max_tokens: Codes  # -1 where unknown
    output_tokens: Codes
    batch: Codes  # the server's id of the step that first ran it, -1 where unknown
    stall_ns: Codes  # what the server reported, negative where it did not
    server_told: Bools  # whether the server told how long the request queued; the three below are 0 where not
    recv_us: Codes  # when it came to the server, from start_ns on
    queue_us: Codes  # how long it queued there
    stay_us: Codes  # from when it came to the end of its answer
    gaps_ms: npt.NDArray[np.float32]  # every token gap, request after request
    gap_offsets: Ints  # request i owns gaps_ms[gap_offsets[i]:gap_offsets[i + 1]]
    token_times: Codes  # how many times of tokens are recorded
    request_ids: pa.ChunkedArray
    session_ids: pa.ChunkedArray
    repeated: int  # rows dropped because their request id was already there

    def __len__(self) -> int:
        return len(self.arm)

    def lag_ms(self, rows: Ints | Bools) -> Floats:
        """How much later than scheduled each of `rows` was sent, NaN where unknown."""
        start, sent = self.start_ns[rows], self.sent_ns[rows]
        return np.where(self.scheduled[rows] & (sent > 0), _ms_between(start, sent), math.nan)

    def metric_ms(self, name: str) -> Floats:
        """The latencies called `name`, one of METRICS. NaN where undefined."""
        if name not in METRICS:
            raise RecordError(f'metric "{name}" is unknown: use {", ".join(METRICS[:-1])} or {METRICS[-1]}')
        latencies: Floats = getattr(self, f"{name}_ms")
        return latencies


METRICS = ("ttft", "e2e", "tpot", "max_itl")

# A request cancelled this close to the end of the trial was cut by it; earlier, the server or the client failed.
_CUT_SLACK_NS = 1_000_000_000
_STALL_SLACK_NS = 1_000_000_000
_LAST_NS = 9_200_000_000_000_000_000  # beyond any clock
_STAMP_SLACK_MS = 5.0  # gaps are held in single precision


def requests_of(
    table: pa.Table,
    *,
    deadline_ms: float | None = None,
    ends_ns: Mapping[int, int] | None = None,
    cut_short: Collection[int] = (),
    queues: bool = True,
) -> Requests:
    """The columns of `table` (schema REQUESTS) with derived latencies.

    `ends_ns` is the planned end of each trial, `cut_short` the trials that did not reach it: connections that broke in
    their last second broke with the run, and their requests are cut off, not failed. Without `deadline_ms`, a failure
    counts as the longest time seen. Without `queues`, the servers' times are left out, which nobody needs who follows
    no backlog.
    """
    if nameless := table.column("arm").null_count:
        raise RecordError(f"{nameless} requests name no arm: fill the column arm")
    unique = _first_of_each(table)
    repeated = 0
    if unique is not None:
        repeated = table.num_rows - int(unique.sum())
        table = table.filter(pa.array(unique))
    # Each column is let go of when it was cut, so that memory holds it once.
    columns = dict(zip(table.column_names, table.columns, strict=True))
    del table, unique
    arm, arms = _codes(columns.pop("arm"))
    rows = len(arm)
    replica, replicas = _codes(columns.pop("replica"))
    trial = _integers(columns.pop("trial"), 1)
    pair = _groups(columns.pop("pair_id"))
    scheduled = _times(columns.pop("scheduled_ns"))
    sent = _times(columns.pop("sent_ns"))
    first = _times(columns.pop("first_token_ns"))
    end = _times(columns.pop("end_ns"))
    has_schedule = scheduled > 0
    start = scheduled if has_schedule.all() else np.where(has_schedule, scheduled, sent)
    del scheduled
    status, statuses = _codes(columns.pop("status"))
    completed = _is(status, statuses, "OK")
    unended = end <= 0
    seen = first > 0
    stall = _integers(columns.pop("compile_stall_ns"), -1)
    at_the_end = np.zeros(rows, dtype=np.bool_)
    if not completed.all() or unended.any():
        last = _last_end(trial, np.maximum(end, start), ends_ns or {})
        end = np.where(unended, np.maximum(last, start), end)
        at_the_end = end >= last - _CUT_SLACK_NS
        del last
    broken = unended & completed
    for part in parts(rows):
        began, came, done = start[part], first[part], end[part]
        broken[part] |= (began <= 0) | (done < began) | (done > _LAST_NS)
        broken[part] |= seen[part] & ((came < began) | (came > done))
        broken[part] |= stall[part] > done - began + _STALL_SLACK_NS  # nobody was held up for longer than it took
    cut = (_is(status, statuses, "CANCELLED") & at_the_end) | (unended & ~completed)
    if cut_short:
        cut |= np.isin(trial, list(cut_short)) & at_the_end & _is(status, statuses, "UNAVAILABLE")
    shed = _is(status, statuses, "RESOURCE_EXHAUSTED") | _is(status, statuses, "DEADLINE_EXCEEDED")
    del status, unended, at_the_end
    output = _integers(columns["output_tokens"], 0)
    if rows and output.min() < 0:
        output = np.maximum(output, 0)
    hollow = completed & _hollow(columns.pop("output_tokens"), columns.pop("error"), output)
    completed &= ~hollow
    seen &= ~(hollow & (output == 0))
    gaps, offsets, times, backwards = _token_gaps(columns.pop("token_ns"))
    broken |= backwards
    if len(gaps):
        # No answer ends before its last token.
        broken |= completed & seen & (_sums(gaps, offsets) > _ms_between(first, end) + _STAMP_SLACK_MS)
    cut &= ~broken
    ok = completed & ~cut & ~broken
    failed = ~(ok | cut | broken)
    del completed, hollow, backwards

    age = _ms_between(start, end)
    age[broken] = math.nan
    ttft = _ms_between(start, first)
    ttft[~seen | broken] = math.nan
    unseen = ok & ~seen
    if unseen.any():
        # Nobody saw their first token, while the arm's others have one: it came with the last at the latest. In records
        # of other tools no answer of an arm may have one, which says nothing.
        known = np.bincount(arm[ok & seen], minlength=len(arms)) > 0
        late = unseen & known[arm]
        ttft[late] = age[late]
    tpot = _ms_between(first, end)
    for part in parts(rows):
        tpot[part] /= np.maximum(output[part] - 1, 1)
    tpot[~(ok & seen & (output > 1))] = math.nan
    # One value for all rows takes no memory.
    max_itl = np.full(rows, math.nan) if len(gaps) or failed.any() else np.broadcast_to(math.nan, rows)
    if len(gaps):
        has_gaps = np.diff(offsets) > 0
        max_itl[has_gaps] = np.maximum.reduceat(gaps, offsets[:-1][has_gaps])
        max_itl[~(ok | cut)] = math.nan
    penalty = np.fmax(age[failed], deadline_ms) if deadline_ms is not None else np.full(failed.sum(), _longest(age))
    e2e = age  # of those that completed it is their age
    for number in np.unique(arm[cut]).tolist():
        own = arm == number
        waiting = own & cut & ~seen
        ttft[waiting] = _when_long(age[waiting], ttft[own & ok])
        e2e[own & cut] = _when_long(age[own & cut], age[own & ok])
    if failed.any():
        for metric in (e2e, tpot, max_itl):
            metric[failed] = penalty
        ttft[failed & ~seen] = penalty[~seen[failed]]

    times_of_server = [columns.pop(name, None) for name in _OF_QUEUES]
    server_told, recv, queue, stay = _server_times(times_of_server if queues else [None], start, sent, end)
    phase, phases = _codes(columns.pop("phase"))
    return Requests(
        arms=arms,
        arm=arm,
        replicas=replicas,
        replica=replica,
        trial=trial,
        pair=pair,
        start_ns=start,
        scheduled=has_schedule,
        sent_ns=sent,
        first_ns=first,
        end_ns=end,
        ok=ok,
        failed=failed,
        shed=failed & shed,
        cut=cut,
        broken=broken,
        measured=~_is(phase, phases, "rampup"),
        ttft_ms=ttft,
        e2e_ms=e2e,
        tpot_ms=tpot,
        max_itl_ms=max_itl,
        prompt_tokens=_integers(columns.pop("prompt_tokens"), -1),
        max_tokens=_integers(columns.pop("max_tokens"), -1),
        output_tokens=output,
        batch=_integers(columns.pop("batch_id"), -1),
        stall_ns=stall,
        server_told=server_told,
        recv_us=recv,
        queue_us=queue,
        stay_us=stay,
        gaps_ms=gaps,
        gap_offsets=offsets,
        token_times=times,
        request_ids=columns.pop("request_id"),
        session_ids=columns.pop("session_id"),
        repeated=repeated,
    )


def _ms_between(earlier: Ints, later: Ints) -> Floats:
    ms = np.empty(len(later))
    for part in parts(len(later)):
        np.divide(later[part] - earlier[part], 1e6, out=ms[part])
    return ms


def _hollow(counts: pa.ChunkedArray, error: pa.ChunkedArray, output: Codes) -> Bools:
    """Which answers have nothing in them: no token, by a count that is there, or an error."""
    hollow: Bools = output <= 0
    if counts.null_count:
        hollow &= counts.is_valid().to_numpy()
    if error.null_count < len(error):
        named, errors = _codes(error)
        hollow |= (named >= 0) & ~_is(named, errors, "")
    return hollow


def _sums(gaps: npt.NDArray[np.float32], offsets: Ints) -> Floats:
    """The sum of each request's gaps, 0 where it has none."""
    sums = np.zeros(len(offsets) - 1)
    has_gaps = np.diff(offsets) > 0
    sums[has_gaps] = np.add.reduceat(gaps, offsets[:-1][has_gaps], dtype=np.float64)
    return sums


_FEW_NAMES = 1 << 14  # codes of 16 bits hold them, with room to count in


def _server_times(
    columns: Sequence[pa.ChunkedArray | None], start: Ints, sent: Ints, end: Ints
) -> tuple[Bools, Codes, Codes, Codes]:
    """Which requests the server told the queueing time of, and in µs: when they came from `start` on, how long they
    queued, how long they stayed.

    What the server does not tell of its own clock, or what lies outside of what the client saw, is the client's.
    """
    nothing = np.zeros(len(start), dtype=np.int32)
    if any(column is None for column in columns):
        return nothing.astype(np.bool_), nothing, nothing, nothing
    queue, recv, left = (_times(column) for column in columns)
    told = (queue >= 0) & (queue <= end - start)
    if not told.any():
        return told, nothing, nothing, nothing
    recv = np.where((recv >= start) & (recv + queue <= end), recv, np.minimum(np.maximum(sent, start), end - queue))
    left = np.where((left >= recv + queue) & (left <= end), left, end)
    parts = (recv - start, queue, left - recv)
    shown = ((np.where(told, part, 0) // 1000).clip(0, np.iinfo(np.int32).max).astype(np.int32) for part in parts)
    recv_us, queue_us, stay_us = shown
    return told, recv_us, queue_us, stay_us


def _longest(age: Floats) -> float:
    return float(np.nanmax(age)) if not np.isnan(age).all() else math.nan


def _when_long(age: Floats, completed: Floats) -> Floats:
    """The ages that exceed the median of `completed`, else NaN: a short wait cut off says nothing of the tail."""
    known = completed[np.isfinite(completed)]
    median = float(np.median(known)) if known.size else 0.0
    return np.where(age > median, age, math.nan)


def _first_of_each(table: pa.Table) -> Bools | None:
    """Which rows are the first of their trial, arm and request id, or have no id; None when all are."""
    names = table.column("request_id")
    known = names.is_valid().to_numpy()
    # Equal ids have equal fingerprints; the few others that have them too are told apart below.
    prints = fingerprints(names)
    if prints is not None and not known[_alike(prints)].any():
        return None
    arm, _ = _codes(table.column("arm"))
    identity = pa.table({"trial": table.column("trial"), "arm": arm, "id": names, "row": np.arange(len(names))})
    first = identity.filter(pa.array(known)).group_by(["trial", "arm", "id"]).aggregate([("row", "min")])
    keep = ~known
    keep[first.column("row_min").to_numpy()] = True
    return None if keep.all() else keep


def _alike(prints: npt.NDArray[np.uint64]) -> Ints:
    """The rows whose fingerprint another row has too, rising."""
    # Half of each is sorted, in half the time: few have it in common with others by chance.
    heads = (prints >> np.uint64(32)).astype(np.uint32)
    heads.sort()
    twice = heads[1:][heads[1:] == heads[:-1]]
    suspect = np.zeros(1 << _SUSPECT_BITS, dtype=np.bool_)
    suspect[twice >> np.uint32(32 - _SUSPECT_BITS)] = True
    rows = np.flatnonzero(suspect[prints >> np.uint64(64 - _SUSPECT_BITS)]) if twice.size else np.zeros(0, np.int64)
    _, place, counts = np.unique(prints[rows], return_inverse=True, return_counts=True)
    return np.asarray(rows[counts[place] > 1])


_LONGEST_PRINTED = 64
_SUSPECT_BITS = 20  # a table that fits a processor's cache
_ODD = np.uint64(0x9E3779B97F4A7C15)
_LOW_BYTES = np.array([(1 << 8 * count) - 1 for count in range(9)], dtype=np.uint64)


def fingerprints(column: pa.ChunkedArray) -> npt.NDArray[np.uint64] | None:
    """64 bits of each text (of null: any), equal for equal texts and almost never for others.

    None where a text is longer than 64 bytes. To sort these takes a tenth of the time that a table of the texts does.
    """
    longest = pc.max(pc.binary_length(column)).as_py() or 0
    if longest > _LONGEST_PRINTED:
        return None
    prints = _in_threads(partial(_prints, longest=longest), _pieces(column))
    return np.concatenate([np.zeros(0, dtype=np.uint64), *prints])


def _prints(texts: pa.Array, longest: int) -> npt.NDArray[np.uint64]:
    _, offset_bytes, text_bytes = texts.buffers()
    offsets = np.frombuffer(offset_bytes, dtype=np.int32)[texts.offset : texts.offset + len(texts) + 1]
    padded = np.zeros(int(offsets[-1] - offsets[0]) + longest + 16, dtype=np.uint8)
    if text_bytes is not None:
        padded[: offsets[-1] - offsets[0]] = np.frombuffer(text_bytes, dtype=np.uint8)[offsets[0] : offsets[-1]]
    # The eight bytes from each byte on, as one word.
    words: npt.NDArray[np.uint64] = np.ndarray((len(padded) - 7,), dtype="<u8", buffer=padded, strides=(1,))
    starts, lengths = offsets[:-1] - offsets[0], np.diff(offsets)
    mixed = lengths.astype(np.uint64)
    for place in range(0, longest, 8):
        mixed ^= words[starts + place] & _LOW_BYTES[np.clip(lengths - place, 0, 8)]
        mixed *= _ODD
        mixed ^= mixed >> np.uint64(29)
    return mixed


def _last_end(trial: Codes, end: Ints, planned: Mapping[int, int]) -> Ints:
    """The last end of each request's trial, at most the planned one."""
    last = np.zeros(len(trial), dtype=np.int64)
    for number in np.unique(trial).tolist():
        own = trial == number
        seen = int(end.max(where=own, initial=0))
        last[own] = min(seen, planned.get(number, seen))
    return last


def _whole(column: Any) -> Any:
    """The column as one array, without a copy where it is one already."""
    if not isinstance(column, pa.ChunkedArray):
        return column
    # combine_chunks copies also where there is one chunk.
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _integers(column: Any, missing: int) -> Any:
    """Whole numbers of 32 or 64 bits, as wide as the column's at least, with `missing` for null. May be read-only."""
    whole = _whole(column)
    # fill_null copies also where there is nothing to fill.
    values = (pc.fill_null(whole, missing) if whole.null_count else whole).to_numpy(zero_copy_only=False)
    # Sums and products of counts do not fit in less.
    return values if values.itemsize >= 4 else values.astype(np.int32)


def _times(column: Any) -> Ints:
    """Moments in ns of 64 bits, -1 for null, also where there is none at all. May be read-only."""
    return np.asarray(_integers(column, -1).astype(np.int64, copy=False))


def _codes(column: Any) -> tuple[Codes, tuple[str, ...]]:
    """One small integer for each distinct text, in alphabetical order of the texts; -1 for null."""
    encoded = _encoded(column)
    names = [str(name) for name in encoded.dictionary.to_pylist()]
    order = sorted(range(len(names)), key=names.__getitem__)
    rank = np.full(len(names) + 1, -1, dtype=np.int16 if len(names) < _FEW_NAMES else np.int32)
    rank[order] = np.arange(len(names))
    return rank[_integers(encoded.indices, -1)], tuple(names[index] for index in order)


def _groups(column: pa.ChunkedArray) -> Codes:
    """One number below the length for each distinct text; -1 for null.

    Chunk by chunk, since copies lie near each other; the texts that several chunks hold are then given one number.
    """
    found = np.full(len(column), -1, dtype=np.int32)
    texts = []
    done = count = 0
    for encoded in _in_threads(lambda piece: piece.dictionary_encode(), _pieces(column)):
        own: Codes = _integers(encoded.indices, -1)
        np.add(own, count, out=found[done : done + len(own)], where=own >= 0)
        texts.append(encoded.dictionary)
        done += len(own)
        count += len(encoded.dictionary)
    if len(texts) < 2:
        return found
    names = pa.chunked_array(texts)
    prints = fingerprints(names)
    places = None if prints is None else _alike(prints)
    if places is None or places.size > count // 8:
        whole: Codes = _integers(_whole(column).dictionary_encode().indices, -1)
        return whole
    if not places.size:
        return found
    first: dict[str, int] = {}
    number = np.arange(count, dtype=np.int32)
    for place, name in zip(places.tolist(), names.take(pa.array(places)).to_pylist(), strict=True):
        number[place] = first.setdefault(name, place)
    return np.where(found < 0, -1, number[found])


def _in_threads(function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """What `function` makes of each of the items, in their order; it spends its time outside of Python."""
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(function, items))


def _pieces(column: Any) -> Iterator[Any]:
    """The column in pieces that fit a processor's cache; empty ones are left out."""
    for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
        for part in parts(len(chunk)):
            yield chunk[part]


def _encoded(column: Any) -> Any:
    whole = _whole(column)
    return whole if pa.types.is_dictionary(whole.type) else whole.dictionary_encode()


def _is(codes: Codes, names: tuple[str, ...], name: str) -> Bools:
    return codes == names.index(name) if name in names else np.zeros(len(codes), dtype=np.bool_)


def _token_gaps(column: Any) -> tuple[npt.NDArray[np.float32], Ints, Codes, Bools]:
    """Gaps between tokens in ms, their offsets, how many times each request has, and which of them run backwards."""
    rows = len(column)
    lengths: Codes = np.broadcast_to(np.int32(0), rows)
    if column.null_count < rows:
        lengths = _integers(pc.list_value_length(column), 0)
    counts = np.maximum(lengths - 1, 0) if lengths.any() else lengths
    if not counts.any():
        return np.zeros(0, dtype=np.float32), np.broadcast_to(0, rows + 1), lengths, np.broadcast_to(False, rows)
    offsets = np.zeros(rows + 1, dtype=np.int64)
    backwards = np.zeros(rows, dtype=np.bool_)
    np.cumsum(counts, out=offsets[1:])
    gaps = np.empty(offsets[-1], dtype=np.float32)
    done = 0
    for chunk in _pieces(column):
        part = slice(done, done + len(chunk))
        done += len(chunk)
        found = gaps[offsets[part.start] : offsets[part.stop]]
        if not found.size:
            continue
        times = _integers(pc.list_flatten(chunk), 0)
        within = np.ones(len(times) - 1, dtype=np.bool_)
        ends = np.cumsum(lengths[part])
        within[ends[(ends > 0) & (ends < len(times))] - 1] = False
        found[:] = np.diff(times)[within] / 1e6
        if found.min() < 0:
            owner = np.repeat(np.arange(part.start, part.stop), counts[part])
            backwards[owner[found < 0]] = True
    return gaps, offsets, lengths, backwards
