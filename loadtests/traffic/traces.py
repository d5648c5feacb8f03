"""Traces of LLM serving as columns: when each request came, its input and its output length, which prompts it shares.

The content of a file decides its format; its name does not:

- CSV with the columns `TIMESTAMP,ContextTokens,GeneratedTokens`, as the Azure LLM inference traces of 2023 and 2024
  have them (github.com/Azure/AzurePublicDataset).
- JSON Lines with `timestamp` (ms), `input_length`, `output_length` and mostly `hash_ids`, one for each block of 512
  tokens of the prompt, as Mooncake's (github.com/kvcache-ai/Mooncake).
"""

from __future__ import annotations

import codecs
import re
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as arrow_csv
from pydantic import BaseModel, Field, ValidationError

from tailgate.analysis.arrays import Ints
from tailgate.analysis.wording import counted
from tailgate.servers.complaint import ConfigError, one_line

BLOCK_TOKENS = 512

_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_LATEST_MS = 9e12  # the year 2255, and within 64 bits of ns
_ZONE = re.compile(r"(Z|[+-]\d\d:?\d\d)$")
_LONGEST_LINE = 1 << 24  # a file without line ends must not be read whole
_SHOWN = 80  # characters of a header in a message
KNOWN = f"a CSV of {','.join(_AZURE)}, or JSON Lines with timestamp, input_length, output_length"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """Requests of one trace in order of time: columns of equal length, at least one row.

    offset_ns counts from the first request. A row of `blocks` lists ids: its prompt shares the leading blocks,
    `BLOCK_TOKENS` each, with every row that has the same leading ids. `failed` rows have no answer and are left out.
    """

    name: str
    format: str
    offset_ns: Ints
    input_tokens: npt.NDArray[np.int32]
    output_tokens: npt.NDArray[np.int32]
    blocks: pa.ListArray
    failed: int

    def __len__(self) -> int:
        return len(self.offset_ns)

    @property
    def account(self) -> str:
        """What was read, in one line."""
        failed = f"; left out as failed, without an output token: {self.failed:,}" if self.failed else ""
        requests = counted(len(self), "request", "{:,}".format)
        return f"{self.name}: {requests} in {self.offset_ns[-1] / 1e9:,.6g} s, read as {self.format}{failed}"


def read_trace(path: str | Path, *, answers: bool = True, blocks: bool = True) -> Trace:
    """Read the trace at `path`. Anything that is not as published raises ConfigError with file, row, value and remedy.

    Rows without an answer have failed and are left out. Where `answers` are of no use, as for embeddings, they may be
    0; where `blocks` are of none, they are not read.
    """
    name = str(path)
    try:
        with Path(path).open("rb") as file:
            header = _first_line(file, name)
            if header.startswith("{"):
                file.seek(0)
                return _checked(name, "mooncake", _json_lines(file, name, blocks), answers)
            return _checked(name, "azure", _csv(file, name, header), answers)
    except OSError as error:
        raise ConfigError(
            f'trace "{name}" cannot be read ({error.strerror}): give the path of a readable file'
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f'trace "{name}" is not UTF-8 text ({error}): unpack or convert it') from None


def _first_line(file: IO[bytes], name: str) -> str:
    """Return the first non-empty line."""
    while raw := file.readline(_LONGEST_LINE):
        if line := raw.decode("utf-8-sig").strip():
            return line
    raise ConfigError(f'trace "{name}" is empty: give {KNOWN}')


def _checked(name: str, form: str, read: pa.Table, answers: bool) -> Trace:
    """Return the trace of the rows that have an answer. Raises ConfigError for the first row that cannot be."""
    kept = np.ones(len(read), dtype=np.bool_)
    if answers:
        kept = read["outputs"].to_numpy() != 0
    if not kept.any():
        what = f"no request with an answer, and {len(kept)} without"
        raise ConfigError(f'trace "{name}" has {what}: give a trace with at least one')
    rows = read.filter(pa.array(kept))
    times_ns, inputs, outputs = (rows[column].to_numpy() for column in ("time_ns", "inputs", "outputs"))

    def refuse_first(wrong: npt.NDArray[np.bool_], what: str, values: npt.NDArray[Any], remedy: str) -> None:
        if wrong.any():
            index = int(np.argmax(wrong))
            row = int(np.flatnonzero(kept)[index]) + 1
            raise ConfigError(f"{name} row {row}: {what.format(values[index])}: {remedy}")

    gone_back = np.diff(times_ns, prepend=times_ns[0])
    refuse_first(gone_back < 0, "time goes back by {} ns", -gone_back, "sort the trace by time")
    offset_ns = times_ns - times_ns[0]
    for what, lengths, least in (("input", inputs, 1), ("output", outputs, 1 if answers else 0)):
        refuse_first(lengths < least, what + " length is {}", lengths, f"give {least} or more, or remove the row")
    return Trace(
        name=name,
        format=form,
        offset_ns=offset_ns,
        input_tokens=inputs,
        output_tokens=outputs,
        blocks=rows["blocks"].combine_chunks(),
        failed=int((~kept).sum()),
    )


# --- CSV --------------------------------------------------------------------------------------------------------------


def _csv(file: IO[bytes], name: str, header: str) -> pa.Table:
    names = [field.strip() for field in header.split(",")]
    if not set(_AZURE) <= set(names):
        raise ConfigError(f'{name} begins with "{one_line(header[:_SHOWN])}", which is no known format: give {KNOWN}')
    types = dict(zip(_AZURE, (_date_type(file, names.index(_AZURE[0])), pa.int32(), pa.int32()), strict=True))
    try:
        table = arrow_csv.read_csv(
            file,
            read_options=arrow_csv.ReadOptions(column_names=names, use_threads=False, block_size=_LONGEST_LINE),
            convert_options=arrow_csv.ConvertOptions(column_types=types, include_columns=list(_AZURE)),
        )
    except pa.ArrowInvalid as error:
        raise ConfigError(f"{name}: {one_line(str(error))}: correct or remove the row") from None
    for column in _AZURE:
        if table[column].null_count:
            row = table[column].is_null().index(True).as_py() + 1
            raise ConfigError(f"{name} row {row} has no {column}: correct or remove the row")
    times, inputs, outputs = (table[column] for column in _AZURE)
    blocks = pa.nulls(len(table), pa.list_(pa.int64()))
    return pa.table({"time_ns": times.cast(pa.int64()), "inputs": inputs, "outputs": outputs, "blocks": blocks})


def _date_type(file: IO[bytes], place: int) -> Any:
    """Return the type of dates in the first row: with a zone (2024) or without (2023). `file` stays where it is."""
    at = file.tell()
    cells = file.readline(_LONGEST_LINE).decode("utf-8", "replace").split(",")
    file.seek(at)
    zoned = place < len(cells) and _ZONE.search(cells[place].strip())
    return pa.timestamp("ns", "UTC") if zoned else pa.timestamp("ns")


# --- JSON Lines -------------------------------------------------------------------------------------------------------


_Length = Annotated[int, Field(strict=True, ge=0, lt=2**31)]


class _Line(BaseModel):
    """One request of JSON Lines."""

    timestamp: Annotated[float, Field(strict=True, ge=-_LATEST_MS, le=_LATEST_MS)]
    input_length: _Length
    output_length: _Length
    hash_ids: list[Annotated[int, Field(strict=True, ge=0, lt=2**63)]] = []


def _json_lines(file: IO[bytes], name: str, blocks: bool) -> pa.Table:
    times, lengths, ids, ends = array("d"), array("i"), array("q"), array("i", [0])
    while raw := file.readline(_LONGEST_LINE):
        if not raw.strip():
            continue
        where = f"{name} row {len(times) + 1}"
        try:
            line = _Line.model_validate_json(raw.lstrip(codecs.BOM_UTF8))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = "".join(f"{part}: " for part in first["loc"][:1])
            raise ConfigError(f"{where} {key}{one_line(first['msg'])}: correct or remove the row") from None
        own = line.hash_ids if blocks else []
        expected = max(0, -(-line.input_length // BLOCK_TOKENS))
        if own and len(own) != expected:
            raise ConfigError(
                f"{where}: {len(own)} hash_ids but the input of {line.input_length} tokens has {expected} blocks of "
                f"{BLOCK_TOKENS}: give one for each block, or leave hash_ids out"
            )
        times.append(line.timestamp)
        lengths.extend((line.input_length, line.output_length))
        ids.extend(own)
        ends.append(len(ids))
    inputs, outputs = np.array(lengths, dtype=np.int32).reshape(-1, 2).T
    return pa.table(
        {
            "time_ns": np.rint(np.array(times) * 1e6).astype(np.int64),
            "inputs": np.ascontiguousarray(inputs),
            "outputs": np.ascontiguousarray(outputs),
            "blocks": pa.ListArray.from_arrays(np.array(ends), np.array(ids)),
        }
    )
