"""A result file of another load tool, recognised by what it holds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis.imports import aiperf, guidellm, vllm
from analysis.imports.result import Result, chosen
from analysis.records.documents import content_of, parse_json
from analysis.records.plain_values import number
from analysis.records.tables import RecordError, one_line

LARGEST_BYTES = 1 << 30
READ = "vLLM bench serve, AIPerf and GuideLLM"
_USUAL = ("profile_export", "benchmarks")  # what tools call every file


def part_of(path: Path) -> tuple[Path, int | None]:
    """Return the file, and which of its results is meant: FILE#2 is the second of FILE."""
    match = re.fullmatch(r"(.+)#([1-9]\d{0,5})", path.name)
    if match is None or path.exists():
        return path, None
    return path.with_name(match[1]), int(match[2])


def name_of(path: Path) -> str:
    """Return the name of the run whose result lies there: of its file, or of its folder if the tool calls every file
    so."""
    file, part = part_of(path)
    folder = file.resolve().parent.name
    name = folder if folder and file.stem in _USUAL else file.stem
    return name if part is None else f"{name}#{part}"


def read_result(path: Path) -> Result:
    """Return what the file holds. Raises RecordError, which names it, for one that cannot be read."""
    file, part = part_of(path)
    try:
        if (size := file.stat().st_size) > LARGEST_BYTES:
            raise RecordError(f"has {size >> 20} MiB, limit {LARGEST_BYTES >> 20}: run it again with fewer requests")
        result = _result(file, _documents(file.read_text(encoding="utf-8")), part)
    except OSError as error:
        raise RecordError(f"{path} cannot be read ({error.strerror}): give a result file of {READ}") from None
    except UnicodeDecodeError:
        raise RecordError(f"{path} is no text: give a result file of {READ}") from None
    except RecordError as error:
        raise RecordError(f"{path} {error}") from None
    if not result.requests.num_rows:
        raise RecordError(f"{path} holds no request: run it again")
    return result


def _result(path: Path, documents: Sequence[Any], part: int | None) -> Result:
    only = documents[0] if len(documents) == 1 else None
    table = only if isinstance(only, dict) else {}
    if documents and all(isinstance(item, dict) and vllm.is_vllm(item) for item in documents):
        loads = [f"{number(item.get('request_rate')) or 'inf'} requests/s" for item in documents]
        return vllm.result_of(chosen(documents, part, loads), written_s=path.stat().st_mtime)
    if guidellm.is_guidellm(table):
        return guidellm.result_of(table, part)
    if part is not None:
        raise RecordError(f"holds no result #{part}: leave the number out")
    if aiperf.is_aiperf(documents):
        return aiperf.result_of(documents, content_of(aiperf.summary_path(path)))
    if aiperf.SUMMARY in table:
        raise RecordError("is a summary without its requests: give profile_export.jsonl of AIPerf")
    raise RecordError(f"is no result file of {READ}")


def _documents(text: str) -> list[Any]:
    """Return the values of JSON in the text, one or one a line."""
    try:
        return [parse_json(text)]
    except ValueError as error:
        whole = one_line(error)
    try:
        return [parse_json(line) for line in text.split("\n") if line.strip()]
    except ValueError:
        raise RecordError(f"is no whole JSON ({whole}): copy it again, or run it again") from None
