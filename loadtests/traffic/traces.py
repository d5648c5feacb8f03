"""Traces of LLM serving as columns: when each request came, its input and its output length, which prompts it shares.

Formats are told apart by content and not by file name, plain or packed by gzip. CSV, by the names of its columns:

- Azure LLM inference traces of 2023 and 2024: `TIMESTAMP,ContextTokens,GeneratedTokens`; the multimodal one of 2025 has
  `NumImages` too, and its images are not sent (github.com/Azure/AzurePublicDataset).
- BurstGPT: `Timestamp` (s), `Request tokens`, `Response tokens` and others, of which none is read
  (github.com/HPMLL/BurstGPT).
- A CSV of one's own: `time_s,input_tokens,output_tokens`. Texts that are only to be embedded have no answer: there the
  last column may hold 0, or be left out.

JSON Lines with `timestamp`, `input_length`, `output_length` and mostly `hash_ids`, one for each block of the prompt.
Neither the unit of time nor the size of a block is in the file:

- Mooncake's have ms and 512 tokens: the times are whole numbers, as ms fewer than 100 requests a second come, and no
  other size of a block fits the lengths (github.com/kvcache-ai/Mooncake).
- Qwen-Bailian's (`chat_id`, `parent_chat_id`) have s and 16 tokens
  (github.com/alibaba-edu/qwen-bailian-usagetraces-anon).
- AIPerf's sessions have ms: turns of a `session_id`, of which later ones have a `delay` in place of a timestamp, and
  whose length is what they add to the context (docs.nvidia.com/aiperf: trace replay, conversation context mode).
- Others have s (GuideLLM's guide to trace replay) or ms, and blocks of any size: settings say which.

A file is read line by line, and only the rows of the answer are kept: memory does not grow with the file, unless it
holds sessions.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import random
import re
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO, TypeVar

import numpy as np
import numpy.typing as npt

from analysis.wording import counted
from servers.fields import ConfigError

T = TypeVar("T")
IntArray = npt.NDArray[np.int64]
Format = Literal["azure", "burstgpt", "plain", "mooncake", "bailian", "sessions"]
TimeUnit = Literal["", "s", "ms"]

_NS = {"s": 1_000_000_000, "ms": 1_000_000}
_MOONCAKE_BLOCK, _BAILIAN_BLOCK = 512, 16
_HEAD = 1000  # rows that must show the unit and the size of a block; 100 of Mooncake's do

_DATE = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?", re.ASCII)
_JSON_KEYS = ("timestamp", "input_length", "output_length")
_PLAIN_HEADER = ("time_s", "input_tokens", "output_tokens")
_SECONDS = re.compile(r"-?\d{1,12}(?:\.\d{1,9})?", re.ASCII)
_WHOLE = re.compile(r"-?\d{1,18}", re.ASCII)
_MAX_TOKENS = 2**31 - 1
_MAX_LINE = 1 << 24  # a file without line ends must not be read whole
_MAX_SPAN_S = 10 * 366 * 86_400
KNOWN = "an Azure or BurstGPT CSV, Mooncake or Qwen-Bailian JSON Lines, or a CSV of " + ",".join(_PLAIN_HEADER)


class _Row(NamedTuple):
    time_text: str
    at_ns: int
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


class _Record(NamedTuple):
    """A line of JSON. Times are in the unit of the file; `at` is None where `delay` counts from the turn before."""

    at: float | None
    delay: float | None
    input_tokens: int
    output_tokens: int
    ids: tuple[int, ...]
    session: str
    whole_context: bool


class _MalformedError(Exception):
    """A line is not of its form. The message is what was expected."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """Requests of one trace in order of time: read-only columns of equal length, at least one row.

    offset_ns (int64) counts from the trace's first request; input_tokens (int32) are 1 or more, output_tokens (int32)
    too, or 0 where the trace was read without `answers`. Row k shares the leading blocks of its prompt, `block_tokens`
    each, with every row that has the same leading ids among block_ids[block_start[k]:block_start[k + 1]]; what goes
    beyond its ids is its own. `failed` rows have no answer and are left out, also of `rows_read`.
    """

    name: str
    format: Format
    offset_ns: IntArray
    input_tokens: npt.NDArray[np.int32]
    output_tokens: npt.NDArray[np.int32]
    block_ids: IntArray
    block_start: IntArray
    rows_read: int
    failed: int
    time_unit: TimeUnit  # of the file; empty for dates
    block_tokens: int  # 0 where the rows share no blocks

    def __len__(self) -> int:
        return len(self.offset_ns)

    @property
    def duration_s(self) -> float:
        """Seconds from the first request to the last that was read."""
        return float(self.offset_ns[-1]) / 1e9

    @property
    def account(self) -> str:
        """What was read, in one line."""
        times = f"times in {self.time_unit}" if self.time_unit else "times are dates"
        blocks = f", blocks of {self.block_tokens} tokens" if self.block_tokens else ""
        failed = f"; left out as failed, without an output token: {self.failed:,}" if self.failed else ""
        requests = counted(self.rows_read, "request", "{:,}".format)
        return f"{self.name}: {requests} in {self.duration_s:,.6g} s, read as {self.format} ({times}{blocks}){failed}"

    @property
    def shares_prefixes(self) -> bool:
        """Whether any row says which blocks its prompt is made of."""
        return len(self.block_ids) > 0

    def blocks(self, row: int) -> IntArray:
        """The ids of the leading blocks of a row's prompt, shape (blocks,)."""
        return self.block_ids[self.block_start[row] : self.block_start[row + 1]]


def read_trace(
    path: str | Path,
    *,
    start_s: float = 0.0,
    end_s: float = math.inf,
    sample: int = 0,
    seed: int = 0,
    answers: bool = True,
    blocks: bool = True,
    time_unit: TimeUnit = "",
    block_tokens: int = 0,
) -> Trace:
    """The trace at `path`, read line by line.

    Kept are the rows from `start_s` on; reading ends with the first row at or after `end_s`, which is kept too and
    shows that the trace lasts that long (seconds count from the trace's first request). Rows without an answer have
    failed and are left out. Where `answers` are of no use, as for embeddings, they may be 0, and a plain CSV may lack
    them; where `blocks` are of none, their size need not be known. With `sample` above 0, that many of these rows are
    kept, drawn evenly by `seed`. If no row is in reach, the last one read is kept.

    `time_unit` and `block_tokens` are those of JSON Lines whose format does not say them (empty, 0: known by format).

    Anything that is not as published raises ConfigError with the file, the line, the value and what to do: a
    malformed line, a length below 1, a time that goes back, an empty or missing file, an unknown format, a unit or a
    block size that is not certain. Empty lines are passed over.
    """
    name = str(path)
    try:
        with open_text(path) as lines:
            source = _source(name, lines, answers, blocks, time_unit, block_tokens)
            kept = _Reservoir(start_s=start_s, end_s=end_s, sample=sample, seed=seed)
            return _columns(name, source, kept, answers)
    except FileNotFoundError:
        raise ConfigError(f'trace "{name}" does not exist: give the path of {KNOWN}') from None
    except DAMAGED:
        raise ConfigError(f'trace "{name}" is damaged gzip data: copy it again') from None
    except OSError as error:
        raise ConfigError(f'trace "{name}" cannot be read ({error.strerror}): give a readable file') from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f'trace "{name}" has byte 0x{error.object[error.start]:02x}, which is not UTF-8 text: unpack or convert it'
        ) from None


DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error)
"""What reading raises where a file packed by gzip is damaged."""


@contextmanager
def open_text(path: str | Path) -> Iterator[TextIO]:
    """The UTF-8 text at `path`, unpacked where gzip packed it, whatever its name."""
    with Path(path).open("rb") as file:
        packed = file.peek(2)[:2] == b"\x1f\x8b"
        with io.TextIOWrapper(gzip.GzipFile(fileobj=file) if packed else file, encoding="utf-8-sig") as text:
            yield text


class _Source(NamedTuple):
    format: Format
    rows: Iterator[tuple[int, _Row]]
    time_unit: TimeUnit
    block_tokens: int = 0


def _source(name: str, text: TextIO, answers: bool, blocks: bool, time_unit: TimeUnit, block_tokens: int) -> _Source:
    lines = _numbered(name, text)
    number, header = next(lines, (0, ""))
    if not header:
        raise ConfigError(f'trace "{name}" is empty: give {KNOWN}')
    if header.startswith("{"):
        return _json_source(name, chain([(number, header)], lines), blocks, time_unit, block_tokens)
    if time_unit or block_tokens:
        key = "time_unit" if time_unit else "block_tokens"
        raise ConfigError(f"traffic.trace_{key} is for JSON Lines, and {name} line {number} begins none: remove it")
    names = [field.strip() for field in header.split(",")]
    for form, columns, parse, unit in _CSV:
        if not answers and form == "plain" and columns[2] not in names:
            columns = columns[:2]
        if set(columns) <= set(names):
            places = [(column, names.index(column)) for column in columns]
            return _Source(form, _parsed(name, lines, partial(_csv_row, len(names), places, parse)), unit)
    if set(_PLAIN_HEADER[:2]) <= set(names):
        raise ConfigError(
            f'{name} line {number} is "{_short(header)}", which has no answers: add the column output_tokens, or set '
            'model.task = "embed", for which none are needed'
        )
    headers = " or ".join(",".join(columns) for _, columns, _, _ in _CSV)
    raise ConfigError(
        f'{name} line {number} is "{_short(header)}", which is no known format: name the columns of a CSV {headers}, '
        f"or give JSON Lines with {', '.join(_JSON_KEYS)}"
    )


class _Reservoir:
    """The rows that stay. Sampling is Li's algorithm L: how many rows to pass over is drawn, not each row's fate."""

    def __init__(self, *, start_s: float, end_s: float, sample: int, seed: int) -> None:
        self._start_ns = round(start_s * 1e9)
        self._end_ns = round(end_s * 1e9) if end_s < math.inf else None
        self._sample = sample
        # Python promises equal draws of `random()` for equal seeds in all versions.
        self._random = random.Random(seed)
        self._weight = 1.0
        self._seen = self._next = 0
        self._last: tuple[int, _Row] | None = None
        self.done = False
        self.columns = array("q")  # offset, input and output of each row, flat
        self.blocks: list[tuple[int, ...]] = []

    def add(self, offset_ns: int, row: _Row) -> None:
        """Keep the row or not."""
        self._last = (offset_ns, row)
        if offset_ns < self._start_ns:
            return
        self.done = self._end_ns is not None and offset_ns >= self._end_ns
        self._seen += 1
        if not self._sample or self._seen <= self._sample:
            self._append(offset_ns, row)
            if self._seen == self._sample:
                self._next = self._seen
                self._skip()
        elif self._seen == self._next:
            place = int(self._random.random() * self._sample)
            self.columns[3 * place : 3 * place + 3] = array("q", (offset_ns, row.input_tokens, row.output_tokens))
            self.blocks[place] = row.blocks
            self._skip()

    def end(self) -> None:
        """At least one row is kept."""
        if not self.blocks and self._last is not None:
            self._append(*self._last)

    def _append(self, offset_ns: int, row: _Row) -> None:
        self.columns.extend((offset_ns, row.input_tokens, row.output_tokens))
        self.blocks.append(row.blocks)

    def _skip(self) -> None:
        # 1 - random() is never 0, whose logarithm does not exist.
        self._weight *= math.exp(math.log(1 - self._random.random()) / self._sample)
        below = max(1e-300, 1 - self._weight)
        self._next += 1 + (math.floor(math.log(1 - self._random.random()) / math.log(below)) if below < 1 else 2**62)


def _columns(name: str, source: _Source, kept: _Reservoir, answers: bool) -> Trace:
    first_ns = last_ns = count = failed = 0
    last_text, unit = "", f" {source.time_unit}" if source.time_unit else ""
    for number, row in source.rows:
        if answers and not row.output_tokens:
            failed += 1
            continue
        if not count:
            first_ns = last_ns = row.at_ns
        count += 1
        if row.at_ns < last_ns:
            raise ConfigError(
                f"{name} line {number}: time goes back from {last_text}{unit} to {row.time_text}{unit}: sort the trace "
                "by time"
            )
        if row.at_ns - first_ns > _MAX_SPAN_S * 1_000_000_000:
            raise ConfigError(
                f"{name} line {number}: time is {row.time_text}{unit}, more than 10 years after the first request: "
                "correct or remove the line"
            )
        for key, value in (("input", row.input_tokens), ("output", row.output_tokens)):
            least = 0 if key == "output" and not answers else 1
            if not least <= value <= _MAX_TOKENS:
                raise ConfigError(
                    f"{name} line {number}: {key} length is {value}: "
                    f"correct it to a value from {least} to {_MAX_TOKENS} or remove the line"
                )
        kept.add(row.at_ns - first_ns, row)
        if kept.done:
            break
        last_ns, last_text = row.at_ns, row.time_text
    if not count:
        what = f"no request with an answer, and {failed} without" if failed else "a header but no request"
        raise ConfigError(f'trace "{name}" has {what}: give a trace with at least one')
    kept.end()
    columns = np.frombuffer(kept.columns, dtype=np.int64).reshape(-1, 3)
    order = np.argsort(columns[:, 0], kind="stable")
    offset_ns, inputs, outputs = columns[order].T
    sizes = np.array([len(blocks) for blocks in kept.blocks], dtype=np.int64)[order]
    trace = Trace(
        name=name,
        format=source.format,
        offset_ns=offset_ns.copy(),
        input_tokens=inputs.astype(np.int32),
        output_tokens=outputs.astype(np.int32),
        block_ids=np.fromiter(
            chain.from_iterable(kept.blocks[index] for index in order), dtype=np.int64, count=int(sizes.sum())
        ),
        block_start=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        rows_read=count,
        failed=failed,
        time_unit=source.time_unit,
        block_tokens=source.block_tokens,
    )
    for column in (trace.offset_ns, trace.input_tokens, trace.output_tokens, trace.block_ids, trace.block_start):
        column.setflags(write=False)
    return trace


def _numbered(name: str, source: TextIO) -> Iterator[tuple[int, str]]:
    """(number, text) of the lines that are not empty."""
    for number in count(1):
        raw = source.readline(_MAX_LINE)
        if not raw:
            return
        if len(raw) == _MAX_LINE:
            raise ConfigError(f"{name} line {number} has more than {_MAX_LINE - 1} characters: break it into lines")
        if line := raw.strip():
            yield number, line


def _parsed(name: str, lines: Iterable[tuple[int, str]], parse: Callable[[str], T]) -> Iterator[tuple[int, T]]:
    for number, line in lines:
        try:
            row = parse(line)
        except _MalformedError as expected:
            raise ConfigError(
                f'{name} line {number} is "{_short(line)}": expected {expected}: correct or remove the line'
            ) from None
        yield number, row


@lru_cache(maxsize=1)  # neighbours mostly share their second, so the date is parsed once a second and not once a row
def _second_ns(second: str, zone: str) -> int:
    try:
        return round(datetime.fromisoformat(second + zone).timestamp()) * 1_000_000_000
    except ValueError:
        raise _MalformedError("a date and time that exist") from None


def _date_ns(text: str) -> int:
    match = _DATE.fullmatch(text)
    if match is None:
        raise _MalformedError("a time such as 2023-11-16 18:15:46.6805900")
    second, fraction, zone = match.groups()
    return _second_ns(second, zone or "+00:00") + int((fraction or "").ljust(9, "0"))


def _seconds_ns(text: str) -> int:
    if not _SECONDS.fullmatch(text):
        raise _MalformedError("a time in seconds, such as 12.5")
    whole, _, fraction = text.lstrip("-").partition(".")
    size_ns = int(whole) * 1_000_000_000 + int(fraction.ljust(9, "0"))
    return -size_ns if text.startswith("-") else size_ns


_CSV: tuple[tuple[Format, tuple[str, ...], Callable[[str], int], TimeUnit], ...] = (
    ("azure", ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _date_ns, ""),
    ("burstgpt", ("Timestamp", "Request tokens", "Response tokens"), _seconds_ns, "s"),
    ("plain", _PLAIN_HEADER, _seconds_ns, "s"),
)


def _csv_row(width: int, places: Sequence[tuple[str, int]], parse: Callable[[str], int], line: str) -> _Row:
    cells = line.split(",")
    if len(cells) != width:
        raise _MalformedError(f"{width} values")
    time_text = cells[places[0][1]].strip()
    at_ns = parse(time_text)
    lengths = [0, 0]
    for index, (key, place) in enumerate(places[1:]):
        if not _WHOLE.fullmatch(text := cells[place].strip()):
            raise _MalformedError(f"a whole number of tokens as {key}")
        lengths[index] = int(text)
    return _Row(time_text, at_ns, lengths[0], lengths[1])


# --- JSON Lines -------------------------------------------------------------------------------------------------------


def _json_source(
    name: str, lines: Iterable[tuple[int, str]], blocks: bool, time_unit: TimeUnit, block_tokens: int
) -> _Source:
    """The rows, once the first of them, or the settings, have shown the unit of time and the size of a block."""
    bailian = False

    def parse(line: str) -> _Record:
        nonlocal bailian
        record = _json_object(line)
        bailian = bailian or {"chat_id", "parent_chat_id"} <= record.keys()
        return _record(record)

    records = _parsed(name, lines, parse)
    head = list(islice(records, _HEAD))
    rows = [record for _, record in head]
    sessions, hashed = any(row.delay is not None for row in rows), any(row.ids for row in rows)
    known = _BAILIAN_BLOCK if bailian else _block_of(rows)
    unit = time_unit
    if not unit and bailian:
        unit = "s"
    elif not unit and (sessions or (known == _MOONCAKE_BLOCK and _in_ms([row.at for row in rows]))):
        unit = "ms"
    if not unit:
        raise ConfigError(
            f'trace "{name}" does not show whether its timestamps count s or ms: set traffic.trace_time_unit to "s" or '
            '"ms" (tailgate inspect: --time-unit)'
        )
    block = block_tokens or (known if hashed else _MOONCAKE_BLOCK if sessions else 0)
    if blocks and hashed and not block:
        raise ConfigError(
            f'trace "{name}" does not show how many tokens a hash id stands for: set traffic.trace_block_tokens, such '
            "as 512 for Mooncake's traces"
        )
    exact = not (block_tokens or bailian)
    played = _json_rows(name, chain(head, records), unit, block, exact=exact, sessions=sessions)
    if sessions:
        return _Source("sessions", iter(sorted(played, key=lambda item: item[1].at_ns)), unit, block)
    return _Source("bailian" if bailian else "mooncake", played, unit, block)


def _in_ms(times: Sequence[Any]) -> bool:
    """Whether the times are whole numbers, and as ms those of a service that gets fewer than 100 requests a second."""
    return all(type(at) is int for at in times) and times[-1] - times[0] > 10 * len(times)


def _block_of(records: Sequence[_Record]) -> int:
    """The only block size with which every prompt has a block for each hash id; 0 where there are several, or none."""
    hashed = [(record.input_tokens, len(record.ids)) for record in records if record.ids]
    least = max((-(-tokens // ids) for tokens, ids in hashed), default=0)
    most = min((-(-tokens // (ids - 1)) - 1 for tokens, ids in hashed if ids > 1), default=0)
    return least if least == most else 0


def _json_rows(
    name: str,
    records: Iterable[tuple[int, _Record]],
    unit: Literal["s", "ms"],
    block: int,
    *,
    exact: bool,
    sessions: bool,
) -> Iterator[tuple[int, _Row]]:
    """The records as rows; without a `block` size they share nothing. `exact`: a prompt has an id for every block.
    `sessions`: turns of a session add to its context."""
    turns: dict[str, tuple[int, int, tuple[int, ...]]] = {}  # by session: when, the context after it, the first ids
    for number, record in records:
        ids, tokens = record.ids, record.input_tokens
        blocks = -(-tokens // block) if block else 0
        if block and ids and tokens > 0 and (len(ids) > blocks or (exact and len(ids) < blocks)):
            raise ConfigError(
                f"{name} line {number}: {len(ids)} hash_ids but the input of {tokens} tokens has {blocks} blocks of "
                f"{block}: correct or remove the line, or set traffic.trace_block_tokens"
            )
        before = turns.get(record.session)
        if record.at is not None:
            at_ns = round(record.at * _NS[unit])
        elif before is not None and record.delay is not None:
            at_ns = before[0] + round(record.delay * _NS[unit])
        else:
            raise ConfigError(f"{name} line {number} has no timestamp, and its session no turn before it: add one")
        if sessions and record.session:
            if before is not None and not record.whole_context:
                tokens, ids = tokens + before[1], before[2]
            turns[record.session] = (at_ns, tokens + record.output_tokens, ids)
            if block and not record.whole_context:
                ids += tuple(_own_id(record.session, place) for place in range(len(ids), -(-tokens // block)))
        time_text = f"{at_ns / _NS[unit]:.10g}"
        yield number, _Row(time_text, at_ns, tokens, record.output_tokens, ids if block else ())


def _own_id(session: str, place: int) -> int:
    """The id of a block that only the turns of a session share."""
    digest = blake2b(f"{place} {session}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def _json_object(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise _MalformedError("one JSON object")
    return record


def _record(row: dict[str, Any]) -> _Record:
    session = str(row.get("session_id") or "")
    at, delay = row.get("timestamp"), row.get("delay") if session else None
    for key in _JSON_KEYS:
        if key not in row and (key != "timestamp" or delay is None):
            raise _MalformedError(f'the key "{key}"')
    # 1e15 ms is past any calendar; the comparisons are false for NaN too.
    given: Any = delay if at is None and delay is not None else at
    if type(given) not in (int, float) or not abs(given) <= 1e15:
        raise _MalformedError("timestamp in seconds or milliseconds")
    if delay is not None and (type(delay) not in (int, float) or not 0 <= delay <= 1e15):
        raise _MalformedError("delay in milliseconds, 0 or more")
    for key in _JSON_KEYS[1:]:
        if type(row[key]) is not int:
            raise _MalformedError(f"a whole number of tokens as {key}")
    ids = row.get("hash_ids") or []
    if not isinstance(ids, list) or not all(type(item) is int and 0 <= item < 2**64 for item in ids):
        raise _MalformedError("hash_ids as a list of whole numbers from 0 to 2^64 - 1")
    return _Record(
        at=at,
        delay=delay,
        input_tokens=row["input_length"],
        output_tokens=row["output_length"],
        ids=tuple(item if item < 2**63 else item - 2**64 for item in ids),
        session=session,
        whole_context=not session or row.get("context_mode") == "message_array_with_responses",
    )


def _short(text: str) -> str:
    shown = text if len(text) <= 80 else text[:77] + "..."
    # The message stays on one line and printable whatever the file holds.
    return "".join(char if char.isprintable() else "?" for char in shown)
