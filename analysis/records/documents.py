"""The small files that describe a run: JSON and TOML with a checksum of their own.

A JSON document holds the CRC-32 of the rest of it under "crc32"; a TOML document ends with a comment that holds the
CRC-32 of the text above, or "# edited" after a change on purpose. Without either, nothing vouches for the content:
another tool may have written it.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.records.shallow_toml import DEEPEST, parse

LARGEST_BYTES = 64 << 20
LARGEST_TOML_BYTES = 4 << 20

_KEY = "crc32"
_TOML_END = re.compile(r"\n# crc32 ([0-9a-f]{8})\s*\Z")
_EDITED = "# edited"


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """What a file holds. `problem` is what is wrong with it, as what follows its name, or empty."""

    content: dict[str, Any] | None  # None where it cannot be read
    stated: bool  # it has a checksum, or says that it was edited
    problem: str = ""


def write_document(path: Path, content: Mapping[str, Any], *, indent: int | None = None) -> None:
    """`path` holds `content` and its checksum as JSON; a reader sees the old content or the new, never a part."""
    write_json(path, vouched(content), indent=indent)


def write_json(path: Path, content: Any, **style: Any) -> None:
    """`path` holds `content` as JSON in the `style` of json.dumps; a reader sees the old content or the new, never a
    part."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, **style) + "\n", encoding="utf-8")
    partial.replace(path)


def vouched(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content with its checksum."""
    written = {str(key): value for key, value in content.items() if key != _KEY}
    return {**written, _KEY: _crc32(parse_json(json.dumps(written)))}


def vouched_toml(text: str) -> str:
    """The text with its checksum as a comment at the end."""
    return f"{text.rstrip()}\n# crc32 {zlib.crc32(text.rstrip().encode()):08x}\n"


def parse_json(text: str) -> Any:
    """The value in `text`. NaN and infinities are null, since no other reader takes them.

    Raises ValueError for what is no JSON, no text that can be written again, or deeper than DEEPEST.
    """
    try:
        value = json.loads(text, parse_constant=lambda _: None)
    except RecursionError:
        raise ValueError(f"it is more than {DEEPEST} levels deep") from None
    if text.count("[") + text.count("{") > DEEPEST and not _is_flat(value, DEEPEST):
        raise ValueError(f"it is more than {DEEPEST} levels deep")
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()  # half a character is none
    return value


def read_document(path: Path) -> Document | None:
    """What the JSON file at `path` holds; None where there is no such file. What was changed since is not read."""
    if not path.exists():
        return None
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise ValueError(f"it has more than {LARGEST_BYTES >> 20} MiB")
        content = parse_json(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or not _is_small(content):
            raise ValueError("it is no table, or a whole number has more than 64 bits")
    except (OSError, ValueError):
        return Document(content=None, stated=False, problem="is not readable JSON")
    stated = _KEY in content
    if stated and content.pop(_KEY) != _crc32(content):
        return Document(content=None, stated=True, problem="is not as it was written")
    return Document(content=content, stated=stated)


def read_rows(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The tables in the lines of the JSON Lines file at `path`, none where there is no such file, and how many whole
    lines hold none. A last line without its end was being written when the run was cut off."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError:
        return [], 0
    rows: list[dict[str, Any]] = []
    bad = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line.decode("utf-8"))
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        elif number < len(lines):
            bad += 1
    return rows, bad


def content_of(path: Path) -> dict[str, Any]:
    """What the JSON file at `path` holds, empty where there is none that can be believed."""
    document = read_document(path)
    return (document.content if document is not None else None) or {}


def read_toml(path: Path) -> Document | None:
    """What the TOML file at `path` holds; None where there is no such file.

    What was changed since is read all the same, since people do that. Raises ValueError and OSError where it cannot be.
    """
    if not path.exists():
        return None
    if path.stat().st_size > LARGEST_TOML_BYTES:
        raise ValueError(f"it has more than {LARGEST_TOML_BYTES >> 20} MiB")
    text = path.read_text(encoding="utf-8")
    content = parse_toml(text)
    if text.rstrip().endswith(f"\n{_EDITED}"):
        return Document(content=content, stated=True)
    end = _TOML_END.search(text)
    if end is None:
        return Document(content=content, stated=False)
    same = zlib.crc32(text[: end.start()].rstrip().encode()) == int(end[1], 16)
    problem = "" if same else f'was changed after it was written (if that was meant, make its last line "{_EDITED}")'
    return Document(content=content, stated=True, problem=problem)


def parse_toml(text: str) -> dict[str, Any]:
    """The table in `text`. Raises ValueError for what is no TOML or so deep that reading it would take minutes."""
    table = parse(text)
    if not _is_flat(table, DEEPEST):
        raise ValueError(f"it is more than {DEEPEST} levels deep")
    if not _is_small(table):
        raise ValueError("a whole number has more than 64 bits")
    return table


def _crc32(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x}"


def _is_flat(value: Any, levels: int) -> bool:
    if not isinstance(value, (dict, list)):
        return True
    return levels > 0 and all(
        _is_flat(item, levels - 1) for item in (value.values() if isinstance(value, dict) else value)
    )


def _is_small(value: Any) -> bool:
    """Whether all whole numbers in the value have at most 64 bits, as every other reader of them expects."""
    if isinstance(value, (dict, list)):
        return all(_is_small(item) for item in (value.values() if isinstance(value, dict) else value))
    return not isinstance(value, int) or -(2**63) <= value < 2**64
