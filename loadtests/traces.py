"""Published traces of LLM serving as columns: when each request came, its input and its output length.

Two formats are read as published, told apart by content and not by file name:

- Azure LLM inference traces (2023 and 2024), CSV: `TIMESTAMP,ContextTokens,GeneratedTokens`.
- Mooncake traces, JSON Lines: `timestamp` (ms), `input_length`, `output_length`; `hash_ids` is not used.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TextIO

import numpy as np
import numpy.typing as npt

from servers.config import ConfigError

IntArray = npt.NDArray[np.int64]
Row = tuple[int, str, int, int, int]  # line number, time as written, time in ns, input tokens, output tokens

_AZURE_HEADER = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
_AZURE_ROW = re.compile(
    r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?\s*,\s*(-?\d{1,18})\s*,\s*(-?\d{1,18})",
    re.ASCII,
)
_MOONCAKE_KEYS = ("timestamp", "input_length", "output_length")
_MAX_TOKENS = 2**31 - 1
_MAX_SPAN_S = 10 * 366 * 86_400


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """The requests of one trace in order of time: three read-only columns of equal length, at least one row.

    offset_ns (int64) counts from the trace's first request; input_tokens and output_tokens (int32) are 1 or more.
    """

    name: str
    format: Literal["azure", "mooncake"]
    offset_ns: IntArray
    input_tokens: npt.NDArray[np.int32]
    output_tokens: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.offset_ns)

    @property
    def duration_s(self) -> float:
        """Seconds from the first request to the last."""
        return float(self.offset_ns[-1]) / 1e9


def read_trace(path: str | Path) -> Trace:
    """The trace at `path`, read line by line into flat columns (16 bytes a request).

    Anything that is not as published raises ConfigError with the file, the line, the value and what to do: a
    malformed line, a length below 1, a time that goes back, an empty or missing file, an unknown format. Empty lines
    are passed over.
    """
    name = str(path)
    try:
        with Path(path).open(encoding="utf-8-sig") as lines:
            return _read(name, lines)
    except FileNotFoundError:
        raise ConfigError(
            f'trace "{name}" does not exist: give the path of an Azure CSV or a Mooncake JSON Lines file'
        ) from None
    except OSError as error:
        raise ConfigError(f'trace "{name}" cannot be read ({error.strerror}): give a readable file') from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f'trace "{name}" has byte 0x{error.object[error.start]:02x}, which is not UTF-8 text: unpack or convert it'
        ) from None


def _read(name: str, lines: TextIO) -> Trace:
    header = ""
    number = 0
    while not header:
        raw = lines.readline()
        if not raw:
            raise ConfigError(f'trace "{name}" is empty: give an Azure CSV or a Mooncake JSON Lines file')
        number += 1
        header = raw.strip()
    if [field.strip() for field in header.split(",")] == _AZURE_HEADER:
        return _columns(name, "azure", _azure_rows(name, lines, number))
    if header.startswith("{"):
        return _columns(name, "mooncake", _mooncake_rows(name, lines, number, header))
    raise ConfigError(
        f'{name} line {number} is "{_short(header)}", which is no known format: start an Azure CSV with '
        f'"{",".join(_AZURE_HEADER)}", or give JSON Lines with {", ".join(_MOONCAKE_KEYS)}'
    )


def _columns(name: str, form: Literal["azure", "mooncake"], rows: Iterator[Row]) -> Trace:
    offsets, inputs, outputs = array("q"), array("i"), array("i")
    first_ns = last_ns = 0
    last_text = ""
    for number, text, at_ns, input_tokens, output_tokens in rows:
        if not offsets:
            first_ns = last_ns = at_ns
        if at_ns < last_ns:
            raise ConfigError(
                f"{name} line {number}: time goes back from {last_text} to {text}: sort the trace by time"
            )
        if at_ns - first_ns > _MAX_SPAN_S * 1_000_000_000:
            raise ConfigError(
                f"{name} line {number}: time is {text}, more than 10 years after the first request: "
                "correct or remove the line"
            )
        for key, value in (("input", input_tokens), ("output", output_tokens)):
            if not 1 <= value <= _MAX_TOKENS:
                raise ConfigError(
                    f"{name} line {number}: {key} length is {value}: "
                    f"correct it to a value from 1 to {_MAX_TOKENS} or remove the line"
                )
        offsets.append(at_ns - first_ns)
        inputs.append(input_tokens)
        outputs.append(output_tokens)
        last_ns, last_text = at_ns, text
    if not offsets:
        raise ConfigError(f'trace "{name}" has a header but no request: give a trace with at least one')
    trace = Trace(
        name=name,
        format=form,
        offset_ns=np.frombuffer(offsets, dtype=np.int64),
        input_tokens=np.frombuffer(inputs, dtype=np.int32),
        output_tokens=np.frombuffer(outputs, dtype=np.int32),
    )
    for column in (trace.offset_ns, trace.input_tokens, trace.output_tokens):
        column.setflags(write=False)
    return trace


def _azure_rows(name: str, lines: TextIO, number: int) -> Iterator[Row]:
    second_text, second_ns = "", 0
    for number, raw in enumerate(lines, number + 1):  # noqa: B020  (counting goes on from the header)
        line = raw.strip()
        if not line:
            continue
        match = _AZURE_ROW.fullmatch(line)
        if match is None:
            raise _malformed(name, number, line, "YYYY-MM-DD HH:MM:SS.fffffff,INPUT,OUTPUT")
        second, fraction, zone, input_text, output_text = match.groups()
        if (key := second + (zone or "")) != second_text:
            # Neighbours mostly share their second, so the calendar is asked once a second and not once a row.
            try:
                moment = datetime.fromisoformat(key)
            except ValueError:
                raise _malformed(name, number, line, "a date and time that exist") from None
            second_text = key
            second_ns = round((moment if zone else moment.replace(tzinfo=UTC)).timestamp()) * 1_000_000_000
        at_ns = second_ns + int((fraction or "").ljust(9, "0"))
        yield number, line.split(",", 1)[0], at_ns, int(input_text), int(output_text)


def _mooncake_rows(name: str, lines: TextIO, number: int, first: str) -> Iterator[Row]:
    line = first
    while True:
        if line:
            yield _mooncake_row(name, number, line)
        raw = lines.readline()
        if not raw:
            return
        number += 1
        line = raw.strip()


def _mooncake_row(name: str, number: int, line: str) -> Row:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise _malformed(name, number, line, "one JSON object") from None
    if not isinstance(record, dict):
        raise _malformed(name, number, line, "one JSON object")
    for key in _MOONCAKE_KEYS:
        if key not in record:
            raise _malformed(name, number, line, f'the key "{key}"')
    at_ms, input_tokens, output_tokens = (record[key] for key in _MOONCAKE_KEYS)
    # 1e15 ms is past any calendar; the comparison is false for NaN too.
    if isinstance(at_ms, bool) or not isinstance(at_ms, int | float) or not abs(at_ms) <= 1e15:
        raise _malformed(name, number, line, "timestamp in milliseconds")
    for key, value in (("input_length", input_tokens), ("output_length", output_tokens)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise _malformed(name, number, line, f"a whole number of tokens as {key}")
    at_ns = at_ms * 1_000_000 if isinstance(at_ms, int) else round(at_ms * 1e6)
    return number, f"{at_ms} ms", at_ns, input_tokens, output_tokens


def _malformed(name: str, number: int, line: str, expected: str) -> ConfigError:
    return ConfigError(f'{name} line {number} is "{_short(line)}": expected {expected}: correct or remove the line')


def _short(text: str) -> str:
    shown = text if len(text) <= 80 else text[:77] + "..."
    # The message stays on one line and printable whatever the file holds.
    return "".join(char if char.isprintable() else "?" for char in shown)
