"""Row counts and checksums of files: damage is always seen and never ends the process; a torn file still reads."""

from __future__ import annotations

import contextlib
import json
import math
import random
import resource

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tailgate.analysis.records.documents import parse_json, read_document, read_rows, write_document
from tailgate.analysis.records.schemas import REQUESTS, REQUIRED
from tailgate.analysis.records.tables import CUT_OFF, NOT_AS_WRITTEN, RecordError, RecordWriter, read_end, read_table
from tests.fakes.request_rows import T0, row, table_of, unstate, write_rows


class TestReading:
    def test_every_cut_loses_at_most_the_torn_batch(self, tmp_path):
        path = tmp_path / "requests.arrow"
        write_rows(path, [row(index) for index in range(4)])
        whole = path.read_bytes()
        held = []
        for size in [*range(0, len(whole), 97), len(whole)]:
            path.write_bytes(whole[:size])
            table, problems = read_table(path, REQUESTS)
            names = table.column("request_id").to_pylist()
            assert names == [f"1-{index}-eager" for index in range(len(names))]
            assert bool(problems) == (size < len(whole))
            held.append(len(names))
        assert held == sorted(held)
        assert set(held) == {0, 1, 2, 3, 4}

    def test_parquet_and_json_lines_equal_arrow(self, tmp_path):
        rows = [row(index, token_ns=[0, 5]) for index in range(3)]
        write_rows(tmp_path / "a.arrow", rows)
        pq.write_table(table_of(rows), tmp_path / "a.parquet")
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(item) + "\n" for item in rows))
        tables = [read_table(tmp_path / f"a.{kind}", REQUESTS)[0] for kind in ("arrow", "parquet", "jsonl")]
        assert tables[0].to_pylist() == tables[1].to_pylist() == tables[2].to_pylist()

    @pytest.mark.parametrize(
        "line",
        ["null", "[1, 2]", "7", "{", '{"a":' + "[" * 50_000, '{"a": "\\ud800"}', "\x00\x00", "\ufeff{}"],
        ids=lambda line: line[:8],
    )
    def test_a_line_that_is_no_table_costs_itself(self, tmp_path, line):
        """Arrow's reader ends the process on some of them."""
        lines = [json.dumps(row(0)), line, json.dumps(row(1))]
        (tmp_path / "a.jsonl").write_text("".join(item + "\n" for item in lines))
        table, problems = read_table(tmp_path / "a.jsonl", REQUESTS)
        assert table.num_rows == 2
        assert problems == ("has 1 line without a table of JSON",)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda rows: rows.drop_columns(["end_ns"]), 'column "end_ns" is missing'),
            (lambda rows: rows.drop_columns(["end_ns"]).append_column("end_ns", [["soon"]]), '"end_ns" holds string'),
            (lambda rows: rows.append_column("arm", rows.column("arm")), 'column "arm" appears 2 times'),
        ],
    )
    def test_a_column_that_cannot_be_used_is_named_in_one_line(self, tmp_path, change, words):
        pq.write_table(change(table_of([row()])), tmp_path / "a.parquet")
        with pytest.raises(RecordError, match=rf"a\.parquet: .*{words}") as error:
            read_table(tmp_path / "a.parquet", REQUESTS, required=REQUIRED["requests"])
        assert "\n" not in str(error.value)

    def test_not_a_number_in_a_time_is_unknown(self, tmp_path):
        pq.write_table(pa.table({"arm": ["a"] * 3, "end_ns": [1e18, math.nan, math.inf]}), tmp_path / "a.parquet")
        table, _ = read_table(tmp_path / "a.parquet", REQUESTS)
        assert table.column("end_ns").to_pylist() == [10**18, None, None]

    def test_timestamps_are_taken_as_ns(self, tmp_path):
        stamps = pa.array([T0 // 1000], pa.timestamp("us"))
        pq.write_table(pa.table({"arm": ["a"], "end_ns": stamps}), tmp_path / "a.parquet")
        assert read_table(tmp_path / "a.parquet", REQUESTS)[0].column("end_ns").to_pylist() == [T0]


def test_an_error_is_one_line_whatever_a_file_holds():
    text = str(RecordError("column\u2028 of\nlines " + "x" * 10_000 + ": keep one"))
    assert len(text.splitlines()) == 1
    assert text.startswith("column  of lines x")
    assert text.endswith("x: keep one")
    assert len(text) < 1100


def test_a_number_that_its_column_cannot_hold_is_unknown_and_no_row_is_lost(tmp_path):
    path = tmp_path / "requests.arrow"
    wild = [{}, {"end_ns": 2**63, "max_tokens": 2**31}, {"end_ns": 10**30, "max_tokens": -1}]
    write_rows(path, [row(index) | change for index, change in enumerate(wild)], batch=3)
    rows = read_table(path, REQUESTS)[0]
    assert rows["end_ns"].to_pylist()[1:] == [None, None]
    assert rows["max_tokens"].to_pylist() == [None, None, -1]


BATCHES = 40


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "requests.arrow"
    write_rows(path, [row(index) for index in range(BATCHES)])
    return path


def read(path):
    """The numbers of the rows that are read, and what is said of the file."""
    table, problems = read_table(path, REQUESTS)
    return [int(name.split("-")[1]) for name in table.column("request_id").to_pylist()], problems


def batches(path):
    """Where each batch of the file begins."""
    content = path.read_bytes()
    starts, reader = [], pa.BufferReader(content)
    pa.ipc.read_schema(reader)
    for _ in range(BATCHES):
        starts.append(reader.tell())
        pa.ipc.read_message(reader)
    return starts


def test_what_was_written_is_counted_and_read(path):
    assert read_end(path) == (BATCHES, True)
    assert read(path) == (list(range(BATCHES)), ())
    with path.open("rb") as file:
        assert pa.ipc.open_stream(file).read_all().num_rows == BATCHES


UNUSABLE = (NOT_AS_WRITTEN,)


def test_no_row_of_a_file_that_is_not_as_it_was_written_is_used(path):
    starts, whole = batches(path), path.read_bytes()
    zeros = whole[: starts[11]] + bytes(starts[20] - starts[11]) + whole[starts[20] :]
    swapped = whole[: starts[5]] + whole[starts[6] : starts[7]] + whole[starts[5] : starts[6]] + whole[starts[7] :]
    for content in (zeros, bytes(200) + whole[200:], swapped, whole[: starts[6]] + whole[starts[5] :]):
        path.write_bytes(content)
        assert read(path) == ([], UNUSABLE)


@pytest.mark.parametrize("with_row_count", [True, False], ids=["with_row_count", "without_row_count"])
@pytest.mark.parametrize("flips", [1, 20])
def test_flipped_bits_lose_rows_and_nothing_else(path, with_row_count, flips):
    if not with_row_count:
        unstate(path)
    whole = path.read_bytes()
    expected = read_table(path, REQUESTS)[0].to_pylist()
    rng = random.Random(flips)
    for _ in range(40):
        content = bytearray(whole)
        for _ in range(flips):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        with contextlib.nullcontext() if with_row_count else contextlib.suppress(RecordError):
            table, problems = read_table(path, REQUESTS)
        if with_row_count:
            assert problems
            assert flips > 1 or all(row in expected for row in table.to_pylist())


@pytest.mark.parametrize("at", [0.2, 0.6])
def test_zeros_in_a_file_without_its_last_line_are_no_end(path, at):
    """Arrow takes them for the mark of the end and stops there."""
    unstate(path)
    content = bytearray(path.read_bytes())
    start = content.index(b"\xff\xff\xff\xff", int(at * len(content)))
    content[start : start + 1000] = bytes(1000)
    path.write_bytes(content)
    rows, (problem,) = read(path)
    assert len(rows) < BATCHES
    assert problem == CUT_OFF


@pytest.mark.parametrize("more", [0, 8])
def test_a_file_without_its_last_line_is_cut_off(path, more):
    unstate(path)
    path.write_bytes(path.read_bytes()[: -more or None])
    assert read(path) == (list(range(BATCHES)), (CUT_OFF,))


def test_a_disk_that_is_full_for_a_while_costs_nothing(tmp_path):
    writer = RecordWriter(tmp_path / "requests.arrow", REQUESTS)
    writer.append(row(0))
    writer.flush()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer.append(row(1))
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "requests.arrow").stat().st_size + 500, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            writer.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    writer.close()
    assert read(tmp_path / "requests.arrow") == ([0, 1], ())


def test_a_file_that_exists_is_not_written_over(path):
    with pytest.raises(FileExistsError):
        RecordWriter(path, REQUESTS)


CONTENT = {"trial": 1, "planned": {"eager": 120, "compiled": 120}, "block_s": 30.0, "complete": True, "name": "é"}


def test_what_was_written_is_read(tmp_path):
    write_document(tmp_path / "trial.json", CONTENT, indent=2)
    (tmp_path / "of-another-tool.json").write_text(json.dumps(CONTENT))
    for name in ("trial.json", "of-another-tool.json"):
        assert read_document(tmp_path / name) == (CONTENT, "")
    assert read_document(tmp_path / "none.json") == (None, "")


def test_no_change_of_meaning_is_overlooked(tmp_path):
    path = tmp_path / "trial.json"
    write_document(path, CONTENT)
    whole = path.read_bytes()
    rng = random.Random(1)
    for _ in range(300):
        content = bytearray(whole)
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        read, problem = read_document(path)
        # Where the name of the sum was hit, nothing else was.
        assert problem or {key: read[key] for key in CONTENT} == CONTENT


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[1]",
        '{"a": 123456789012345678901234567890}',
        "{",
        '{"a": 1} x',
        "[" * 700_000,
        '{"a":' * 350_000,
        '{"a": ' + "[" * 40 + "]" * 40 + "}",
    ],
    ids=lambda text: text[:12],
)
def test_what_is_no_shallow_table_is_not_readable(tmp_path, text):
    (tmp_path / "trial.json").write_text(text)
    assert read_document(tmp_path / "trial.json") == (None, "is not readable JSON")


def test_numbers_that_are_none_are_unknown():
    assert parse_json('{"a": NaN, "b": [Infinity, -Infinity, 1]}') == {"a": None, "b": [None, None, 1]}


def test_whole_lines_without_a_table_are_counted_and_a_torn_one_is_not(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n\n\xff\n[]\n' + b"[" * 5000 + b'\n{"a": 2}\n{"a"')
    assert read_rows(path) == ([{"a": 1}, {"a": 2}], 3)
    assert read_rows(tmp_path / "none") == ([], 0)
