"""A run directory made of other tools' result files: each is a trial of one arm, since each was a run by itself."""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import tomli_w

from analysis.imports.file import read_result
from analysis.imports.result import Result
from analysis.records.documents import write_json
from analysis.records.schemas import REQUESTS
from analysis.records.tables import RecordError

DESIGN = "separate"

Named = tuple[str, Path]
"""An arm, and a file of it."""


def write_run(folder: Path, files: Sequence[Named], *, name: str = "") -> None:
    """Write the files as a run to `folder`, which is empty or not there. The first arm is the control.

    Raises RecordError for a file that cannot be read, and for files of other tools or of another load than the first.
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
        "name": name or folder.name,
        "compare_models": True,  # two servers were named to be compared
        "arms": [{"name": arm, "kind": "openai", "control": arm == arms[0]} for arm in arms],
        "traffic": {"design": DESIGN, "tool": first.tool, **first.load},
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
    # Tools time requests in different ways.
    loads = {"tool": one.tool, **one.load}, {"tool": other.tool, **other.load}
    known = [(key, *(load.get(key, "none") for load in loads)) for key in sorted({*loads[0], *loads[1]})]
    if differing := [f"{key} {first} and {second}" for key, first, second in known if first != second]:
        raise RecordError(
            f"{one_path} and {other_path} differ ({'; '.join(differing)}): give runs of one load and tool"
        )


def _write_trial(folder: Path, number: int, arm: str, path: Path, result: Result) -> None:
    folder.mkdir(parents=True)
    table = result.requests
    for name, value in (("arm", arm), ("trial", number)):
        place = REQUESTS.get_field_index(name)
        table = table.set_column(
            place, REQUESTS.field(place), pa.array([value] * len(table), REQUESTS.field(place).type)
        )
    pa.parquet.write_table(table, folder / "requests.parquet", compression="zstd")
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
        **({"planned": {arm: result.sent}} if result.sent else {}),
    }
    write_json(folder / "trial.json", info, indent=2)
