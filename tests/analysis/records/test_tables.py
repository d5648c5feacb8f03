import json
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from analysis.records.schemas import COMPILE_EVENTS, REQUESTS, REQUIRED_REQUEST_COLUMNS
from analysis.records.tables import RecordError, RecordWriter, read_pieces, read_table
from tests.fakes.request_rows import T0, row, table_of, write_rows


class TestWriting:
    def test_rows_come_back_as_they_went_in(self, tmp_path):
        path = tmp_path / "requests.arrow"
        rows = [row(index, token_ns=[1, 2, 3]) for index in range(5)]
        write_rows(path, rows, batch=2)
        table, torn = read_table(path, REQUESTS)
        assert not torn
        assert table.schema.equals(REQUESTS)
        assert table.to_pylist() == table_of(rows).to_pylist()

    def test_flushed_rows_are_readable_before_close(self, tmp_path):
        path = tmp_path / "requests.arrow"
        writer = RecordWriter(path, REQUESTS)
        writer.append(row())
        writer.flush()
        writer.append(row(1))
        assert read_table(path, REQUESTS)[0].num_rows == 1
        writer.close()
        assert read_table(path, REQUESTS)[0].num_rows == 2

    def test_a_closed_file_is_continued(self, tmp_path):
        path = tmp_path / "requests.arrow"
        write_rows(path, [row(0)])
        write_rows(path, [row(1)])
        table, torn = read_table(path, REQUESTS)
        assert (table.num_rows, torn) == (2, False)

    def test_a_torn_file_is_mended_before_it_is_continued(self, tmp_path):
        path = tmp_path / "requests.arrow"
        write_rows(path, [row(index) for index in range(3)])
        path.write_bytes(path.read_bytes()[:-60])
        write_rows(path, [row(9)])
        table, torn = read_table(path, REQUESTS)
        assert not torn
        assert table.column("request_id").to_pylist() == ["1-0-eager", "1-1-eager", "1-9-eager"]

    def test_other_columns_are_not_appended_to_a_file(self, tmp_path):
        path = tmp_path / "requests.arrow"
        write_rows(path, [row()])
        with pytest.raises(RecordError, match="other columns"):
            RecordWriter(path, COMPILE_EVENTS)


class TestReading:
    def test_every_cut_loses_at_most_the_torn_batch(self, tmp_path):
        path = tmp_path / "requests.arrow"
        write_rows(path, [row(index) for index in range(4)])
        whole = path.read_bytes()
        held = []
        for size in [*range(0, len(whole), 97), len(whole)]:
            path.write_bytes(whole[:size])
            table, _ = read_table(path, REQUESTS)
            names = table.column("request_id").to_pylist()
            assert names == [f"1-{index}-eager" for index in range(len(names))]
            held.append(len(names))
        assert held == sorted(held)
        assert set(held) == {0, 1, 2, 3, 4}

    def test_a_cut_within_the_last_batch_is_reported(self, tmp_path):
        path = tmp_path / "requests.arrow"
        write_rows(path, [row(index) for index in range(4)])
        path.write_bytes(path.read_bytes()[:-40])
        table, torn = read_table(path, REQUESTS)
        assert (table.num_rows, torn) == (3, True)

    def test_parquet_and_json_lines_equal_arrow(self, tmp_path):
        rows = [row(index, token_ns=[0, 5]) for index in range(3)]
        write_rows(tmp_path / "a.arrow", rows)
        pq.write_table(table_of(rows), tmp_path / "a.parquet")
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(item) + "\n" for item in rows))
        tables = [read_table(tmp_path / f"a.{kind}", REQUESTS)[0] for kind in ("arrow", "parquet", "jsonl")]
        assert tables[0].to_pylist() == tables[1].to_pylist() == tables[2].to_pylist()

    def test_a_torn_json_line_is_dropped_and_reported(self, tmp_path):
        text = json.dumps(row(0)) + "\n" + json.dumps(row(1))[:-10]
        (tmp_path / "a.jsonl").write_text(text)
        table, torn = read_table(tmp_path / "a.jsonl", REQUESTS)
        assert (table.num_rows, torn) == (1, True)

    @pytest.mark.parametrize(
        "line",
        ["null", "[1, 2]", "7", "{", '{"a":' + "[" * 50_000, '{"a": "\\ud800"}', "\x00\x00", "\ufeff{}"],
        ids=lambda line: line[:8],
    )
    def test_a_line_that_is_no_table_costs_itself(self, tmp_path, line):
        """Arrow's reader ends the process on some of them."""
        lines = [json.dumps(row(0)), line, json.dumps(row(1))]
        (tmp_path / "a.jsonl").write_text("".join(item + "\n" for item in lines))
        tables = []
        problems = read_pieces(tmp_path / "a.jsonl", REQUESTS, tables.append)
        assert sum(table.num_rows for table in tables) == 2
        assert problems == ("has a line that is no table of JSON",)

    @pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
    def test_numbers_that_json_does_not_have_are_unknown(self, tmp_path, number):
        text = json.dumps(row(0) | {"end_ns": "@"}).replace('"@"', number)
        (tmp_path / "a.jsonl").write_text(text + "\n" + json.dumps(row(1)) + "\n")
        table, torn = read_table(tmp_path / "a.jsonl", REQUESTS)
        assert table.column("end_ns").null_count == 1
        assert not torn

    def test_a_missing_server_column_is_null(self, tmp_path):
        pq.write_table(table_of([row()]).drop_columns(["queue_ns"]), tmp_path / "a.parquet")
        assert read_table(tmp_path / "a.parquet", REQUESTS)[0].column("queue_ns").null_count == 1

    def test_a_missing_required_column_is_named(self, tmp_path):
        pq.write_table(table_of([row()]).drop_columns(["end_ns"]), tmp_path / "a.parquet")
        with pytest.raises(RecordError, match='column "end_ns" is missing') as error:
            read_table(tmp_path / "a.parquet", REQUESTS, required=REQUIRED_REQUEST_COLUMNS)
        assert "\n" not in str(error.value)

    def test_text_in_place_of_a_time_is_named(self, tmp_path):
        pq.write_table(pa.table({"arm": ["a"], "status": ["OK"], "end_ns": ["soon"]}), tmp_path / "a.parquet")
        with pytest.raises(RecordError, match='column "end_ns" holds string'):
            read_table(tmp_path / "a.parquet", REQUESTS)

    def test_not_a_number_in_a_time_is_unknown(self, tmp_path):
        pq.write_table(pa.table({"arm": ["a"] * 3, "end_ns": [1e18, math.nan, math.inf]}), tmp_path / "a.parquet")
        table, _ = read_table(tmp_path / "a.parquet", REQUESTS)
        assert table.column("end_ns").to_pylist() == [10**18, None, None]

    def test_timestamps_are_taken_as_ns(self, tmp_path):
        stamps = pa.array([T0 // 1000], pa.timestamp("us"))
        pq.write_table(pa.table({"arm": ["a"], "end_ns": stamps}), tmp_path / "a.parquet")
        assert read_table(tmp_path / "a.parquet", REQUESTS)[0].column("end_ns").to_pylist() == [T0]

    def test_a_large_file_comes_in_pieces(self, tmp_path):
        batch = table_of([row(index) for index in range(1000)]).to_batches()[0]
        with (tmp_path / "a.arrow").open("wb") as file, pa.ipc.new_stream(file, REQUESTS) as stream:
            for _ in range(100):
                stream.write_batch(batch)
        seen = []
        torn = read_pieces(tmp_path / "a.arrow", REQUESTS, seen.append)
        assert not torn
        assert len(seen) > 1
        assert sum(table.num_rows for table in seen) == 100_000

    def test_an_arrow_file_with_a_footer_is_read(self, tmp_path):
        with (tmp_path / "a.arrow").open("wb") as file, pa.ipc.new_file(file, REQUESTS) as writer:
            writer.write_table(table_of([row(0)]))
        assert read_table(tmp_path / "a.arrow", REQUESTS)[0].to_pylist() == table_of([row(0)]).to_pylist()


def test_a_column_that_a_parquet_file_has_twice_is_one_line(tmp_path):
    rows = table_of([row()])
    pq.write_table(rows.append_column("arm", rows.column("arm")), tmp_path / "requests.parquet")
    with pytest.raises(RecordError, match=r'requests\.parquet: column "arm" appears 2 times'):
        read_table(tmp_path / "requests.parquet", REQUESTS)


def test_an_error_is_one_line_whatever_a_file_holds():
    told = str(RecordError("column\u2028 of\nlines " + "x" * 10_000 + ": keep one"))
    assert len(told.splitlines()) == 1
    assert told.startswith("column  of lines x")
    assert told.endswith("x: keep one")
    assert len(told) < 1100


def test_a_number_that_its_column_cannot_hold_is_unknown_and_no_row_is_lost(tmp_path):
    path = tmp_path / "requests.arrow"
    write_rows(
        path, [row(0), row(1) | {"end_ns": 2**63, "turn": 2**31}, row(2) | {"end_ns": 10**30, "turn": -1}], batch=3
    )
    rows = read_table(path, REQUESTS)[0]
    assert rows["end_ns"].to_pylist()[1:] == [None, None]
    assert rows["turn"].to_pylist() == [None, None, -1]
