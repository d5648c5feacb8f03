"""A run directory made of result files of vLLM's benchmark: each is a trial of one arm, as each was a run by itself."""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import tomli_w

from analysis.imports.vllm import TOOL, Result, is_vllm, result_of
from analysis.records.documents import parse_json, write_json
from analysis.records.schemas import REQUESTS
from analysis.records.tables import RecordError, one_line

DESIGN = "separate"

Named = tuple[str, Path]
"""An arm, and a file of it."""


def read_result(path: Path) -> Result:
    """Return what the file holds. Raises RecordError, which names it, for one that cannot be read."""
    try:
        result = _result(_documents(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise RecordError(f"{path} cannot be read ({error.strerror}): give a result file of {TOOL}") from None
    except UnicodeDecodeError:
        raise RecordError(f"{path} is no text: give a result file of {TOOL}") from None
    except RecordError as error:
        raise RecordError(f"{path} {error}") from None
    if not result.requests.num_rows:
        raise RecordError(f"{path} holds no request: run it again")
    return result


def _result(documents: Sequence[Any]) -> Result:
    found = [item for item in documents if isinstance(item, dict) and is_vllm(item)]
    if not found or len(found) < len(documents):
        raise RecordError(f"is no result file of {TOOL}")
    if len(found) > 1:
        raise RecordError(f"holds {len(found)} results: give a file of one, written without --append-result")
    return result_of(found[0])


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


def write_run(folder: Path, files: Sequence[Named]) -> None:
    """Write the files as a run to `folder`, which is empty or not there. The first arm is the control.

    Raises RecordError for a file that cannot be read, and for files of another load than the first.
    """
    contents = checksums(files)
    for place, content in enumerate(contents):
        if (same := contents.index(content)) < place:
            raise RecordError(f"{files[same][1]} and {files[place][1]} hold the same run: give each run once")
    arms = list(dict.fromkeys(arm for arm, _ in files))
    results = [read_result(path) for _, path in files]
    first = results[0]
    for (_, path), result in zip(files, results, strict=True):
        _check_alike(files[0][1], first, path, result)
    experiment = {
        "name": folder.name,
        "compare_models": True,  # two servers were named to be compared
        "arms": [{"name": arm, "kind": "openai", "control": arm == arms[0]} for arm in arms],
        "traffic": {"design": DESIGN, **first.load},
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as partial:
        made = Path(partial) / "run"
        for number, ((arm, path), result) in enumerate(zip(files, results, strict=True), start=1):
            _write_trial(made / f"trial-{number:02d}", number, arm, path, result)
        (made / "experiment.toml").write_text(tomli_w.dumps(experiment), encoding="utf-8")
        made.replace(folder)


def checksums(files: Sequence[Named]) -> list[int]:
    """Return the CRC-32 of each file. Raises RecordError for one that cannot be read."""
    try:
        return [zlib.crc32(path.read_bytes()) for _, path in files]
    except OSError as error:
        raise RecordError(f"{error.filename} cannot be read ({error.strerror}): give a result file") from None


def _check_alike(one_path: Path, one: Result, other_path: Path, other: Result) -> None:
    keys = sorted({*one.load, *other.load})
    known = [(key, one.load.get(key, "none"), other.load.get(key, "none")) for key in keys]
    if differing := [f"{key} {first} and {second}" for key, first, second in known if first != second]:
        raise RecordError(f"{one_path} and {other_path} differ ({'; '.join(differing)}): give runs of one load")


def _write_trial(folder: Path, number: int, arm: str, path: Path, result: Result) -> None:
    folder.mkdir(parents=True)
    columns = dict(zip(result.requests.column_names, result.requests.columns, strict=True))
    columns |= {"arm": [arm] * len(result.requests), "trial": [number] * len(result.requests)}
    pa.parquet.write_table(pa.table(columns, REQUESTS), folder / "requests.parquet", compression="zstd")
    info: dict[str, Any] = {
        "trial": number,
        "complete": True,
        "design": DESIGN,
        "source": path.name,
        "pace": result.pace,
        "open_loop": result.open_loop,
        "arms": [{"name": arm, "kind": "openai", "external": {"model_name": result.model}}],
        "problems": [f"{path.name} {problem}" for problem in result.problems],
        **({"max_concurrency": result.concurrency} if result.concurrency else {}),
        "planned": {arm: len(result.requests)},
    }
    write_json(folder / "trial.json", info, indent=2)
