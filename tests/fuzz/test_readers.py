"""Readers of foreign files and messages, on damaged and hostile inputs.

`TAILGATE_FUZZ` sets the number of inputs of each (`make fuzz`: 10,000). Input n is the same every time.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from tailgate.analysis.interim import JOURNAL as INTERIM
from tailgate.analysis.interim.journal import read_interim
from tailgate.analysis.records.documents import (
    read_document,
    read_toml,
    toml_with_checksum,
    with_checksum,
    write_document,
)
from tailgate.analysis.records.joining import RUN_LIST, read_run_list
from tailgate.analysis.records.request_columns import RequestColumns
from tailgate.analysis.records.schemas import REQUESTS
from tailgate.analysis.records.tables import RecordError, read_table
from tailgate.analysis.records.weight_journal import JOURNAL as WEIGHTS
from tailgate.analysis.records.weight_journal import WeightChange, read_journal
from tailgate.analysis.records.weight_journal import append as append_weights
from tailgate.analysis.summary.summary import analyze
from tailgate.loadtests.experiments.files import builtin_names, builtin_text
from tailgate.loadtests.experiments.reading import load
from tailgate.loadtests.traffic.traces import read_trace
from tailgate.servers.complaint import ConfigError
from tests.fakes.request_rows import row, table_of, write_rows
from tests.fakes.runs import EAGER, Compile, FakeArm, FakeRun, write_run
from tests.fuzz.oracle import Reader, examine
from tests.fuzz.wire import WIRE

_ROWS = [
    row(number, at_s=number, ttft_s=None if number == 5 else 0.1, status="OK" if number != 5 else "INTERNAL")
    | {"token_ns": [1, 2, 3], "error": None if number != 5 else "a fault", "server_recv_ns": number}
    for number in range(12)
]
_AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{second:02d}.6805900,{374 + second},{44 + second}\n" for second in range(40, 60)
)
_MOONCAKE = "".join(
    json.dumps(
        {"timestamp": 900 * at, "input_length": 1024 + at % 2, "output_length": 5, "hash_ids": [0, at, 9][: 2 + at % 2]}
    )
    + "\n"
    for at in range(12)
)
_DOCUMENT = {
    "trial": 1,
    "start_ns": 1_700_000_000_000_000_000,
    "arms": {"eager": {"replicas": ["eager-0"], "cost": 1.5}},
    "notes": ["a", None, True],
}


def _given(*seeds: bytes) -> Callable[[Path], Sequence[bytes]]:
    return lambda folder: seeds


def _file(name: str, read: Callable[[Path], object]) -> Callable[[Path, bytes, random.Random], None]:
    """Return a reader of a file of the name that holds the input."""

    def read_file(folder: Path, content: bytes, draws: random.Random) -> None:
        path = folder / name
        path.write_bytes(content)
        read(path)

    return read_file


def _experiments(folder: Path) -> list[bytes]:
    # h200 needs a trace, minilm a package that may be missing.
    return [builtin_text(name).encode() for name in builtin_names() if name not in ("h200", "minilm")]


def _arrow(folder: Path) -> list[bytes]:
    path = folder / "written.arrow"
    write_rows(path, _ROWS, batch=3)
    return [path.read_bytes()]


def _read_requests(path: Path) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    table, problems = read_table(path, REQUESTS, required=("arm", "end_ns"))
    table.validate(full=True)
    assert len(RequestColumns.of(table)) == table.num_rows
    return table.to_pylist(), problems


_WHOLE = table_of(_ROWS).to_pylist()


def _read_checked(path: Path) -> None:
    rows, problems = _read_requests(path)
    assert problems or rows == _WHOLE, "rows changed and no problem was reported"


def _parquet(folder: Path) -> list[bytes]:
    seeds = []
    for codec in ("snappy", "none", "zstd"):
        pa.parquet.write_table(table_of(_ROWS), folder / "seed", compression=codec, write_page_checksum=True)
        seeds.append((folder / "seed").read_bytes())
    return seeds


def _json_lines(folder: Path) -> list[bytes]:
    return ["".join(json.dumps(row) + "\n" for row in _WHOLE).encode()]


def _document_seeds(folder: Path) -> list[bytes]:
    return [json.dumps(with_checksum(_DOCUMENT), indent=indent).encode() for indent in (None, 2)]


def _document(path: Path) -> None:
    content, problem = read_document(path)
    if b'"crc32"' in path.read_bytes():
        assert content in (None, _DOCUMENT), "a changed document is accepted"
    assert (content is None) == bool(problem)


def _weights(folder: Path) -> list[bytes]:
    (folder / WEIGHTS).unlink(missing_ok=True)
    for at_ns in range(1, 6):
        weights = {"eager": 100 - at_ns, "compiled": at_ns}
        append_weights(
            folder, WeightChange(at_ns=at_ns, weights=weights, why="a step", step=at_ns, shadows={"dark": 5.0})
        )
    return [(folder / WEIGHTS).read_bytes()]


_ANALYSIS = {
    "number": 1,
    "trial": 1,
    "t_s": 30.0,
    "verdicts": {"compiled": "INCONCLUSIVE"},
    "gates": [{"p": 0.2, "n": 12}],
}
_ANALYSES = "".join(json.dumps({**_ANALYSIS, "number": number}) + "\n" for number in range(6)).encode()


def _run_list(folder: Path) -> list[bytes]:
    (folder / "a").mkdir(exist_ok=True)
    (folder / "b").mkdir(exist_ok=True)
    write_document(folder / "seed", {"runs": ["a", "b"], "accepted": ["torch"]})
    return [(folder / "seed").read_bytes(), b'{"runs": ["a", "./b"]}']


_LIMITS = {"metrics": ["e2e"], "quantile": 0.9, "min_blocks": 4, "margin": 1.0, "max_error_pct": 5}
_STALLS = {"max_stall_s": 1000, "max_stall_s_per_min": 60, "max_requests_hit_pct": 100}
_NAIVE = FakeArm(name="compiled", compiles=[Compile(at_s=40, seconds=4), Compile(at_s=90, seconds=4)])
_QUIET = FakeRun(checksums=True, duration_s=150, rate=1, gates=_LIMITS)
_STALLED = FakeRun(checksums=True, duration_s=150, rate=1, gates={**_LIMITS, **_STALLS}, arms=(EAGER, _NAIVE))


def _run_files(run: FakeRun, folder: Path) -> list[bytes]:
    """Return the name and the content of each file that judging rests on."""
    whole = write_run(folder / "whole", run)
    paths = [path for path in sorted(whole.rglob("*")) if path.suffix in (".arrow", ".json", ".toml")]
    assert len(paths) > 4
    return [path.relative_to(whole).as_posix().encode() + b"\0" + path.read_bytes() for path in paths]


@cache
def _judged(directory: Path) -> tuple[dict[str, str], set[str]]:
    """Return the verdicts, and the checks that failed."""
    summary = analyze(directory)
    verdicts = {f"{row['arm']}: {row['gate']}": row["verdict"] for row in summary["gates"]}
    failed = {f"{row['check']} {row['arm']} {row['reason']}" for row in summary["validity"] if not row["ok"]}
    return {**verdicts, "": summary["overall"]}, failed


def _run(folder: Path, content: bytes, draws: random.Random) -> None:
    """Damage to one file of a run makes no PASS, and changes no verdict without a check that says why."""
    name, _, inside = content.partition(b"\0")
    whole, copy = folder / "whole", folder / "copy"
    if name not in {path.relative_to(whole).as_posix().encode() for path in whole.rglob("*") if path.is_file()}:
        raise RecordError("the input names no file of the run")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(whole, copy)
    (copy / name.decode()).write_bytes(inside)
    (before, failed_before), (after, failed) = _judged(whole), _judged.__wrapped__(copy)
    assert {gate for gate, verdict in after.items() if verdict == "PASS" != before.get(gate)} == set(), name
    assert after == before or failed - failed_before, f"{name!r}: {after}"


REFUSED = (RecordError,)
FILES = (
    Reader(name="experiment", seeds=_experiments, read=_file("experiment.toml", load), refuses=(ConfigError,)),
    Reader(
        name="trace",
        seeds=_given(_AZURE.encode(), _MOONCAKE.encode()),
        read=_file("trace", read_trace),
        refuses=(ConfigError,),
    ),
    Reader(name="requests.arrow", seeds=_arrow, read=_file("requests.arrow", _read_checked), refuses=REFUSED),
    Reader(name="requests.parquet", seeds=_parquet, read=_file("requests.parquet", _read_requests), refuses=REFUSED),
    Reader(name="requests.jsonl", seeds=_json_lines, read=_file("requests.jsonl", _read_requests), refuses=REFUSED),
    Reader(name="trial.json", seeds=_document_seeds, read=_file("trial.json", _document)),
    Reader(
        name="experiment.toml of a run",
        seeds=_given(toml_with_checksum(builtin_text("demo")).encode()),
        read=_file("experiment.toml", read_toml),
        refuses=(ValueError, OSError),
    ),
    Reader(name="weights.jsonl", seeds=_weights, read=_file(WEIGHTS, lambda path: read_journal(path.parent)[0])),
    Reader(name="interim.jsonl", seeds=_given(_ANALYSES), read=_file(INTERIM, lambda path: read_interim(path.parent))),
    Reader(
        name="runs.json",
        seeds=_run_list,
        read=_file(RUN_LIST, lambda path: read_run_list(path.parent)),
        refuses=REFUSED,
    ),
    *(
        Reader(name=name, seeds=partial(_run_files, run), read=_run, refuses=REFUSED, most_mib=512, one_in=20)
        for name, run in (("a run", _QUIET), ("a run with stalls", _STALLED))
    ),
)


def refuse(message: str) -> None:
    raise KeyError(message) if message == "key" else ValueError(message)


def spin() -> None:
    while True:
        pass


@pytest.mark.parametrize(
    ("fault", "place"),
    [
        (lambda: refuse("key"), "KeyError at"),
        (lambda: refuse("two\nlines"), "is no line"),
        (lambda: refuse("x" * 5000), "is no line"),
        (lambda: refuse(""), "is no line"),
        (lambda: len(b"x" * (80 << 20)), "too much memory"),
        (lambda: len(b"x" * (8 << 30)), "MemoryError at"),
        (spin, "_TooLongError at"),
    ],
)
def test_a_fault_is_found(tmp_path: Path, fault: Callable[[], object], place: str) -> None:
    def read(folder: Path, content: bytes, draws: random.Random) -> None:
        if content != b"seed":
            fault()

    reader = Reader(name="faulty", seeds=lambda folder: [b"seed"], read=read, refuses=(ValueError,))
    (found,) = examine(reader, tmp_path, count=1)
    assert place in found


COUNT = int(os.environ.get("TAILGATE_FUZZ", "200"))
READERS = (*FILES, *WIRE)


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_damaged_input_is_read_or_refused_in_one_line(reader: Reader, tmp_path: Path) -> None:
    faults = examine(reader, tmp_path, count=-(-COUNT // reader.one_in))
    assert not faults, "\n\n".join(f"{place}, {len(found)} times: {found[0]}" for place, found in faults.items())
