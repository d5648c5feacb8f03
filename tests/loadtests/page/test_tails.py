import json
from pathlib import Path

import pyarrow as pa
import pytest

from analysis.records.sums import sums_path
from analysis.records.tables import RecordWriter
from loadtests.page import tails
from loadtests.page.tails import DocumentsTail, LinesTail, TableTail

SCHEMA = pa.schema([("name", pa.string()), ("n", pa.int64()), ("more", pa.string())])


def test_only_whole_lines_are_read_and_each_once(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    tail = LinesTail(file)
    assert list(tail.new()) == []
    file.write_bytes(b"a\nb\nhal")
    assert list(tail.new()) == [b"a", b"b"]
    assert list(tail.new()) == []
    with file.open("ab") as more:
        more.write(b"f\nc\n")
    assert list(tail.new()) == [b"half", b"c"]


def test_a_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_bytes(b"a\n")
    tail = LinesTail(file)
    assert (list(tail.new()), tail.restarts) == ([b"a"], 0)
    (tmp_path / "other").write_bytes(b"b\nc\n")
    (tmp_path / "other").replace(file)
    assert (list(tail.new()), tail.restarts) == ([b"b", b"c"], 1)
    file.write_bytes(b"d\n")
    assert (list(tail.new()), tail.restarts) == ([b"d"], 2)


def test_a_large_file_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tails, "_AT_ONCE", 64)
    monkeypatch.setattr(tails, "_LONGEST_LINE", 32)
    file = tmp_path / "lines"
    lines = [b"%010d" % number for number in range(40)]
    file.write_bytes(b"\n".join(lines) + b"\n" + b"x" * 200 + b"\nlast\n")
    tail = LinesTail(file)
    read: list[bytes] = []
    for _ in range(20):
        read += tail.new()
    assert read[:40] == lines
    assert read[-1] == b"last"  # a line longer than any of ours stops nothing


def test_documents_are_tables_of_json_alone(tmp_path: Path) -> None:
    file = tmp_path / "looks.jsonl"
    deep = "[" * 100_000
    file.write_text(f'{{"look": 1, "value": NaN}}\nnull\n[1]\n{{"torn\n{deep}\n\n{json.dumps({"look": 2})}\n')
    assert list(DocumentsTail(file).new()) == [{"look": 1, "value": None}, {"look": 2}]


def row(number: int) -> dict[str, object]:
    return {"name": f"row {number}", "n": number, "more": "x" * 1000}


def test_rows_of_a_growing_table_come_once_and_with_the_columns_alone(tmp_path: Path) -> None:
    file = tmp_path / "events.arrow"
    tail = TableTail(file, {"name", "n", "unheard of"})
    assert tail.new() == []
    writer = RecordWriter(file, SCHEMA)
    assert tail.new() == []
    for start in (0, 3):
        for number in range(start, start + 3):
            writer.append(row(number))
        writer.flush()
        assert tail.new() == [{"name": f"row {number}", "n": number} for number in range(start, start + 3)]
        assert tail.new() == []
    writer.close()  # its mark of an end is no batch
    assert tail.new() == []
    assert len(TableTail(file, {"n"}).new()) == 6


def test_of_a_table_whose_newest_rows_matter_only_the_last_batch_is_decoded(tmp_path: Path) -> None:
    file = tmp_path / "steps.arrow"
    with RecordWriter(file, SCHEMA) as writer:
        for number in range(4):
            writer.append(row(number))
            writer.flush()
        tail = TableTail(file, {"n"}, newest_only=True)
        assert tail.new() == [{"n": 3}]
        assert tail.new() == []


def test_a_table_that_was_begun_anew_is_read_from_its_start(tmp_path: Path) -> None:
    file = tmp_path / "bed.arrow"
    with RecordWriter(file, SCHEMA) as writer:
        writer.append(row(1))
    tail = TableTail(file, {"n"})
    assert tail.new() == [{"n": 1}]
    with RecordWriter(file, SCHEMA) as writer:
        writer.append(row(2))
    assert tail.new() == [{"n": 1}, {"n": 2}]


def test_damage_shows_less_and_raises_nothing(tmp_path: Path) -> None:
    file = tmp_path / "events.arrow"
    with RecordWriter(file, SCHEMA) as writer:
        for number in range(2):
            writer.append(row(number))
            writer.flush()
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert TableTail(file, {"n"}).new() in ([], [{"n": 0}])
    file.write_bytes(b"\0" * len(whole))
    assert TableTail(file, {"n"}).new() == []
    sums_path(file).write_text("piece x y z 0 0\npiece 1\n\nend 1 2 3 4\n")
    assert TableTail(file, {"n"}).new() == []
    file.unlink()
    sums_path(file).write_text("piece 0 10 0 00000000 00000000\npiece 10 10 1 00000000 00000000\n")
    assert TableTail(file, {"n"}).new() == []
