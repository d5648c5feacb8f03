"""A run directory made of another tool's result files: each is a trial of one arm, since each was a run by itself."""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import tomli_w

from analysis.records.documents import content_of, write_json
from analysis.records.schemas import REQUESTS
from analysis.records.tables import RecordError
from analysis.results.file import part_of, read_result
from analysis.results.result import Result

DESIGN = "separate"
_LIST = "results.json"

Named = tuple[str, Path]
"""The arm that a file is of, and the file."""


def write_run(folder: Path, files: Sequence[Named], *, name: str = "") -> None:
    """`folder`, which is not there or empty, holds the files as a run. The first arm is the control.

    RecordError for a file that cannot be read, and for files of other tools or of another load than the first.
    """
    listed = identity(files)
    for place, row in enumerate(listed["files"]):
        if (same := [other["content"] for other in listed["files"]].index(row["content"])) < place:
            raise RecordError(f"{files[same][1]} and {files[place][1]} hold the same run: give each run once")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as partial:
        made = Path(partial) / "run"
        problems: list[str] = []
        first: Result | None = None
        for number, (arm, path) in enumerate(files, start=1):
            result = read_result(path)
            first = first or result
            _check_alike(files[0][1], first, path, result)
            problems += [f"{path.name} {problem}" for problem in result.problems]
            _write_trial(made / f"trial-{number:02d}", number, arm, path, result)
        if first is None:
            raise RecordError("no result file is given: give one for each arm, as NAME=FILE")
        arms = list(dict.fromkeys(arm for arm, _ in files))
        experiment = {
            "name": name or folder.name,
            "compare_models": True,  # two servers were named to be compared
            "arms": [{"name": arm, "kind": "openai", "control": arm == arms[0]} for arm in arms],
            **({"model": {"task": "embed"}} if first.embeds else {}),
            "traffic": {"design": DESIGN, "tool": first.tool, **first.load},
        }
        (made / "experiment.toml").write_text(tomli_w.dumps(experiment), encoding="utf-8")
        write_json(made / "export.json", {"source": first.tool, "format": "parquet", "problems": problems}, indent=2)
        write_json(made / _LIST, listed, indent=2)
        made.replace(folder)


def is_made_of(folder: Path, files: Sequence[Named]) -> bool:
    """Whether the folder holds the run that these files make."""
    return (folder / _LIST).is_file() and content_of(folder / _LIST) == identity(files)


def identity(files: Sequence[Named]) -> dict[str, Any]:
    """The files by arm and content, wherever they lie. RecordError for one that is not there."""
    return {"files": [{"arm": arm, "name": path.name, "content": _crc32(path)} for arm, path in files]}


def _crc32(path: Path) -> str:
    crc = 0
    name, part = part_of(path)
    try:
        with name.open("rb") as file:
            while block := file.read(1 << 20):
                crc = zlib.crc32(block, crc)
    except OSError as error:
        raise RecordError(f"{path} cannot be read ({error.strerror}): give a result file") from None
    return f"{crc:08x}" if part is None else f"{crc:08x}#{part}"


def _check_alike(one_path: Path, one: Result, other_path: Path, other: Result) -> None:
    if one.tool != other.tool:
        raise RecordError(
            f"{one_path} is of {one.tool} and {other_path} of {other.tool}, which time requests in other ways: give "
            "files of one tool"
        )
    apart = [
        f"{key} {_shown(one.load, key)} and {_shown(other.load, key)}"
        for key in sorted({*one.load, *other.load})
        if one.load.get(key) != other.load.get(key)
    ]
    if apart:
        raise RecordError(f"{one_path} and {other_path} are of other loads ({'; '.join(apart)}): give runs of one load")


def _shown(load: Mapping[str, Any], key: str) -> str:
    return "none" if load.get(key) is None else str(load[key])


def _write_trial(folder: Path, number: int, arm: str, path: Path, result: Result) -> None:
    folder.mkdir(parents=True)
    rows = result.requests.num_rows
    table = result.requests
    for name, value in (("arm", arm), ("trial", number)):
        place = REQUESTS.get_field_index(name)
        table = table.set_column(
            place, REQUESTS.field(place), pa.repeat(pa.scalar(value, REQUESTS.field(place).type), rows)
        )
    pa.parquet.write_table(table, folder / "requests.parquet", compression="zstd")
    info: dict[str, Any] = {
        "trial": number,
        "complete": True,
        "design": DESIGN,
        "source": path.name,
        "pace": result.pace,
        "open_loop": result.open_loop,
        "timed": result.timed,
        "arms": [{"name": arm, "kind": "openai", "external": {"model_name": result.model}}],
    }
    if result.concurrency:
        info["max_concurrency"] = result.concurrency
    if result.sent:
        info["planned"] = {arm: result.sent}
    write_json(folder / "trial.json", info, indent=2)
