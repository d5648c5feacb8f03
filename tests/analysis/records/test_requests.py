import itertools
import math

import numpy as np
import pyarrow as pa
import pytest

from analysis.records.requests import (
    COMPILE_EVENTS,
    REQUESTS,
    RecordError,
    RecordWriter,
    fingerprints,
    read_run,
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

    @pytest.mark.parametrize("phase", [None, "warmup", "serving"])
    def test_what_requests_waited_for_on_the_server_is_read_where_an_event_may_have_served(self, tmp_path, phase):
        write_rows(tmp_path / "requests.arrow", [row(queue_ns=7_000_000, server_recv_ns=T0, server_end_ns=T0 + S // 2)])
        if phase is not None:
            event = {"arm": "eager", "kind": "recompile", "phase": phase, "start_ns": T0, "end_ns": T0 + S}
            with RecordWriter(tmp_path / "compile_events.arrow", COMPILE_EVENTS) as writer:
                writer.append(event)
        requests = requests_of(read_run(tmp_path).requests)
        served = phase == "serving"
        assert requests.server_told.tolist() == [served]
        assert requests.queue_us.tolist() == [7000 if served else 0]

    def test_counts_are_wide_enough_to_be_worked_with(self, tmp_path):
        write_rows(tmp_path / "requests.arrow", [row(prompt_tokens=100, output_tokens=100, max_tokens=100, batch_id=3)])
        records = read_run(tmp_path)
        assert records.requests.column("output_tokens").type == pa.int8()
        requests = requests_of(records.requests)
        for column in (requests.prompt_tokens, requests.output_tokens, requests.max_tokens, requests.trial):
            assert column.dtype == np.int32

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
        assert records.problems == ("trial-01/trial.json is not readable JSON",)

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
        assert requests.lag_ms(np.array([0])).tolist() == [30.0]

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

    def test_the_first_of_repeated_rows_is_kept_with_all_its_columns(self):
        table = table_of([row(0, prompt_tokens=3), row(1, prompt_tokens=4), row(0, prompt_tokens=5), row(2)])
        requests = requests_of(table)
        assert requests.prompt_tokens.tolist() == [3, 4, -1]
        assert requests.request_ids.to_pylist() == ["1-0-eager", "1-1-eager", "1-2-eager"]

    def test_one_id_on_two_arms_or_in_two_trials_is_no_repeat(self):
        rows = [row(0), row(0, arm="b", request_id="1-0-eager"), row(0, trial=2)]
        assert requests_of(table_of(rows)).repeated == 0

    def test_copies_have_one_number_whichever_chunks_they_lie_in(self):
        names = ["a", "b", None, "c", "b", "a", None, "d"]
        rows = [row(index, pair_id=name) for index, name in enumerate(names)]
        for sizes in ([8], [4, 4], [1] * 8, [3, 0, 5]):
            edges = np.cumsum([0, *sizes])
            chunks = [table_of(rows[begin:end]) for begin, end in itertools.pairwise(edges)]
            pair = requests_of(pa.concat_tables(chunks)).pair.tolist()
            assert (pair[0], pair[1], pair[2], pair[6]) == (pair[5], pair[4], -1, -1)
            assert len(set(pair)) == 5
            assert max(pair) < len(rows)

    def test_many_copies_across_chunks_have_one_number_each(self):
        chunks = [table_of([row(index, pair_id=f"p{index}", arm=arm) for index in range(40)]) for arm in "ab"]
        chunks[1:1] = [table_of([row(index, pair_id=f"q{index}") for index in range(2000)])]
        pair = requests_of(pa.concat_tables(chunks)).pair
        assert pair[:40].tolist() == pair[-40:].tolist()
        assert len(np.unique(pair)) == 2040


class TestFingerprints:
    def test_texts_differ_in_them_as_they_differ(self):
        texts = [*(f"1-{index}-{arm}" for index in range(5000) for arm in ("eager", "compiled")), "", "a", "a\0", "\0a"]
        prints = fingerprints(pa.chunked_array([texts[:17], texts[17:]]))
        assert len(np.unique(prints)) == len(texts)
        whole = fingerprints(pa.chunked_array([pa.array(["x", *texts]).slice(1)]))
        assert whole.tolist() == prints.tolist()

    def test_a_long_text_has_none(self):
        assert fingerprints(pa.chunked_array([["x" * 65]])) is None

    def test_null_and_nothing_are_no_trouble(self):
        assert len(fingerprints(pa.chunked_array([[None, "a", None]], pa.string()))) == 3
        assert len(fingerprints(pa.chunked_array([], pa.string()))) == 0
