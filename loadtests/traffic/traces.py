"""Traces of LLM serving as columns: when each request came, its input and its output length, which prompts it shares.

Three formats are told apart by content and not by file name:

- Azure LLM inference traces (2023 and 2024), CSV: `TIMESTAMP,ContextTokens,GeneratedTokens`.
- Mooncake traces, JSON Lines: `timestamp` (ms), `input_length`, `output_length`, `hash_ids`.
- A plain CSV of one's own: `time_s,input_tokens,output_tokens`, in any order. Texts that are only to be embedded have
  no answer: there the last column may hold 0, or be left out.

A file is read line by line, and only the rows of the answer are kept: memory does not grow with the file.
"""

from __future__ import annotations

import json
import math
import random
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, partial
from itertools import chain, count
from pathlib import Path
from typing import Literal, NamedTuple, TextIO

import numpy as np
import numpy.typing as npt

from servers.fields import ConfigError

IntArray = npt.NDArray[np.int64]
Format = Literal["azure", "mooncake", "plain"]

BLOCK_TOKENS = 512  # of a prompt behind one hash id, as Mooncake publishes them

_AZURE_HEADER = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
_AZURE_ROW = re.compile(
    r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?\s*,\s*(-?\d{1,18})\s*,\s*(-?\d{1,18})",
    re.ASCII,
)
_MOONCAKE_KEYS = ("timestamp", "input_length", "output_length")
_PLAIN_HEADER = ["time_s", "input_tokens", "output_tokens"]
_PLAIN_TIME = re.compile(r"-?\d{1,12}(?:\.\d{1,9})?", re.ASCII)
_WHOLE = re.compile(r"-?\d{1,18}", re.ASCII)
_MAX_TOKENS = 2**31 - 1
_MAX_LINE = 1 << 24  # a file without line ends must not be read whole
_MAX_SPAN_S = 10 * 366 * 86_400
_KNOWN = "an Azure CSV, a Mooncake JSON Lines file or a CSV of " + ",".join(_PLAIN_HEADER)


class _Row(NamedTuple):
    time_text: str
    at_ns: int
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


class _MalformedError(Exception):
    """A line is not of its form. The message is what was expected."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """Requests of one trace in order of time: read-only columns of equal length, at least one row.

    offset_ns (int64) counts from the trace's first request; input_tokens (int32) are 1 or more, output_tokens (int32)
    too, or 0 where the trace was read without `answers`. Row
    k shares the leading BLOCK_TOKENS-token blocks of its prompt with every row that has the same leading ids among
    block_ids[block_start[k]:block_start[k + 1]]; what goes beyond its ids is its own.
    """

    name: str
    format: Format
    offset_ns: IntArray
    input_tokens: npt.NDArray[np.int32]
    output_tokens: npt.NDArray[np.int32]
    block_ids: IntArray
    block_start: IntArray
    rows_read: int

    def __len__(self) -> int:
        return len(self.offset_ns)

    @property
    def duration_s(self) -> float:
        """Seconds from the first request to the last that was read."""
        return float(self.offset_ns[-1]) / 1e9

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
) -> Trace:
    """The trace at `path`, read line by line.

    Kept are the rows from `start_s` on; reading ends with the first row at or after `end_s`, which is kept too and
    shows that the trace lasts that long (seconds count from the trace's first request). Where `answers` are of no use,
    as for embeddings, they may be 0, and a plain CSV may lack them. With `sample` above 0, that
    many of these rows are kept, drawn evenly by `seed`. If no row is in reach, the last one read is kept.

    Anything that is not as published raises ConfigError with the file, the line, the value and what to do: a
    malformed line, a length below 1, a time that goes back, an empty or missing file, an unknown format. Empty lines
    are passed over.
    """
    name = str(path)
    try:
        with Path(path).open(encoding="utf-8-sig") as lines:
            form, rows = _rows(name, lines, answers)
            kept = _Reservoir(start_s=start_s, end_s=end_s, sample=sample, seed=seed)
            return _columns(name, form, rows, kept, answers)
    except FileNotFoundError:
        raise ConfigError(f'trace "{name}" does not exist: give the path of {_KNOWN}') from None
    except OSError as error:
        raise ConfigError(f'trace "{name}" cannot be read ({error.strerror}): give a readable file') from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f'trace "{name}" has byte 0x{error.object[error.start]:02x}, which is not UTF-8 text: unpack or convert it'
        ) from None


def _rows(name: str, source: TextIO, answers: bool) -> tuple[Format, Iterator[tuple[int, _Row]]]:
    lines = _numbered(name, source)
    number, header = next(lines, (0, ""))
    if not header:
        raise ConfigError(f'trace "{name}" is empty: give {_KNOWN}')
    names = [field.strip() for field in header.split(",")]
    if names == _AZURE_HEADER:
        return "azure", _parsed(name, lines, _azure_row)
    lengths_alone = _PLAIN_HEADER[:2]
    if answers and sorted(names) == lengths_alone[::-1]:
        raise ConfigError(
            f'{name} line {number} is "{_short(header)}", which has no answers: add the column output_tokens, or set '
            'model.task = "embed", for which none are needed'
        )
    for plain in (_PLAIN_HEADER, lengths_alone):
        if sorted(names) == sorted(plain):
            return "plain", _parsed(name, lines, partial(_plain_row, {key: names.index(key) for key in plain}))
    if header.startswith("{"):
        return "mooncake", _parsed(name, chain([(number, header)], lines), _mooncake_row)
    raise ConfigError(
        f'{name} line {number} is "{_short(header)}", which is no known format: start an Azure CSV with '
        f'"{",".join(_AZURE_HEADER)}" and a CSV of your own with "{",".join(_PLAIN_HEADER)}", '
        f"or give JSON Lines with {', '.join(_MOONCAKE_KEYS)}"
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


def _columns(name: str, form: Format, rows: Iterator[tuple[int, _Row]], kept: _Reservoir, answers: bool) -> Trace:
    first_ns = last_ns = count = 0
    last_text = ""
    for number, row in rows:
        if not count:
            first_ns = last_ns = row.at_ns
        count += 1
        if row.at_ns < last_ns:
            raise ConfigError(
                f"{name} line {number}: time goes back from {last_text} to {row.time_text}: sort the trace by time"
            )
        if row.at_ns - first_ns > _MAX_SPAN_S * 1_000_000_000:
            raise ConfigError(
                f"{name} line {number}: time is {row.time_text}, more than 10 years after the first request: "
                "correct or remove the line"
            )
        for key, value in (("input", row.input_tokens), ("output", row.output_tokens)):
            least = 0 if key == "output" and not answers else 1
            if not least <= value <= _MAX_TOKENS:
                raise ConfigError(
                    f"{name} line {number}: {key} length is {value}: "
                    f"correct it to a value from {least} to {_MAX_TOKENS} or remove the line"
                )
        if len(row.blocks) > -(-row.input_tokens // BLOCK_TOKENS):
            raise ConfigError(
                f"{name} line {number}: {len(row.blocks)} hash_ids but the input of {row.input_tokens} tokens has "
                f"{-(-row.input_tokens // BLOCK_TOKENS)} blocks of {BLOCK_TOKENS}: correct or remove the line"
            )
        kept.add(row.at_ns - first_ns, row)
        if kept.done:
            break
        last_ns, last_text = row.at_ns, row.time_text
    if not count:
        raise ConfigError(f'trace "{name}" has a header but no request: give a trace with at least one')
    kept.end()
    columns = np.frombuffer(kept.columns, dtype=np.int64).reshape(-1, 3)
    order = np.argsort(columns[:, 0], kind="stable")
    offset_ns, inputs, outputs = columns[order].T
    sizes = np.array([len(blocks) for blocks in kept.blocks], dtype=np.int64)[order]
    trace = Trace(
        name=name,
        format=form,
        offset_ns=offset_ns.copy(),
        input_tokens=inputs.astype(np.int32),
        output_tokens=outputs.astype(np.int32),
        block_ids=np.fromiter(
            chain.from_iterable(kept.blocks[index] for index in order), dtype=np.int64, count=int(sizes.sum())
        ),
        block_start=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        rows_read=count,
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


def _parsed(name: str, lines: Iterable[tuple[int, str]], parse: Callable[[str], _Row]) -> Iterator[tuple[int, _Row]]:
    for number, line in lines:
        try:
            row = parse(line)
        except _MalformedError as expected:
            raise ConfigError(
                f'{name} line {number} is "{_short(line)}": expected {expected}: correct or remove the line'
            ) from None
        yield number, row


def _azure_row(line: str) -> _Row:
    match = _AZURE_ROW.fullmatch(line)
    if match is None:
        raise _MalformedError("YYYY-MM-DD HH:MM:SS.fffffff,INPUT,OUTPUT")
    second, fraction, zone, input_text, output_text = match.groups()
    at_ns = _second_ns(second, zone or "+00:00") + int((fraction or "").ljust(9, "0"))
    return _Row(line.split(",", 1)[0], at_ns, int(input_text), int(output_text))


@lru_cache(maxsize=1)  # neighbours mostly share their second, so the date is parsed once a second and not once a row
def _second_ns(second: str, zone: str) -> int:
    try:
        return round(datetime.fromisoformat(second + zone).timestamp()) * 1_000_000_000
    except ValueError:
        raise _MalformedError("a date and time that exist") from None


def _plain_row(places: Mapping[str, int], line: str) -> _Row:
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != len(places):
        raise _MalformedError(f"{len(places)} values: {', '.join(places)}")
    time_text, *lengths = (cells[place] for place in places.values())
    if not _PLAIN_TIME.fullmatch(time_text):
        raise _MalformedError("time_s in seconds, such as 12.5")
    for key, text in zip([*places][1:], lengths, strict=True):
        if not _WHOLE.fullmatch(text):
            raise _MalformedError(f"a whole number of tokens as {key}")
    whole, _, fraction = time_text.lstrip("-").partition(".")
    size_ns = int(whole) * 1_000_000_000 + int(fraction.ljust(9, "0"))
    at_ns = -size_ns if time_text.startswith("-") else size_ns
    return _Row(f"{time_text} s", at_ns, int(lengths[0]), int(lengths[1]) if len(lengths) > 1 else 0)


def _mooncake_row(line: str) -> _Row:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise _MalformedError("one JSON object")
    for key in _MOONCAKE_KEYS:
        if key not in record:
            raise _MalformedError(f'the key "{key}"')
    at_ms, input_tokens, output_tokens = (record[key] for key in _MOONCAKE_KEYS)
    # 1e15 ms is past any calendar; the comparison is false for NaN too.
    if type(at_ms) not in (int, float) or not abs(at_ms) <= 1e15:
        raise _MalformedError("timestamp in milliseconds")
    for key in _MOONCAKE_KEYS[1:]:
        if type(record[key]) is not int:
            raise _MalformedError(f"a whole number of tokens as {key}")
    blocks = record.get("hash_ids", [])
    if not isinstance(blocks, list) or not all(type(item) is int and 0 <= item < 2**62 for item in blocks):
        raise _MalformedError("hash_ids as a list of whole numbers from 0")
    at_ns = at_ms * 1_000_000 if isinstance(at_ms, int) else round(at_ms * 1e6)
    return _Row(f"{at_ms} ms", at_ns, input_tokens, output_tokens, tuple(blocks))


def _short(text: str) -> str:
    shown = text if len(text) <= 80 else text[:77] + "..."
    # The message stays on one line and printable whatever the file holds.
    return "".join(char if char.isprintable() else "?" for char in shown)
