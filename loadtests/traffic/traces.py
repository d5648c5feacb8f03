"""Traces of LLM serving as columns: when each request came, its input and its output length, which prompts it shares.

Formats are told apart by content and not by file name, plain or packed by gzip. CSV, by the names of its columns:

- Azure LLM inference traces of 2023 and 2024: `TIMESTAMP,ContextTokens,GeneratedTokens`; the multimodal one of 2025 has
  `NumImages` too, and its images are not sent (github.com/Azure/AzurePublicDataset).
- BurstGPT: `Timestamp` (s), `Request tokens`, `Response tokens` and others, of which none is read
  (github.com/HPMLL/BurstGPT).
- A CSV of one's own: `time_s,input_tokens,output_tokens`. Texts that are only to be embedded have no answer: there the
  last column may hold 0, or be left out.

JSON Lines have `timestamp`, `input_length`, `output_length` and mostly `hash_ids`, one for each block of the prompt.
Neither the unit of time nor the size of a block is in the file. They are those of Mooncake, ms and 512 tokens
(github.com/kvcache-ai/Mooncake), unless settings say otherwise: Qwen-Bailian's have s and 16 tokens
(github.com/alibaba-edu/qwen-bailian-usagetraces-anon). A prompt whose ids are not one for each block is refused.
"""

from __future__ import annotations

import codecs
import gzip
import re
import zlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as arrow_csv
from pydantic import BaseModel, Field, StrictInt, ValidationError

from analysis.wording import counted
from servers.complaint import ConfigError, one_line

IntArray = npt.NDArray[np.int64]
TimeUnit = Literal["", "s", "ms"]

MOONCAKE_BLOCK = 512  # tokens

_CSV = {
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "burstgpt": ("Timestamp", "Request tokens", "Response tokens"),
    "plain": ("time_s", "input_tokens", "output_tokens"),
}
_NS = {"s": 1_000_000_000, "ms": 1_000_000}
_LATEST = {"s": 9e9, "ms": 9e12}  # the year 2255, and within 64 bits of ns
_ZONE = re.compile(r"(Z|[+-]\d\d:?\d\d)$")
_LONGEST_LINE = 1 << 24  # a file without line ends must not be read whole
_SHOWN = 80  # characters of a header in a message
_LONGEST_SPAN_S = 10 * 366 * 86_400
KNOWN = "an Azure or BurstGPT CSV, Mooncake JSON Lines, or a CSV of " + ",".join(_CSV["plain"])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """Requests of one trace in order of time: columns of equal length, at least one row.

    offset_ns (int64) counts from the trace's first request; input_tokens (int32) are 1 or more, output_tokens (int32)
    too, or 0 where the trace was read without `answers`. Row k shares the leading blocks of its prompt, `block_tokens`
    each, with every row that has the same leading ids among block_ids[block_start[k]:block_start[k + 1]]; what goes
    beyond its ids is its own. `failed` rows have no answer and are left out.
    """

    name: str
    format: str
    offset_ns: IntArray
    input_tokens: npt.NDArray[np.int32]
    output_tokens: npt.NDArray[np.int32]
    block_ids: IntArray
    block_start: IntArray
    failed: int
    time_unit: TimeUnit  # of the file; empty for dates
    block_tokens: int  # 0 where the rows share no blocks

    def __len__(self) -> int:
        return len(self.offset_ns)

    @property
    def duration_s(self) -> float:
        """Seconds from the first request to the last."""
        return float(self.offset_ns[-1]) / 1e9

    @property
    def account(self) -> str:
        """What was read, in one line."""
        times = f"times in {self.time_unit}" if self.time_unit else "times are dates"
        blocks = f", blocks of {self.block_tokens} tokens" if self.block_tokens else ""
        failed = f"; left out as failed, without an output token: {self.failed:,}" if self.failed else ""
        requests = counted(len(self), "request", "{:,}".format)
        return f"{self.name}: {requests} in {self.duration_s:,.6g} s, read as {self.format} ({times}{blocks}){failed}"

    def blocks(self, row: int) -> IntArray:
        """The ids of the leading blocks of a row's prompt, shape (blocks,)."""
        return self.block_ids[self.block_start[row] : self.block_start[row + 1]]


@dataclass(slots=True, kw_only=True)
class _Columns:
    """A trace as its file has it. `block_ids` are those of all rows, `block_counts` of them for each row."""

    format: str
    time_unit: TimeUnit
    times_ns: IntArray
    inputs: npt.NDArray[np.int32]
    outputs: npt.NDArray[np.int32]
    block_ids: IntArray
    block_counts: IntArray


def read_trace(
    path: str | Path, *, answers: bool = True, blocks: bool = True, time_unit: TimeUnit = "", block_tokens: int = 0
) -> Trace:
    """Read the trace at `path`.

    Rows without an answer have failed and are left out. Where `answers` are of no use, as for embeddings, they may be
    0, and a plain CSV may lack them; where `blocks` are of none, they are not read. `time_unit` and `block_tokens` are
    those of JSON Lines that are not Mooncake's (empty, 0: ms and 512).

    Anything that is not as published raises ConfigError with the file, the row, the value and what to do: a malformed
    row, a length below 1, a time that goes back, an empty or missing file, an unknown format, ids that do not fit the
    size of a block. Empty lines are passed over.
    """
    name = str(path)
    with opened(f'trace "{name}"', path) as file:
        header = _first_line(file, name)
        if header.startswith("{"):
            file.seek(0)
            read = _json_lines(file, name, blocks, time_unit or "ms", block_tokens)
        elif time_unit or block_tokens:
            key = "time_unit" if time_unit else "block_tokens"
            raise ConfigError(f"traffic.trace_{key} is for JSON Lines, and {name} is a CSV: remove it")
        else:
            read = _csv(file, name, header, answers)
    return _checked(name, read, answers, (block_tokens or MOONCAKE_BLOCK) if len(read.block_ids) else 0)


@contextmanager
def opened(what: str, path: str | Path) -> Iterator[IO[bytes]]:
    """Open the file at `path`, unpacked where gzip packed it, whatever its name. Raises ConfigError that begins with
    `what` where the file cannot be read to its end."""
    try:
        with Path(path).open("rb") as file:
            packed = file.peek(2)[:2] == b"\x1f\x8b"
            unpacked: Any = gzip.GzipFile(fileobj=file) if packed else file
            yield unpacked
    except FileNotFoundError:
        raise ConfigError(f"{what} does not exist: give the path of a file") from None
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise ConfigError(f"{what} is damaged gzip data: copy it again") from None
    except OSError as error:
        raise ConfigError(f"{what} cannot be read ({error.strerror}): give a readable file") from None
    except UnicodeDecodeError as error:
        wrong = error.object[error.start]
        raise ConfigError(f"{what} has byte 0x{wrong:02x}, which is not UTF-8 text: unpack or convert it") from None


def _first_line(file: IO[bytes], name: str) -> str:
    """The first line that is not empty."""
    while raw := file.readline(_LONGEST_LINE):
        if line := raw.decode("utf-8-sig").strip():
            return line
    raise ConfigError(f'trace "{name}" is empty: give {KNOWN}')


def _checked(name: str, read: _Columns, answers: bool, block_tokens: int) -> Trace:
    """The trace of the rows that have an answer. Raises ConfigError for the first row that cannot be."""
    kept = read.outputs != 0 if answers else np.ones(len(read.outputs), dtype=np.bool_)
    if not kept.any():
        what = f"no request with an answer, and {len(kept)} without" if len(kept) else "a header but no request"
        raise ConfigError(f'trace "{name}" has {what}: give a trace with at least one')
    times_ns, inputs, outputs = read.times_ns[kept], read.inputs[kept], read.outputs[kept]

    def refuse_first(wrong: npt.NDArray[np.bool_], what: str, values: npt.NDArray[Any], remedy: str) -> None:
        if wrong.any():
            index = int(np.argmax(wrong))
            row = int(np.flatnonzero(kept)[index]) + 1
            raise ConfigError(f"{name} row {row}: {what.format(values[index])}: {remedy}")

    gone_back = np.diff(times_ns, prepend=times_ns[0])
    refuse_first(gone_back < 0, "time goes back by {} ns", -gone_back, "sort the trace by time")
    offset_ns = times_ns - times_ns[0]
    far = "time is {} ns after the first request, more than 10 years"
    refuse_first(offset_ns > _LONGEST_SPAN_S * 10**9, far, offset_ns, "correct or remove the row")
    for what, lengths, least in (("input", inputs, 1), ("output", outputs, 1 if answers else 0)):
        refuse_first(lengths < least, what + " length is {}", lengths, f"give {least} or more, or remove the row")
    counts = read.block_counts[kept]
    return Trace(
        name=name,
        format=read.format,
        offset_ns=offset_ns,
        input_tokens=inputs,
        output_tokens=outputs,
        block_ids=read.block_ids[np.repeat(kept, read.block_counts)],
        block_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        failed=int((~kept).sum()),
        time_unit=read.time_unit,
        block_tokens=block_tokens,
    )


# --- CSV --------------------------------------------------------------------------------------------------------------


def _csv(file: IO[bytes], name: str, header: str, answers: bool) -> _Columns:
    names = [field.strip() for field in header.split(",")]
    columns: tuple[str, ...] = ()
    for form, columns in _CSV.items():
        if not answers and form == "plain" and columns[2] not in names:
            columns = columns[:2]
        if set(columns) <= set(names):
            break
    else:
        raise _unknown_header(name, names, header)
    time_type = pa.float64() if form != "azure" else _date_type(file, names.index(columns[0]))
    types = dict(zip(columns, (time_type, pa.int32(), pa.int32()), strict=False))
    try:
        table = arrow_csv.read_csv(
            file,
            read_options=arrow_csv.ReadOptions(column_names=names, use_threads=False, block_size=_LONGEST_LINE),
            convert_options=arrow_csv.ConvertOptions(column_types=types, include_columns=list(columns)),
        )
    except pa.ArrowInvalid as error:
        if str(error) == "Empty CSV file":
            table = pa.table({column: pa.array([], kind) for column, kind in types.items()})
        else:
            raise ConfigError(f"{name}: {one_line(str(error))}: correct or remove the row") from None
    for column in columns:
        if table[column].null_count:
            row = table[column].is_null().index(True).as_py() + 1
            raise ConfigError(f"{name} row {row} has no {column}: correct or remove the row")
    times, *lengths = (table[column].to_numpy() for column in columns)
    none = np.zeros(len(times), dtype=np.int32)
    return _Columns(
        format=form,
        time_unit="" if form == "azure" else "s",
        times_ns=times.astype(np.int64) if form == "azure" else _nanoseconds(name, times, "s"),
        inputs=lengths[0],
        outputs=lengths[1] if len(lengths) > 1 else none,
        block_ids=np.zeros(0, dtype=np.int64),
        block_counts=none.astype(np.int64),
    )


def _unknown_header(name: str, names: Sequence[str], header: str) -> ConfigError:
    shown = one_line(header[:_SHOWN])
    if set(_CSV["plain"][:2]) <= set(names):
        return ConfigError(
            f'{name} begins with "{shown}", which has no answers: add the column output_tokens, or set '
            'model.task = "embed", for which none are needed'
        )
    headers = " or ".join(map(",".join, _CSV.values()))
    return ConfigError(
        f'{name} begins with "{shown}", which is no known format: name the columns of a CSV {headers}, or give JSON '
        "Lines with timestamp, input_length, output_length"
    )


def _date_type(file: IO[bytes], place: int) -> Any:
    """The type of dates as the first row has them: with a zone (2024) or without (2023). `file` stays where it is."""
    at = file.tell()
    cells = file.readline(_LONGEST_LINE).decode("utf-8", "replace").split(",")
    file.seek(at)
    zoned = place < len(cells) and _ZONE.search(cells[place].strip())
    return pa.timestamp("ns", "UTC") if zoned else pa.timestamp("ns")


def _nanoseconds(name: str, times: npt.NDArray[np.float64], unit: Literal["s", "ms"]) -> IntArray:
    """Times of the file in whole ns."""
    wrong = ~(np.abs(times) <= _LATEST[unit])  # true for NaN too
    if wrong.any():
        index = int(np.argmax(wrong))
        raise ConfigError(f"{name} row {index + 1}: time is {times[index]} {unit}: correct or remove the row")
    return np.rint(times * _NS[unit]).astype(np.int64)


# --- JSON Lines -------------------------------------------------------------------------------------------------------


class _Line(BaseModel):
    """One request of JSON Lines."""

    timestamp: Annotated[float, Field(strict=True)]
    input_length: StrictInt
    output_length: StrictInt
    hash_ids: list[Annotated[int, Field(strict=True, ge=0, lt=2**63)]] = []


def _json_lines(file: IO[bytes], name: str, blocks: bool, unit: Literal["s", "ms"], block_tokens: int) -> _Columns:
    times, lengths, ids, counts = array("d"), array("i"), array("q"), array("q")
    while raw := file.readline(_LONGEST_LINE):
        if not raw.strip():
            continue
        where = f"{name} row {len(times) + 1}"
        if len(raw) == _LONGEST_LINE:
            raise ConfigError(f"{where} has more than {_LONGEST_LINE - 1} bytes: break it into lines")
        try:
            line = _Line.model_validate_json(raw.lstrip(codecs.BOM_UTF8))
            lengths.extend((line.input_length, line.output_length))
        except (ValidationError, OverflowError) as error:
            raise ConfigError(f"{where} {_reason(error)}: correct or remove the row") from None
        own = line.hash_ids if blocks else []
        expected = max(0, -(-line.input_length // (block_tokens or MOONCAKE_BLOCK)))
        # the last blocks of a prompt may have no ids where somebody says how large a block is
        if own and (len(own) > expected or (len(own) < expected and not block_tokens)):
            raise ConfigError(
                f"{where}: {len(own)} hash_ids but the input of {line.input_length} tokens has {expected} blocks of "
                f"{block_tokens or MOONCAKE_BLOCK}: set traffic.trace_block_tokens, or correct or remove the row"
            )
        times.append(line.timestamp)
        ids.extend(own)
        counts.append(len(own))
    inputs, outputs = np.array(lengths, dtype=np.int32).reshape(-1, 2).T
    return _Columns(
        format="mooncake",
        time_unit=unit,
        times_ns=_nanoseconds(name, np.array(times), unit),
        inputs=inputs,
        outputs=outputs,
        block_ids=np.array(ids, dtype=np.int64),
        block_counts=np.array(counts, dtype=np.int64),
    )


def _reason(error: ValidationError | OverflowError) -> str:
    if not isinstance(error, ValidationError):
        return "has a length of more than 31 bits"
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"]))
    return one_line(f"{where}: {first['msg']}" if where else first["msg"])
