"""AIPerf's records: what each column of a request is made of, what the summary beside them adds, what is refused."""

from pathlib import Path

import pytest

from analysis.records.tables import RecordError
from analysis.results.aiperf import result_of, summary_path
from tests.fakes.results import EPOCH_S, Sent, aiperf, aiperf_summary, traffic

ONE = Sent(due_s=2.0, late_s=0.5, first_s=0.25, gaps_s=(0.125, 0.25), prompt_tokens=7)
FAILED = Sent(due_s=3.0, error="Bad Gateway")
EPOCH_NS = int(EPOCH_S) * 10**9


def changed(line: dict, table: str, **changes: object) -> dict:
    return {**line, table: {**line[table], **changes}}


def test_latency_counts_from_when_the_rate_limiter_let_the_request_go() -> None:
    first, second = result_of(aiperf([ONE, FAILED]), aiperf_summary(2)).requests.to_pylist()
    assert first["scheduled_ns"] == EPOCH_NS + 2_000_000_000
    assert first["sent_ns"] == EPOCH_NS + 2_500_000_000
    assert first["first_token_ns"] - first["sent_ns"] == 250_000_000
    assert first["end_ns"] - first["sent_ns"] == 625_000_000  # its own latency, which ends with the last piece
    assert first["token_ns"] == [250_000_000, 375_000_000, 625_000_000]
    assert (first["status"], first["request_id"], first["session_id"]) == ("OK", "request-0", "session-0")
    assert (second["status"], second["error"], second["first_token_ns"]) == ("UNKNOWN", "Bad Gateway", None)
    assert second["end_ns"] > second["sent_ns"]


def test_server_counts_tokens_before_the_client_does() -> None:
    (line,) = aiperf([ONE])
    assert result_of([line]).requests["output_tokens"].to_pylist() == [3]
    del line["metrics"]["usage_completion_tokens"], line["metrics"]["usage_prompt_tokens"]
    (row,) = result_of([line]).requests.to_pylist()
    assert (row["prompt_tokens"], row["output_tokens"]) == (4, 4)


@pytest.mark.parametrize(
    ("phase", "open_loop", "concurrency", "said"),
    [
        ({}, True, None, "rate limiter"),
        ({"type": "fixed_schedule", "rate": None}, True, None, "rate limiter"),
        ({"concurrency": 9}, False, 9, "at most 9 requests under way"),
        ({"type": "concurrency", "concurrency": 3}, False, 3, "kept 3 requests under way"),
        ({"type": "user_centric", "users": 4}, False, None, "users who waited"),
    ],
)
def test_how_requests_were_sent_is_in_the_summary(phase: dict, open_loop, concurrency, said: str) -> None:
    result = result_of(aiperf(traffic(10)), aiperf_summary(40, **phase))
    assert (result.open_loop, result.concurrency) == (open_loop, concurrency)
    assert said in result.pace
    assert (result.requests["scheduled_ns"].null_count == 0) is open_loop


def test_without_a_summary_nothing_is_known_of_the_load() -> None:
    result = result_of(aiperf([ONE]))
    assert (result.open_loop, result.load, result.sent, result.model) == (None, {}, None, None)
    assert "not known without the summary" in result.pace


def test_summary_says_model_load_and_count() -> None:
    result = result_of(aiperf([ONE]), aiperf_summary(480))
    assert (result.model, result.sent, result.load) == ("tiny", 480, {"type": "poisson", "rate": 4.0})


def test_warmup_is_no_measured_traffic_and_cancelled_requests_are_cut() -> None:
    warm, cut = aiperf([ONE, ONE])
    lines = [changed(warm, "metadata", benchmark_phase="warmup"), changed(cut, "metadata", was_cancelled=True)]
    first, second = result_of(lines).requests.to_pylist()
    assert (first["phase"], second["phase"]) == ("rampup", "measure")
    assert second["status"] == "CANCELLED"


def test_run_that_did_not_end_is_a_problem() -> None:
    summary = {**aiperf_summary(1), "is_complete": False, "incomplete_reason": "stalled"}
    assert result_of(aiperf([ONE]), summary).problems == ("is of a run that did not end (stalled)",)


def test_summary_lies_beside_the_records() -> None:
    assert summary_path(Path("a/profile_export.jsonl")) == Path("a/profile_export_aiperf.json")
    assert summary_path(Path("a/mine.jsonl")) == Path("a/mine.json")


@pytest.mark.parametrize(
    ("table", "changes", "said"),
    [
        ("metadata", {"request_start_ns": None}, "has request_start_ns None in line 1"),
        ("metadata", {"request_start_ns": -5}, "has request_start_ns -5"),
        ("metadata", {"credit_issued_ns": 10**19}, "has credit_issued_ns 10000000000000000000"),
        ("metadata", {"request_start_ns": 1.5}, "has request_start_ns 1.5"),
        ("metrics", {"request_latency": {"value": -1.0, "unit": "ms"}}, "request_latency[0] is -1.0, limits 0"),
        ("metrics", {"time_to_first_token": {"value": 1, "unit": "s"}}, "has time_to_first_token in 's'"),
        (
            "metrics",
            {"inter_chunk_latency": {"value": [1, None], "unit": "ms"}},
            "line 1: inter_chunk_latency[1] is null",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(table: str, changes: dict, said: str) -> None:
    with pytest.raises(RecordError) as caught:
        result_of([changed(*aiperf([ONE]), table, **changes)])
    assert said in str(caught.value)


def test_several_phases_are_refused() -> None:
    summary = aiperf_summary(1)
    summary["input_config"]["phases"] *= 2
    with pytest.raises(RecordError, match="of 2 phases"):
        result_of(aiperf([ONE]), summary)
