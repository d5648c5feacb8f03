import itertools
import math

import numpy as np
import pyarrow as pa
import pytest

from analysis.records.placing import misplaced_requests
from analysis.records.requests import requests_of
from analysis.records.tables import RecordError
from tests.fakes.request_rows import T0, S, row, table_of


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

    def test_a_request_without_an_arm_is_left_out_and_counted(self):
        table = table_of([row(0), row(1) | {"arm": None}])
        assert len(requests_of(table)) == 1
        (unplaced,) = misplaced_requests(table, arms=(), trials=())
        assert (unplaced.rows, unplaced.arm) == (1, None)

    def test_requests_of_which_none_names_an_arm_are_refused(self):
        with pytest.raises(RecordError, match="1 request names no arm"):
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

    def test_a_first_token_at_0_is_unknown(self):
        requests = requests_of(table_of([row(0, first_token_ns=0), row(1, first_token_ns=None)]))
        assert requests.ttft_ms[0] == pytest.approx(requests.ttft_ms[1], nan_ok=True)
        assert requests.broken[0] == requests.broken[1]
