"""The small files that describe a run: JSON and TOML with a checksum.

A JSON document holds the CRC-32 of its other content under "crc32"; one of another tool has none. A TOML document ends
with a comment that holds the CRC-32 of the text above, or with EDITED: a file that was cut off has neither.
"""

from __future__ import annotations

import json
import re
import tomllib
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

DEEPEST = 32  # levels of values; no setting lies deeper
EDITED = "# edited"  # the last line of settings that were written or changed by hand

_KEY = "crc32"
_BETWEEN_KEYS = re.compile(r"[\s=\[\]{},]+")


def write_document(path: Path, content: Mapping[str, Any], *, indent: int | None = None) -> None:
    """Write `content` and its checksum to `path` as JSON; a reader sees the old content or the new, never a part."""
    write_json(path, with_checksum(content), indent=indent)


def write_json(path: Path, content: Any, **style: Any) -> None:
    """Write `content` to `path` in the `style` of json.dumps; a reader sees the old content or the new."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, **style) + "\n", encoding="utf-8")
    partial.replace(path)


def with_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content with its checksum."""
    written = {str(key): value for key, value in content.items() if key != _KEY}
    return {**written, _KEY: _crc32(parse_json(json.dumps(written)))}


def toml_with_checksum(text: str) -> str:
    """Return the text with its checksum as a comment at the end."""
    return f"{text.rstrip()}\n{_checksum_line(text)}\n"


def _checksum_line(text: str) -> str:
    return f"# crc32 {zlib.crc32(text.rstrip().encode()):08x}"


def _crc32(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x}"


def read_document(path: Path) -> tuple[dict[str, Any] | None, str]:
    """Return what the JSON file at `path` holds, and what is wrong with it in words that follow its name.

    A file that is missing, damaged or changed holds None.
    """
    if not path.exists():
        return None, ""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("no table")
    except (OSError, ValueError):
        return None, "is not readable JSON"
    if _KEY in content and content.pop(_KEY) != _crc32(content):
        return None, "is not as it was written"
    return content, ""


def content_of(path: Path) -> dict[str, Any]:
    """Return what the JSON file at `path` holds; empty if it is missing, damaged or changed."""
    return read_document(path)[0] or {}


def parse_json(text: str) -> Any:
    """Return the value in `text`, with null for NaN and infinities.

    Raises ValueError for what is no JSON, cannot be written again as text, is deeper than DEEPEST or holds a whole
    number of more than 64 bits, which other readers do not take.
    """
    try:
        value = json.loads(text, parse_constant=lambda _: None)
    except RecursionError:
        raise ValueError(f"it is more than {DEEPEST} levels deep") from None
    _check(value)
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()  # raises for half a surrogate pair
    return value


def read_rows(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the tables in the lines of the file at `path`, and how many whole lines hold none; nothing without it."""
    try:
        with path.open("rb") as file:
            return parse_lines(file)[:2]
    except OSError:
        return [], 0


def parse_lines(lines: Iterable[bytes]) -> tuple[list[dict[str, Any]], int, bool]:
    """Return the tables in the lines, how many whole lines hold none, and whether the last was cut off."""
    rows: list[dict[str, Any]] = []
    bad = 0
    for line in filter(bytes.strip, lines):
        try:
            row = parse_json(line.decode("utf-8"))
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        elif line.endswith(b"\n"):
            bad += 1
        else:
            return rows, bad, True
    return rows, bad, False


def read_toml(path: Path) -> dict[str, Any]:
    """Return what the TOML file at `path` holds; a missing file is empty.

    Raises ValueError and OSError if it cannot be read, or may lack a part.
    """
    if not path.exists():
        return {}
    text = path.read_text(encoding="utf-8")
    content = parse_toml(text)
    above, _, last = text.rstrip().rpartition("\n")
    if last not in (EDITED, _checksum_line(above)):
        raise ValueError("its last line is not the checksum of the lines above, so a part may be lost or changed")
    return content


def parse_toml(text: str) -> dict[str, Any]:
    """Return the table in `text`. Raises ValueError for what is no TOML, is deeper than DEEPEST or holds a whole number
    of more than 64 bits."""
    # The parser takes time in the square of a key's depth, so a hostile key is refused before it.
    words = _BETWEEN_KEYS.split(text.replace(" ", "").replace("\t", ""))
    parts = max(sum(1 for part in word.split(".") if part) for word in words)
    if parts > DEEPEST:
        raise ValueError(f"a key has {parts} parts; the limit is {DEEPEST}: no setting lies so deep")
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = str(error)  # may name a key of any length
        raise ValueError(f"not valid TOML: {line if len(line) <= 500 else f'{line[:400]} ... {line[-90:]}'}") from None
    except RecursionError:
        raise ValueError(f"values are nested too deep; the limit is {DEEPEST}: no setting lies so deep") from None
    except ValueError as error:  # a number of more than 4,300 digits
        raise ValueError(f"a value cannot be read: {error}") from None
    _check(content)
    return content


def _check(value: Any, level: int = 0) -> None:
    """Raise ValueError for values more than DEEPEST levels deep, and for a whole number of more than 64 bits."""
    if level > DEEPEST:
        raise ValueError(f"it is more than {DEEPEST} levels deep")
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise ValueError("a whole number has more than 64 bits")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check(item, level + 1)
