"""Result files of `vllm bench serve --save-result --save-detailed`, as vLLM 0.32 writes them, as a run directory.

A file is one table of JSON: settings of the load, a summary, and lists with one entry a request, in the order in which
they were sent. Times are seconds of Python's performance counter. Each file becomes a trial of one arm, since each was
a run by itself.
"""

from __future__ import annotations

import math
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet
import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tailgate.analysis.records.documents import parse_json, toml_with_checksum, write_json
from tailgate.analysis.records.schemas import REQUESTS
from tailgate.analysis.records.tables import RecordError, one_line
from tailgate.analysis.wording import counted

TOOL = "vLLM bench serve"
DESIGN = "separate"

Named = tuple[str, Path]
"""An arm, and a file of it."""

_SECOND = 1e9
_LAST_S = 3e9  # beyond any clock, and any sum of three is still a number of ns
_AT_ONCE_SHARE = 0.5  # of the run: starts that lie farther apart were timed by the data set (--self-timed)
_LONGEST_ERROR = 200
_AGAIN = "run it again with --save-result --save-detailed"
_NEEDED = ("input_lens", "errors", "output_lens", "ttfts", "itls", "start_times")
_OF_LOAD = (
    *("backend", "request_rate", "burstiness", "max_concurrency", "num_prompts"),
    *("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps"),
    *("dataset_name", "random_input_len", "random_output_len", "random_range_ratio", "sharegpt_output_len"),
)

Seconds = Annotated[float, Field(ge=0, le=_LAST_S)]
Waited = Annotated[float, Field(ge=-_LAST_S, le=_LAST_S)]
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]


class _File(BaseModel):
    """What is read of a file."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    input_lens: list[Count | None]
    output_lens: list[Count | None]
    errors: list[str | None]
    ttfts: list[Seconds | None]
    itls: list[list[Seconds] | None]
    start_times: list[Seconds]
    latencies: list[Seconds | None] | None = None
    queue_times: list[Waited | None] | None = None
    request_rate: Seconds | str | None = None
    ramp_up_strategy: str | None = None
    max_concurrency: Count | None = None
    duration: Seconds | None = None
    completed: Count | None = None
    model_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The requests of one run against one server."""

    requests: pa.Table  # schema REQUESTS; null is what the file does not know, the arm and the trial among it
    open_loop: bool  # whether they were sent without waiting for answers
    concurrency: int | None  # that were kept under way, or that there could be at most
    pace: str  # how they were sent, and where their latency counts from, in a sentence
    model: str | None
    load: Mapping[str, Any]  # settings in which two files of one comparison must agree
    problems: tuple[str, ...]  # in words that follow the file's name


def read_result(path: Path) -> Result:
    """Return what the file holds. Raises RecordError, which names it, for one that cannot be read."""
    try:
        document = parse_json(path.read_text(encoding="utf-8"))
        if not isinstance(document, dict) or not document.keys() >= {"endpoint_type", "num_prompts"}:
            raise RecordError(f"is no result file of {TOOL}")
        result = result_of(document)
    except OSError as error:
        raise RecordError(f"{path} cannot be read ({error.strerror}): give a result file of {TOOL}") from None
    except RecordError as error:
        raise RecordError(f"{path} {error}") from None
    except ValueError as error:
        why = f"{path} is not one whole JSON ({one_line(error)})"
        raise RecordError(f"{why}: copy it again, or run it again without --append-result") from None
    if not result.requests.num_rows:
        raise RecordError(f"{path} holds no request: run it again")
    return result


def result_of(document: Mapping[str, Any]) -> Result:
    """Return the requests in the table. Raises RecordError, which names the value that cannot be read."""
    if missing := [name for name in _NEEDED if document.get(name) is None]:
        raise RecordError(f"has no {', '.join(missing)}, so it is a summary alone: {_AGAIN}")
    try:
        file = _File.model_validate(document)
    except ValidationError as error:
        raise RecordError(_fault(error)) from None
    lists = ((name, getattr(file, name)) for name in ("latencies", "queue_times", *_NEEDED))
    sizes = {name: len(values) for name, values in lists if values is not None}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise RecordError(f"has lists of unequal lengths ({listed}): {_AGAIN}")
    none = [None] * len(file.errors)
    columns = (file.input_lens, file.output_lens, file.errors, file.ttfts, file.itls, file.start_times)
    rows = zip(*columns, file.latencies or none, file.queue_times or none, strict=True)
    requests = pa.Table.from_pylist([_request(place, *row) for place, row in enumerate(rows)], schema=REQUESTS)
    open_loop = _is_open_loop(file, requests)
    if not open_loop:
        place = requests.schema.get_field_index("scheduled_ns")
        requests = requests.set_column(place, requests.schema.field(place), pa.nulls(len(requests), pa.int64()))
    ok = pc.sum(pc.equal(requests.column("status"), "OK")).as_py() or 0
    contradiction = f"says that {counted(file.completed, 'request')} completed, and {ok} did by its lists"
    how = "on a schedule (open loop)" if open_loop else "as others ended (closed loop), which hides the tail"
    limit = f", with at most {counted(file.max_concurrency, 'request')} under way" if file.max_concurrency else ""
    origin = "when its client took a request up" if file.queue_times else "when a request was sent"
    return Result(
        requests=requests,
        open_loop=open_loop,
        concurrency=file.max_concurrency or None,
        pace=f"{TOOL} sent requests {how}{limit}; latency counts from {origin}.",
        model=file.model_id,
        load={key: document[key] for key in _OF_LOAD if document.get(key) is not None},
        problems=() if file.completed in (None, ok) else (contradiction,),
    )


def _fault(error: ValidationError) -> str:
    """Describe the first value that cannot be read: "request 2: itls[1] is 'x': …"."""
    found = error.errors()[0]
    name, *places = found["loc"]
    request = f"request {int(places[0]) + 1}: " if places and isinstance(places[0], int) else ""
    piece = f"[{places[1]}]" if len(places) > 1 and isinstance(places[1], int) else ""
    return f"{request}{name}{piece} is {found['input']!r:.40} ({found['msg']}): run it again"


def _request(
    place: int,
    prompt: int | None,
    answer: int | None,
    error: str | None,
    ttft: float | None,
    pieces: list[float] | None,
    start: float,
    took: float | None,
    queued: float | None,
) -> dict[str, Any]:
    """Return the columns of the request; times are those of the counter."""
    first = ttft or 0.0
    # Without latencies (vLLM before 0.32) an answer ends with its last piece.
    took = first + sum(pieces or ()) if took is None else max(took, first)
    # A request that failed before it was sent has no start; what it waited then counts from zero.
    start = max(0.0, start or -(queued or 0.0))
    times = None if not first or pieces is None else np.rint(np.cumsum([first, *pieces]) * _SECOND).astype(np.int64)
    return {
        "request_id": str(place),
        "scheduled_ns": None if queued is None or not start else _ns(start - max(queued, 0.0)),
        "sent_ns": _ns(start),
        "first_token_ns": _ns(start + first) if start and first else None,
        "end_ns": _ns(start + took) if start else None,
        "status": "OK" if not error and (took if pieces is None else first) > 0 else "UNKNOWN",
        "error": (error or "")[:_LONGEST_ERROR] or None,
        "prompt_tokens": prompt,
        "output_tokens": answer,
        "token_ns": times,
    }


def _ns(seconds: float) -> int | None:
    """Return seconds as whole ns; None for 0, which stands for an unknown time."""
    return round(seconds * _SECOND) if seconds else None


def _is_open_loop(file: _File, requests: pa.Table) -> bool:
    """Return whether requests were sent on a schedule, also one that the data set or a ramp gave."""
    unpaced = not isinstance(file.request_rate, float) and file.request_rate != "trace"
    if unpaced and file.ramp_up_strategy is None:
        due = pc.min_max(pc.coalesce(requests.column("scheduled_ns"), requests.column("sent_ns"))).as_py()
        spread_s = ((due["max"] or 0) - (due["min"] or 0)) / _SECOND
        if file.max_concurrency is not None or spread_s < _AT_ONCE_SHARE * (file.duration or math.inf):
            return False
    # A limit delays requests without a trace, unless the file says how long each waited.
    return file.max_concurrency is None or file.queue_times is not None


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
    (_, first_path), first = files[0], results[0]
    for (_, path), result in zip(files, results, strict=True):
        pairs = {key: (first.load.get(key, "none"), result.load.get(key, "none")) for key in _OF_LOAD}
        if differing := [f"{key} {one} and {other}" for key, (one, other) in sorted(pairs.items()) if one != other]:
            raise RecordError(f"{first_path} and {path} differ ({'; '.join(differing)}): give runs of one load")
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
        (made / "experiment.toml").write_text(toml_with_checksum(tomli_w.dumps(experiment)), encoding="utf-8")
        made.replace(folder)


def checksums(files: Sequence[Named]) -> list[int]:
    """Return the CRC-32 of each file. Raises RecordError for one that cannot be read."""
    try:
        return [zlib.crc32(path.read_bytes()) for _, path in files]
    except OSError as error:
        raise RecordError(f"{error.filename} cannot be read ({error.strerror}): give a result file") from None


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
