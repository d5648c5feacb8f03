"""A result file of another load tool, recognised by what it holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis.imports import aiperf, guidellm, vllm
from analysis.imports.result import Result
from analysis.records.documents import content_of, parse_json
from analysis.records.tables import RecordError, one_line

LARGEST_BYTES = 1 << 30
READ = "vLLM bench serve, AIPerf and GuideLLM"
_USUAL = ("profile_export", "benchmarks")  # what tools call every file


def name_of(path: Path) -> str:
    """Return the name of the run whose result lies there: of its file, or of its folder if the tool calls every file
    so."""
    folder = path.resolve().parent.name
    return folder if folder and path.stem in _USUAL else path.stem


def read_result(path: Path) -> Result:
    """Return what the file holds. Raises RecordError, which names it, for one that cannot be read."""
    try:
        if (size := path.stat().st_size) > LARGEST_BYTES:
            raise RecordError(f"has {size >> 20} MiB, limit {LARGEST_BYTES >> 20}: run it again with fewer requests")
        result = _result(path, _documents(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise RecordError(f"{path} cannot be read ({error.strerror}): give a result file of {READ}") from None
    except UnicodeDecodeError:
        raise RecordError(f"{path} is no text: give a result file of {READ}") from None
    except RecordError as error:
        raise RecordError(f"{path} {error}") from None
    if not result.requests.num_rows:
        raise RecordError(f"{path} holds no request: run it again")
    return result


def _result(path: Path, documents: Sequence[Any]) -> Result:
    only = documents[0] if len(documents) == 1 else None
    table = only if isinstance(only, dict) else {}
    if vllm.is_vllm(table):
        return vllm.result_of(table)
    if len(documents) > 1 and all(isinstance(item, dict) and vllm.is_vllm(item) for item in documents):
        raise RecordError(f"holds {len(documents)} results: give a file of one, written without --append-result")
    if guidellm.is_guidellm(table):
        return guidellm.result_of(table)
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
