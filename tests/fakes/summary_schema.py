"""The published schema of summary.json, and a stricter one of it: what it does not describe is an error."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema_rs import Draft202012Validator as FastValidator

from analysis.summary.summary import SCHEMA

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "schema"
PUBLISHED: dict[str, Any] = json.loads((FOLDER / f"summary-{SCHEMA}.schema.json").read_text(encoding="utf-8"))


def closed(schema: Any) -> Any:
    """Return the schema with every object closed that is not declared open, and every list of examples complete."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: closed(value) for key, value in schema.items()}
    if "required" in schema:
        strict.setdefault("additionalProperties", False)
    if "examples" in schema:
        strict["enum"] = schema["examples"]
    return strict


def faults(summary: Mapping[str, Any], schema: Any = PUBLISHED) -> Iterator[str]:
    """Yield what of the summary the closed schema does not describe, at most ten."""
    for _, error in zip(range(10), Draft202012Validator(closed(schema)).iter_errors(summary), strict=False):
        yield f"{error.json_path}: {error.message[:300]}"


# Thousands of summaries are held to it: the fast one says whether, the other one what is wrong.
_CLOSED = FastValidator(closed(PUBLISHED))


def hold(summary: Mapping[str, Any], where: str) -> None:
    if not _CLOSED.is_valid(summary):
        raise AssertionError("\n".join([f"{where} is not as docs/schema describes it:", *faults(summary)]))


def hold_file(path: Path) -> None:
    """Check the summary in the file. A test damages files on purpose: one that cannot be read is passed over."""
    with suppress(OSError, ValueError):
        hold(json.loads(path.read_text(encoding="utf-8")), str(path))
