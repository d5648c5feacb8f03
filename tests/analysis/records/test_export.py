"""Records in other formats: all rows, streamed, and judged alike when they come back."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from analysis.records.export import TABLES, export
from analysis.records.run_records import read_run
from analysis.records.schemas import REQUESTS
from analysis.records.sums import SumsWriter, sums_path
from analysis.records.tables import RecordError, read_pieces
from analysis.summary.summary import analyze
from tests.fakes.runs import EAGER, Compile, FakeArm, FakeRun, write_run

RUN = FakeRun(
    duration_s=30.0,
    rate=2.0,
    trials=2,
    arms=(EAGER, FakeArm(name="compiled", compiles=[Compile(at_s=15.0, seconds=2.0)], error_share=0.02)),
    gates={"draws": 99},
)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run") / "fake", RUN)


@pytest.fixture(scope="module")
def run_judged(run_dir: Path) -> dict[str, Any]:
    return judged(run_dir)


def judged(directory: Path) -> dict[str, Any]:
    return {key: value for key, value in analyze(directory).items() if key != "run_id"}


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_what_was_exported_is_judged_as_the_run_is_and_can_be_exported_on(
    run_dir: Path, run_judged: dict[str, Any], tmp_path: Path, form: str
) -> None:
    written = export(run_dir, tmp_path / "a", form=form)
    records = read_run(run_dir)
    assert written.rows["requests"] == records.requests.num_rows
    assert written.problems == ()
    assert not any((tmp_path / "a").rglob("*.sums"))  # the run states nothing either
    assert {path.suffix for path in (tmp_path / "a").glob("trial-01/requests*")} == {f".{form}"}
    assert judged(tmp_path / "a") == run_judged
    other = "jsonl" if form == "parquet" else "parquet"
    export(tmp_path / "a", tmp_path / "b", form=other)
    again = read_run(tmp_path / "b")
    assert again.requests.equals(records.requests)
    assert again.events is not None
    assert records.events is not None
    assert again.events.equals(records.events)


def test_columns_that_are_left_empty_hold_nothing_and_the_others_all(run_dir: Path, tmp_path: Path) -> None:
    export(run_dir, tmp_path / "a", form="parquet", empty=["token_ns"])
    whole, thin = read_run(run_dir).requests, read_run(tmp_path / "a").requests
    assert whole["token_ns"].null_count < len(whole) == thin["token_ns"].null_count
    assert thin.drop_columns(["token_ns"]).equals(whole.drop_columns(["token_ns"]))


def test_csv_has_lists_of_numbers_between_spaces_and_null_as_an_empty_cell(run_dir: Path, tmp_path: Path) -> None:
    export(run_dir, tmp_path / "a", form="csv", tables=["requests", "compile_events"])
    with next((tmp_path / "a").glob("trial-01/requests*.csv")).open(newline="") as file:
        rows = list(csv.DictReader(file))
    records = [row for row in read_run(run_dir).requests.to_pylist() if row["trial"] == 1]
    assert list(rows[0]) == REQUESTS.names
    assert [row["request_id"] for row in rows] == [row["request_id"] for row in records]
    answered = next(index for index, row in enumerate(records) if row["token_ns"])
    assert list(map(int, rows[answered]["token_ns"].split())) == records[answered]["token_ns"]
    assert rows[0]["batch_id"] == ""
    with next((tmp_path / "a").glob("trial-01/compile_events*.csv")).open(newline="") as file:
        events = list(csv.DictReader(file))
    hit = next(row for row in events if row["request_ids"] not in ("", "[]"))
    assert json.loads(hit["request_ids"])
    assert not list((tmp_path / "a").glob("trial-*/steps*"))


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_an_export_of_files_that_state_their_sums_states_its_own(tmp_path: Path, form: str) -> None:
    run = write_run(tmp_path / "run", replace(RUN, stated=True))
    export(run, tmp_path / "a", form=form)
    records = read_run(tmp_path / "a")
    assert (records.stated, records.problems) == (True, ())
    path = tmp_path / "a" / "trial-01" / f"requests-0.{form}"
    assert sums_path(path).exists()
    sums_path(path).unlink()
    assert read_run(tmp_path / "a").problems == (
        f"trial-01/requests-0.{form} does not say what it should hold, as others of the run do",
    )


def test_a_torn_run_stays_torn(run_dir: Path, tmp_path: Path) -> None:
    torn = write_run(tmp_path / "torn", RUN)
    path = next(torn.glob("trial-01/requests*.arrow"))
    path.write_bytes(path.read_bytes()[:-500])
    written = export(torn, tmp_path / "a", form="parquet")
    assert written.problems == (f"trial-01/{path.name} is cut off at its end",)
    assert judged(tmp_path / "a") == judged(torn)
    export(tmp_path / "a", tmp_path / "b", form="jsonl")
    assert read_run(tmp_path / "b").problems == read_run(torn).problems


def test_memory_does_not_grow_with_the_run(tmp_path: Path) -> None:
    rows = [{"arm": "eager", "status": "OK", "end_ns": 1, "token_ns": list(range(200))}] * 500
    batch = pa.RecordBatch.from_pylist(rows, schema=REQUESTS).serialize()
    path = tmp_path / "requests.arrow"
    sums = SumsWriter(path)
    with path.open("wb") as file:
        for piece, count in ((REQUESTS.serialize(), 0), *[(batch, 500)] * 100):
            file.write(piece)
            sums.add(memoryview(piece), count)
    sums.close()
    assert path.stat().st_size > 75_000_000
    pool = pa.system_memory_pool()
    before = pool.bytes_allocated()
    held, seen = [], []

    def take(table: pa.Table) -> None:
        seen.append(table.num_rows)
        held.append(pool.bytes_allocated() - before)

    assert read_pieces(path, REQUESTS, take) == ()
    assert sum(seen) == 50_000
    assert max(held) < 45_000_000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"form": "xlsx"}, 'format "xlsx" is unknown: use parquet, jsonl, csv'),
        ({"tables": ["nothing"]}, 'table "nothing" is unknown: use one or more of requests, steps, compile_events'),
        ({"tables": []}, "no table is named"),
        ({"out": "."}, "exists already: give a new --out"),
        ({"run_dir": "none"}, "is not a directory"),
        ({"run_dir": "empty"}, "holds none of the tables requests"),
    ],
)
def test_what_cannot_be_exported_is_one_clear_line(
    run_dir: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    given = {"run_dir": run_dir, "out": tmp_path / "a", "form": "csv", "tables": list(TABLES), **changes}
    source = tmp_path / given["run_dir"] if isinstance(given["run_dir"], str) else given["run_dir"]
    out = tmp_path / given["out"] if isinstance(given["out"], str) else given["out"]
    with pytest.raises(RecordError, match=message):
        export(source, out, form=given["form"], tables=given["tables"])


def test_records_of_another_kind_are_refused_and_named(tmp_path: Path) -> None:
    table = pa.table({"arm": ["a"], "status": ["OK"], "end_ns": ["soon"]})
    pa.parquet.write_table(table, tmp_path / "requests.parquet")
    with pytest.raises(RecordError, match=r'requests\.parquet: column "end_ns" holds string'):
        export(tmp_path, tmp_path / "a", form="csv")


def test_times_on_another_hosts_clock_are_exported_on_the_clock_of_the_run(run_dir: Path, tmp_path: Path) -> None:
    far = write_run(tmp_path / "far", RUN)
    path = next(far.glob("trial-01/requests*.arrow"))
    path.rename(path.with_name("requests-0.arrow"))
    account_path = far / "trial-01" / "generator-0.json"
    clock = {"offset_ns": 3_200_000_000, "applied": False, "exchanges": 9, "worst_uncertainty_ns": 0}
    account_path.write_text(json.dumps({**json.loads(account_path.read_text()), "clock": clock}))
    written = read_run(far).requests
    for form in ("parquet", "csv"):
        export(far, tmp_path / form, form=form)
    assert read_run(tmp_path / "parquet").requests.equals(written)
    with (tmp_path / "csv" / "trial-01" / "requests-0.csv").open(newline="") as file:
        first = next(csv.DictReader(file))
    assert int(first["sent_ns"]) == written.column("sent_ns")[0].as_py()
    assert json.loads((tmp_path / "csv" / "trial-01" / "generator-0.json").read_text())["clock"]["applied"] is True
