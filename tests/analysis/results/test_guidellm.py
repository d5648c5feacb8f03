"""GuideLLM's report: what each column of a request is made of, how it was sent, and what is refused."""

import pytest

from analysis.records.tables import RecordError
from analysis.results.guidellm import result_of
from tests.fakes.results import EPOCH_S, Sent, guidellm, traffic

ONE = Sent(due_s=2.0, late_s=0.5, first_s=0.25, gaps_s=(0.125, 0.25), prompt_tokens=7)
FAILED = Sent(due_s=3.0, error="Bad Gateway")
EPOCH_NS = int(EPOCH_S) * 10**9


def timings(document: dict, place: int = 0) -> dict:
    return document["benchmarks"][0]["requests"]["successful"][place]["info"]["timings"]


def test_latency_counts_from_the_targeted_start() -> None:
    first, second = result_of(guidellm([ONE, FAILED])).requests.to_pylist()
    assert abs(first["scheduled_ns"] - EPOCH_NS - 2_000_000_000) < 1_000
    assert abs(first["sent_ns"] - EPOCH_NS - 2_500_000_000) < 1_000
    assert abs(first["first_token_ns"] - first["sent_ns"] - 250_000_000) < 1_000
    assert abs(first["end_ns"] - first["sent_ns"] - 625_000_000) < 1_000
    assert (first["status"], first["prompt_tokens"], first["output_tokens"]) == ("OK", 7, 3)
    assert first["token_ns"] is None  # there is no time of each
    assert (second["status"], second["error"], second["first_token_ns"]) == ("UNKNOWN", "Bad Gateway", None)


@pytest.mark.parametrize(
    ("strategy", "open_loop", "concurrency", "said"),
    [
        ({}, True, None, "on schedule (poisson)"),
        ({"type_": "constant"}, True, None, "on schedule (constant)"),
        ({"type_": "trace"}, True, None, "on schedule (trace)"),
        ({"type_": "synchronous"}, False, None, "when the one before had ended (closed loop)"),
        ({"type_": "concurrent", "streams": 8}, False, 8, "kept 8 requests under way"),
        ({"type_": "concurrent", "streams": 1}, False, 1, "kept 1 request under way"),
        ({"type_": "throughput"}, False, None, "as in no traffic"),
        ({"type_": "tides"}, None, None, 'a strategy "tides" that is not known'),
    ],
)
def test_how_requests_were_sent_follows_from_the_strategy(strategy: dict, open_loop, concurrency, said: str) -> None:
    result = result_of(guidellm(traffic(10), **strategy))
    assert (result.open_loop, result.concurrency) == (open_loop, concurrency)
    assert said in result.pace
    assert (result.requests["scheduled_ns"].null_count == 0) is (open_loop is True)


def test_requests_targeted_before_the_run_began_have_no_schedule_and_are_a_problem() -> None:
    document = guidellm([ONE, ONE])
    timings(document)["targeted_start"] = -0.75
    result = result_of(document)
    assert result.requests["scheduled_ns"].null_count == 1
    assert result.problems == ("has 1 of 2 requests targeted before the run began, which were sent at once",)


def test_request_that_was_never_sent_is_none() -> None:
    document = guidellm([ONE, ONE])
    kept = document["benchmarks"][0]["requests"]
    kept["incomplete"] = [kept["successful"].pop(), {"info": {"timings": {"targeted_start": EPOCH_S + 9}}}]
    result = result_of(document)
    assert result.requests["status"].to_pylist() == ["OK", "CANCELLED"]


def test_count_of_a_sampled_report_is_that_of_all_requests() -> None:
    document = guidellm(traffic(10))
    document["benchmarks"][0]["requests"]["successful"] = document["benchmarks"][0]["requests"]["successful"][:5]
    result = result_of(document)
    assert (result.requests.num_rows, result.sent) == (5, 40)


def test_several_benchmarks_are_refused() -> None:
    document = guidellm([ONE])
    document["benchmarks"] *= 3
    with pytest.raises(RecordError, match="holds 3 benchmarks, each of a load of its own"):
        result_of(document)


def test_report_without_requests_is_refused_as_a_summary() -> None:
    document = guidellm([])
    with pytest.raises(RecordError, match="keeps no requests, so it is a summary alone: run it again without"):
        result_of(document)


@pytest.mark.parametrize("value", [-1.0, "soon", 1e12, True])
def test_moment_that_is_none_is_refused(value: object) -> None:
    document = guidellm([ONE])
    timings(document)["request_start"] = value
    with pytest.raises(RecordError, match=f"has request_start {value!r} in request 1, limits 0 and 3000000000"):
        result_of(document)
