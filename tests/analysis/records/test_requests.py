"""What a file of asked answers holds is taken for what it is, or not at all."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailgate.analysis.records import request_columns
from tailgate.analysis.records import requests as requests_module
from tailgate.analysis.records.asked_answers import answers_in
from tailgate.analysis.records.placing import misplaced_requests
from tailgate.analysis.records.request_columns import ColumnBuilder, first_rows
from tailgate.analysis.records.requests import requests_of
from tailgate.analysis.records.run_records import read_run
from tailgate.analysis.records.tables import RecordError
from tailgate.analysis.records.weight_journal import JOURNAL, WeightChange, append, read_journal
from tailgate.analysis.summary.summary import analyze
from tests.fakes.request_rows import T0, S, columns_of, row, table_of, write_rows
from tests.fakes.runs import FakeRun, write_run


class TestLatency:
    @pytest.mark.parametrize(
        ("change", "ttft_ms", "e2e_ms", "tpot_ms"),
        [
            ({"sent_ns": T0 + 3 * S // 100}, 100.0, 500.0, 100.0),  # it counts from the schedule
            ({"scheduled_ns": None}, 100.0, 500.0, 100.0),
            ({"status": "UNAVAILABLE", "ttft_s": None, "e2e_s": 0.01}, 60_000.0, 60_000.0, 60_000.0),
            ({"status": "INTERNAL"}, 100.0, 60_000.0, 60_000.0),  # after the first token
            ({"status": "DEADLINE_EXCEEDED", "e2e_s": 70}, 100.0, 70_000.0, 70_000.0),
        ],
    )
    def test_an_answer_counts_from_its_schedule_and_a_failure_with_its_deadline(self, change, ttft_ms, e2e_ms, tpot_ms):
        requests = requests_of(columns_of([row(0, **change)]), deadline_ms=60_000)
        assert (requests.ttft_ms, requests.e2e_ms, requests.metric_ms("tpot")) == (ttft_ms, e2e_ms, tpot_ms)

    def test_only_a_request_with_a_schedule_has_a_lag(self):
        requests = requests_of(columns_of([row(0, sent_ns=T0 + 3 * S // 100), row(1, scheduled_ns=None)]))
        np.testing.assert_array_equal(requests.lag_ms(np.array([0, 1])), [30.0, math.nan])

    def test_longest_gap_is_taken_within_each_request(self):
        rows = [
            row(0, token_ns=[0, 10_000_000, 40_000_000]),
            row(1, token_ns=None),
            row(2, token_ns=[900_000_000]),
            row(3, token_ns=[5_000_000, 6_000_000]),
        ]
        requests = requests_of(columns_of(rows))
        np.testing.assert_array_equal(requests.max_itl_ms, [30.0, math.nan, math.nan, 1.0])
        assert requests.gaps_ms.tolist() == [10.0, 30.0, 1.0]

    def test_only_an_answer_of_two_tokens_or_more_has_a_tpot(self):
        cut = row(3, status="CANCELLED", e2e_s=20)
        columns = columns_of([row(0), row(1, output_tokens=1), row(2, ttft_s=None), cut, row(4, error="broken off")])
        requests = requests_of(columns, deadline_ms=60_000)
        np.testing.assert_array_equal(requests.metric_ms("tpot"), [100.0, math.nan, math.nan, math.nan, 60_000.0])
        np.testing.assert_array_equal(requests.metric_ms("tpot", np.array([4, 1])), [60_000.0, math.nan])
        assert np.isnan(requests_of(columns, deadline_ms=60_000, tokens=False).metric_ms("tpot")).all()

    def test_a_long_wait_cut_by_the_end_counts_and_a_short_one_does_not(self):
        done = [row(index, at_s=index, e2e_s=1.0) for index in range(5)]
        long = row(6, at_s=10, e2e_s=20, ttft_s=None, status="CANCELLED")
        short = row(7, at_s=29.9, e2e_s=0.1, ttft_s=None, status="CANCELLED")
        requests = requests_of(columns_of([*done, long, short]))
        assert requests.cut.tolist() == [False] * 5 + [True, True]
        assert requests.e2e_ms[5] == 20_000.0
        assert math.isnan(requests.e2e_ms[6])

    def test_connections_that_broke_with_a_run_that_was_killed_are_cut_off_and_not_failed(self):
        early, late = row(0, status="UNAVAILABLE"), row(1, at_s=99.8, status="UNAVAILABLE", ttft_s=None)
        refused = row(2, at_s=99.8, status="RESOURCE_EXHAUSTED", ttft_s=None)
        rows = [early, late, refused, row(3, at_s=99.9)]
        killed = requests_of(columns_of(rows), cut_short={1})
        assert killed.failed.tolist() == [True, False, True, False]
        assert killed.cut.tolist() == [False, True, False, False]
        assert requests_of(columns_of(rows)).failed.tolist() == [True, True, True, False]

    def test_a_cancel_in_mid_run_is_a_failure(self):
        requests = requests_of(columns_of([row(0, status="CANCELLED"), row(1, at_s=100)]))
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
        requests = requests_of(columns_of([row(0), row(1, **change)]))
        assert requests.broken.tolist() == [False, True]
        assert math.isnan(requests.e2e_ms[1])
        assert not (requests.ok | requests.failed | requests.cut)[1]

    def test_a_repeated_row_counts_once(self):
        requests = requests_of(columns_of([row(0), row(0), row(0, arm="other"), row(1, request_id=None)]))
        assert (len(requests), requests.dropped) == (3, 1)

    def test_a_request_without_an_arm_is_left_out_and_counted(self):
        columns = columns_of([row(0), row(1) | {"arm": None}])
        assert len(requests_of(columns)) == 1
        (unplaced,) = misplaced_requests(columns, arms=(), trials=())
        assert unplaced.startswith("1 request that ended before")

    def test_requests_of_which_none_names_an_arm_are_refused(self):
        with pytest.raises(RecordError, match="1 request names no arm"):
            requests_of(columns_of([row(0) | {"arm": None}]))

    def test_one_id_on_two_arms_or_in_two_trials_is_no_repeat(self):
        rows = [row(0), row(0, arm="b", request_id="1-0-eager"), row(0, trial=2)]
        assert requests_of(columns_of(rows)).dropped == 0


def test_files_of_all_workers_and_trials_are_joined(tmp_path):
    run = write_run(tmp_path / "run", FakeRun(trials=2, duration_s=30, rate=1))
    extra = run / "trial-02" / "requests-1.arrow"
    write_rows(extra, [row(500, trial=None)])
    records = read_run(run)
    assert len(records.requests) == 2 * 2 * 30 + 1
    assert np.unique(records.requests.trial).tolist() == [1, 2]
    assert len(records.trials) == 2
    assert len(records.generators) == 2


def test_requests_in_the_folder_of_another_trial_are_damage(tmp_path):
    run = write_run(tmp_path / "run", FakeRun(trials=2, duration_s=30, rate=1))
    write_rows(run / "trial-02" / "requests-1.arrow", [row(0)])
    assert read_run(run).problems == ("trial-02/requests-1.arrow has 1 request of another trial",)


def test_a_run_that_memory_cannot_hold_is_refused_before_it_is_read(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", FakeRun(duration_s=30, rate=1))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    with pytest.raises(RecordError, match="GB are free: analyse it on a machine with more"):
        read_run(run)


def test_a_trial_cut_off_while_written_is_incomplete(tmp_path):
    run = write_run(tmp_path / "run", FakeRun(duration_s=30, rate=1))
    (run / "trial-01" / "trial.json").write_text('{"trial": 1, "comp')
    records = read_run(run)
    assert records.trials == ({"trial": 1, "machine": ""},)
    assert records.problems == ("trial-01/trial.json is not readable JSON",)


def test_a_damaged_decision_about_weights_is_reported(tmp_path):
    directory = write_run(tmp_path / "run", FakeRun())
    (directory / "weights.jsonl").write_bytes(b"\xff\n")
    assert "weights.jsonl has a line that is no decision" in read_run(directory).problems


TEXTS = st.lists(st.lists(st.one_of(st.none(), st.text(max_size=20)), max_size=8), max_size=6)


@settings(max_examples=40)
@given(TEXTS)
def test_equal_texts_have_one_first_row_and_one_code_in_the_order_of_the_alphabet(texts):
    builder = ColumnBuilder()
    for chunk in texts:
        builder.add(table_of([{**row(), "request_id": text, "replica": text} for text in chunk]))
    columns = builder.columns()
    flat = [text for chunk in texts for text in chunk]
    assert first_rows(columns.id).tolist() == [-1 if text is None else flat.index(text) for text in flat]
    assert list(columns.replicas) == sorted({text for text in flat if text is not None})
    assert [columns.replicas[code] if code >= 0 else None for code in columns.replica.tolist()] == flat


@given(st.lists(st.integers(-1, 2**31 - 1)))
def test_columns_widen_to_the_numbers_that_they_hold(tokens):
    builder = ColumnBuilder()
    for count in tokens:
        builder.add(table_of([row(prompt_tokens=count)]))
    assert builder.columns().prompt_tokens.tolist() == tokens


FULL = {"digest": "ab", "asked": 2, "replica": "eager-0", "text": "a b", "pieces": 2, "error": ""}


def test_answers_are_read_twice_with_what_was_asked() -> None:
    found = answers_in({"answers": [[FULL], [FULL]]})
    assert found is not None
    assert found[0] == found[1]
    [answer] = found[0]
    assert (answer.digest, answer.asked, answer.text, answer.pieces) == ("ab", 2, "a b", 2)


@pytest.mark.parametrize(
    "answers",
    [None, 3, [], [[], []], [[FULL]], [[FULL], []], [[FULL], 5], [[FULL]] * 3, [[FULL], [{**FULL, "text": 3}]]],
)
def test_document_of_another_form_holds_no_answers(answers: Any) -> None:
    assert answers_in({"answers": answers}) is None


def journal(folder: Path, *more: bytes) -> Path:
    append(folder, WeightChange(at_ns=5, weights={"eager": 90, "compiled": 10}, why="a step"))
    with (folder / JOURNAL).open("ab") as file:
        file.write(b"".join(more))
    return folder


def test_what_was_written_is_read_and_a_torn_end_is_no_damage(tmp_path: Path) -> None:
    (change,) = read_journal(journal(tmp_path, b'{"at_ns": 7, "weights": {"eag'))[0]
    assert (change.at_ns, change.weights, read_journal(tmp_path)[1]) == (5, {"eager": 90, "compiled": 10}, "")
    assert read_journal(tmp_path / "none")[0] == ()


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\n",
        b"[" * 5000 + b"\n",
        b'{"at_ns": 7}\n',
        b'{"at_ns": 1e999, "weights": {"eager": 1}}\n',
        b'{"at_ns": 9223372036854775808, "weights": {"eager": 1}}\n',
        b'{"at_ns": 7, "weights": {"eager": Infinity}}\n',
        b'{"at_ns": 7, "weights": {"eager": 1}, "shadows": {"dark": null}}\n',
    ],
)
def test_a_damaged_line_is_no_decision_and_is_reported(tmp_path: Path, line: bytes) -> None:
    assert len(read_journal(journal(tmp_path, line))[0]) == 1
    assert read_journal(tmp_path)[1] == "has a line that is no decision"
    assert read_journal(journal(tmp_path, line))[1] == "has 2 lines that are no decision"


def test_narrow_columns_are_judged_as_wide_ones(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", FakeRun(trials=2, duration_s=300, rate=2))
    narrow = analyze(run)
    for module in (request_columns, requests_module):
        wide = lambda values: values.astype(np.int64) if values.dtype.kind == "i" else values  # noqa: E731
        monkeypatch.setattr(module, "slim", wide)
    assert read_run(run).requests.trial.dtype == np.int64
    assert analyze(run) == narrow
