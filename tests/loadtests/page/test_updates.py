from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import tomli_w

from tailgate.analysis.records.tables import RecordWriter
from tailgate.loadtests.page.tails import LinesTail, TableTail
from tailgate.loadtests.page.updates import Updates, described
from tests.fakes.live_runs import WatchedRun


@pytest.fixture
def run(tmp_path: Path) -> WatchedRun:
    return WatchedRun(folder=tmp_path / "20260101T000000Z-canary")


def first_of(run: WatchedRun) -> dict[str, Any]:
    event = Updates(run.folder).event(last=False)
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    message: dict[str, Any] = json.loads(event[6:])
    return message


def test_each_line_and_row_is_sent_once(run: WatchedRun) -> None:
    run.minutes(1)
    run.compiled(4.0)
    updates = Updates(run.folder)
    first = json.loads(updates.event(last=False)[6:])
    assert (first["first"], first["run"]["name"], len(first["load"]), len(first["interim"])) == (True, "canary", 60, 1)
    assert (len(first["machines"]), len(first["events"]), first["events"][0]["hit"]) == (180, 1, 12)
    run.second()
    run.status()
    later = json.loads(updates.event(last=True)[6:])
    assert (later["first"], later["last"], len(later["load"]), len(later["machines"])) == (False, True, 1, 3)
    assert not {"run", "interim"} & later.keys()
    assert later["events"] == []
    assert later["now"]["load"]["t_s"] == 61.0


def test_what_would_turn_text_is_left_out(run: WatchedRun) -> None:
    run.notes = ["a\u2028\u202eb\x00c"]
    run.status()
    assert first_of(run)["now"]["notes"] == ["a\u2028b\0c"]


SCHEMA = pa.schema([("name", pa.string()), ("n", pa.int64()), ("more", pa.string())])


def test_an_external_arm_without_a_log_reports_no_compiles(run: WatchedRun) -> None:
    path = run.folder / "experiment.toml"
    arms = [{"name": "managed", "control": True, "compile": {}}, {"name": "silent", "control": False}]
    arms += [{"name": "logged", "control": False, "telemetry": {"log": ["server.log"]}}]
    path.write_text(tomli_w.dumps(tomllib.loads(path.read_text()) | {"arms": arms}))
    assert [arm["reports_compiles"] for arm in described(run.folder)["arms"]] == [True, False, True]


def test_only_whole_lines_are_read_and_each_once(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    tail = LinesTail(file)
    assert tail.new() == []
    file.write_bytes(b'{"n": 1}\n{"n": 2}\n{"n"')
    assert tail.new() == [{"n": 1}, {"n": 2}]
    assert tail.new() == []
    with file.open("ab") as more:
        more.write(b': 3}\n{"n": 4}\n')
    assert tail.new() == [{"n": 3}, {"n": 4}]


def rows(tail: TableTail) -> list[dict[str, Any]]:
    return [row for batch in tail.batches() for row in batch.to_pylist()]


def row(number: int) -> dict[str, object]:
    return {"name": f"row {number}", "n": number, "more": "x" * 1000}


def batches_in(file: Path, count: int) -> bytes:
    with RecordWriter(file, SCHEMA) as writer:
        for number in range(count):
            writer.append(row(number))
            writer.flush()
    return file.read_bytes()


def test_damage_shows_less_and_raises_nothing(tmp_path: Path) -> None:
    file = tmp_path / "events.arrow"
    whole = batches_in(file, 2)
    file.write_bytes(whole[: len(whole) // 2])
    assert rows(TableTail(file, {"n"})) in ([], [{"n": 0}])
    file.write_bytes(b"\0" * len(whole))
    assert rows(TableTail(file, {"n"})) == []
    file.unlink()
    assert rows(TableTail(file, {"n"})) == []


def test_a_batch_that_is_being_written_comes_when_it_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "events.arrow"
    whole = batches_in(file, 3)
    file.write_bytes(b"")
    tail, seen = TableTail(file, {"n"}), []
    for size in range(0, len(whole), 97):
        with file.open("ab") as growing:
            growing.write(whole[size : size + 97])
        seen += rows(tail)
    assert seen == [{"n": 0}, {"n": 1}, {"n": 2}]
