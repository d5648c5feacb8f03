import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from analysis.records import (
    COMPILE_EVENTS,
    REQUESTS,
    REQUIRED_REQUEST_COLUMNS,
    RecordError,
    RecordWriter,
    read_run,
    read_table,
    requests_of,
)
from tests.fakes.runs import FakeRun, write_run

S = 1_000_000_000
T0 = 1_700_000_000 * S


def row(index=0, *, at_s=0.0, ttft_s=0.1, e2e_s=0.5, status="OK", arm="eager", **more):
    start = T0 + int(at_s * S)
    return {
        "request_id": f"1-{index}-{arm}",
        "trial": 1,
        "arm": arm,
        "scheduled_ns": start,
        "sent_ns": start,
        "first_token_ns": None if ttft_s is None else start + int(ttft_s * S),
        "end_ns": start + int(e2e_s * S),
        "status": status,
        "output_tokens": 5,
    } | more


def table_of(rows):
    return pa.Table.from_pylist(rows, schema=REQUESTS)


def write_rows(path, rows, *, batch=1):
    with RecordWriter(path, REQUESTS) as writer:
        for start in range(0, len(rows), batch):
            for item in rows[start : start + batch]:
                writer.append(item)
            writer.flush()


class TestWriting:
    def test_rows_come_back_as_they_went_in(self, tmp_path):
        path = tmp_path / "requests.arrow"
        rows = [row(index, token_ns=[1, 2, 3]) for index in range(5)]
        write_rows(path, rows, batch=2)
        table, torn = read_table(path, REQUESTS)
        assert not torn
        assert table.schema.equals(REQUESTS)
        assert table.to_pylist() == table_of(rows).to_pylist()

    def test_a_plain_arrow_reader_reads_the_file(self, tmp_path):
        path = tmp_path / "requests.arrow"
        write_rows(path, [row(index) for index in range(3)])
        with pa.ipc.open_stream(path.open("rb")) as stream:
            assert stream.read_all().num_rows == 3

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

    def test_columns_of_unequal_length_are_refused(self, tmp_path):
        with RecordWriter(tmp_path / "requests.arrow", REQUESTS) as writer:
            writer.append_columns({"arm": ["a", "b"], "status": ["OK", "OK"]})
            with pytest.raises(RecordError, match="one length"):
                writer.append_columns({"arm": ["a"], "status": ["OK", "OK"]})
        assert read_table(tmp_path / "requests.arrow", REQUESTS)[0].num_rows == 2


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

    def test_garbage_is_a_record_error(self, tmp_path):
        (tmp_path / "a.parquet").write_bytes(b"no parquet")
        with pytest.raises(RecordError, match="cannot be read"):
            read_table(tmp_path / "a.parquet", REQUESTS)


class TestRun:
    def test_files_of_all_workers_and_trials_are_joined(self, tmp_path):
        run = write_run(tmp_path / "run", FakeRun(trials=2, duration_s=30, rate=1))
        extra = run / "trial-02" / "requests-1.arrow"
        write_rows(extra, [row(500, trial=None)])
        records = read_run(run)
        assert records.requests.num_rows == 2 * 2 * 30 + 1
        assert sorted(set(records.requests.column("trial").to_pylist())) == [1, 2]
        assert len(records.trials) == 2
        assert len(records.generators) == 2

    def test_a_directory_without_requests_is_refused(self, tmp_path):
        with pytest.raises(RecordError, match="holds no requests"):
            read_run(tmp_path)

    def test_a_missing_directory_is_refused(self, tmp_path):
        with pytest.raises(RecordError, match="not a directory"):
            read_run(tmp_path / "nowhere")

    def test_a_trial_cut_off_while_written_is_incomplete(self, tmp_path):
        run = write_run(tmp_path / "run", FakeRun(duration_s=30, rate=1))
        (run / "trial-01" / "trial.json").write_text('{"trial": 1, "comp')
        records = read_run(run)
        assert records.trials == ({"trial": 1},)
        assert records.problems == ("trial.json is not readable JSON",)

    def test_a_broken_experiment_is_one_line(self, tmp_path):
        run = write_run(tmp_path / "run", FakeRun(duration_s=30, rate=1))
        (run / "experiment.toml").write_text("[gates\nmargin = ")
        with pytest.raises(RecordError, match=r"experiment\.toml") as error:
            read_run(run)
        assert "\n" not in str(error.value)


class TestLatency:
    def test_latency_counts_from_the_schedule(self):
        requests = requests_of(table_of([row(sent_ns=T0 + 3 * S // 100)]))
        assert requests.ttft_ms.tolist() == [100.0]
        assert requests.e2e_ms.tolist() == [500.0]
        assert requests.tpot_ms.tolist() == [100.0]
        assert requests.lag_ms.tolist() == [30.0]

    def test_sent_time_stands_in_for_a_missing_schedule(self):
        requests = requests_of(table_of([row(scheduled_ns=None)]))
        assert requests.e2e_ms.tolist() == [500.0]
        assert not requests.scheduled.any()

    def test_tpot_of_one_token_is_undefined(self):
        assert math.isnan(requests_of(table_of([row(output_tokens=1)])).tpot_ms[0])

    def test_longest_gap_is_taken_within_each_request(self):
        rows = [
            row(0, token_ns=[0, 10_000_000, 40_000_000]),
            row(1, token_ns=None),
            row(2, token_ns=[900_000_000]),
            row(3, token_ns=[5_000_000, 6_000_000]),
        ]
        requests = requests_of(table_of(rows))
        np.testing.assert_array_equal(requests.max_itl_ms, [30.0, math.nan, math.nan, 1.0])
        assert requests.gaps_ms.tolist() == [10.0, 30.0, 1.0]

    def test_a_failure_counts_with_its_deadline(self):
        rows = [row(0), row(1, status="UNAVAILABLE", ttft_s=None, e2e_s=0.01)]
        requests = requests_of(table_of(rows), deadline_ms=60_000)
        assert requests.e2e_ms.tolist() == [500.0, 60_000.0]
        assert requests.ttft_ms.tolist() == [100.0, 60_000.0]

    def test_a_failure_after_the_first_token_keeps_its_ttft(self):
        requests = requests_of(table_of([row(0, status="INTERNAL")]), deadline_ms=60_000)
        assert requests.ttft_ms.tolist() == [100.0]
        assert requests.e2e_ms.tolist() == [60_000.0]

    def test_a_failure_that_took_longer_than_the_deadline_counts_in_full(self):
        requests = requests_of(table_of([row(0, status="DEADLINE_EXCEEDED", e2e_s=70)]), deadline_ms=60_000)
        assert requests.e2e_ms.tolist() == [70_000.0]

    def test_a_long_wait_cut_by_the_end_counts_and_a_short_one_does_not(self):
        done = [row(index, at_s=index, e2e_s=1.0) for index in range(5)]
        long = row(6, at_s=10, e2e_s=20, ttft_s=None, status="CANCELLED")
        short = row(7, at_s=29.9, e2e_s=0.1, ttft_s=None, status="CANCELLED")
        requests = requests_of(table_of([*done, long, short]))
        assert requests.cut.tolist() == [False] * 5 + [True, True]
        assert requests.e2e_ms[5] == 20_000.0
        assert math.isnan(requests.e2e_ms[6])

    def test_connections_that_broke_with_a_run_that_was_killed_are_cut_off_and_not_failed(self):
        early, late = row(0, status="UNAVAILABLE"), row(1, at_s=99.8, status="UNAVAILABLE", ttft_s=None)
        refused = row(2, at_s=99.8, status="RESOURCE_EXHAUSTED", ttft_s=None)
        rows = [early, late, refused, row(3, at_s=99.9)]
        killed = requests_of(table_of(rows), cut_short={1})
        assert killed.failed.tolist() == [True, False, True, False]
        assert killed.cut.tolist() == [False, True, False, False]
        assert requests_of(table_of(rows)).failed.tolist() == [True, True, True, False]

    def test_a_cancel_in_mid_run_is_a_failure(self):
        requests = requests_of(table_of([row(0, status="CANCELLED"), row(1, at_s=100)]))
        assert requests.failed.tolist() == [True, False]

    @pytest.mark.parametrize(
        "change",
        [
            {"end_ns": T0 - 5},
            {"first_token_ns": T0 - 5},
            {"first_token_ns": T0 + 9 * S},
            {"token_ns": [5, 3]},
            {"scheduled_ns": None, "sent_ns": None},
            {"end_ns": None},
        ],
    )
    def test_times_that_run_backwards_or_lack_are_in_no_metric(self, change):
        requests = requests_of(table_of([row(0), row(1, **change)]))
        assert requests.broken.tolist() == [False, True]
        assert math.isnan(requests.e2e_ms[1])
        assert not (requests.ok | requests.failed | requests.cut)[1]

    def test_a_repeated_row_counts_once(self):
        requests = requests_of(table_of([row(0), row(0), row(0, arm="other"), row(1, request_id=None)]))
        assert (len(requests), requests.repeated) == (3, 1)

    def test_no_request_is_no_error(self):
        assert len(requests_of(REQUESTS.empty_table())) == 0

    def test_a_request_without_an_arm_is_refused(self):
        with pytest.raises(RecordError, match="name no arm"):
            requests_of(table_of([row(0) | {"arm": None}]))
