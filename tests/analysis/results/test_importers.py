"""Result files of other load tools: the columns of a request, how requests were sent, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.records.tables import RecordError
from analysis.results import aiperf, guidellm, inference_perf, vllm
from tests.fakes import results
from tests.fakes.results import EPOCH_S, Sent, in_turn, traffic

ONE = Sent(due_s=2.0, late_s=0.5, first_s=0.25, gaps_s=(0.125, 0.25), prompt_tokens=7)
FAILED = Sent(due_s=3.0, error="Bad Gateway")
EPOCH_NS = int(EPOCH_S) * 10**9
TIMES = [250_000_000, 375_000_000, 625_000_000]


def changed(line: dict[str, Any], table: str, **changes: object) -> dict[str, Any]:
    return {**line, table: {**line[table], **changes}}


def timed(**changes: object) -> dict[str, Any]:
    """GuideLLM's report of two requests, with other timings of the first."""
    document = results.guidellm([ONE, ONE])
    document["benchmarks"][0]["requests"]["successful"][0]["info"]["timings"] |= changes
    return document


@pytest.mark.parametrize(
    ("read", "scheduled", "tokens"),
    [
        (lambda: aiperf.result_of(results.aiperf([ONE, FAILED]), results.aiperf_summary(2)), True, TIMES),
        (lambda: guidellm.result_of(results.guidellm([ONE, FAILED])), True, None),
        (lambda: vllm.result_of(results.vllm([ONE, FAILED])), True, TIMES),
        (lambda: inference_perf.result_of(results.inference_perf([ONE, FAILED])), False, TIMES),
    ],
    ids=["AIPerf", "GuideLLM", "vLLM", "inference-perf"],
)
def test_latency_counts_from_the_schedule_where_the_tool_keeps_one(
    read: Callable[[], Any], scheduled: bool, tokens: list[int] | None
) -> None:
    first, second = read().requests.to_pylist()
    if scheduled:
        assert first["sent_ns"] - first["scheduled_ns"] == pytest.approx(500_000_000, abs=1_000)
    else:
        assert first["scheduled_ns"] is None
    assert first["first_token_ns"] - first["sent_ns"] == pytest.approx(250_000_000, abs=1_000)
    assert first["end_ns"] - first["sent_ns"] == pytest.approx(625_500_000, abs=501_000)
    assert first["token_ns"] == tokens
    assert (first["status"], first["prompt_tokens"], first["output_tokens"]) == ("OK", 7, 3)
    assert (second["status"], second["first_token_ns"]) == ("UNKNOWN", None)
    assert "Bad Gateway" in second["error"]


def test_tools_that_say_when_keep_the_time_of_the_day() -> None:
    for read in (aiperf.result_of(results.aiperf([ONE])), guidellm.result_of(results.guidellm([ONE]))):
        assert read.requests["sent_ns"].to_pylist() == [pytest.approx(EPOCH_NS + 2_500_000_000, abs=1_000)]
    (row,) = vllm.result_of(results.vllm([ONE], date="20260102-030405")).requests.to_pylist()
    assert row["end_ns"] == 1_767_323_045 * 10**9


def of_vllm(**changes: object) -> Any:
    return vllm.result_of(results.vllm(traffic(60), **changes))


def of_aiperf(**phase: object) -> Any:
    return aiperf.result_of(results.aiperf(traffic(10)), results.aiperf_summary(40, **phase))


def of_guidellm(**strategy: object) -> Any:
    return guidellm.result_of(results.guidellm(traffic(10), **strategy))


@pytest.mark.parametrize(
    ("read", "changes", "open_loop", "concurrency"),
    [
        (of_vllm, {}, True, None),
        (of_vllm, {"max_concurrency": 8}, True, 8),
        (of_vllm, {"max_concurrency": 8, "queue_times": None}, False, 8),
        (of_vllm, {"request_rate": "inf", "max_concurrency": 8}, False, 8),
        (of_vllm, {"request_rate": "inf", "ramp_up_strategy": "linear"}, True, None),
        (of_vllm, {"request_rate": "inf"}, True, None),  # --self-timed: the data set says when
        (of_aiperf, {}, True, None),
        (of_aiperf, {"type": "fixed_schedule", "rate": None}, True, None),
        (of_aiperf, {"concurrency": 9}, False, 9),
        (of_aiperf, {"type": "concurrency", "concurrency": 3}, False, 3),
        (of_aiperf, {"type": "user_centric", "users": 4}, False, None),
        (of_guidellm, {}, True, None),
        (of_guidellm, {"type_": "constant"}, True, None),
        (of_guidellm, {"type_": "trace"}, True, None),
        (of_guidellm, {"type_": "synchronous"}, False, None),
        (of_guidellm, {"type_": "concurrent", "streams": 8}, False, 8),
        (of_guidellm, {"type_": "throughput"}, False, None),
        (of_guidellm, {"type_": "tides"}, None, None),
    ],
)
def test_whether_the_load_was_an_open_loop_follows_from_its_settings(
    read: Callable[..., Any], changes: dict[str, object], open_loop: bool | None, concurrency: int | None
) -> None:
    result = read(**changes)
    assert (result.open_loop, result.concurrency) == (open_loop, concurrency)
    if read is not of_vllm:
        assert (result.requests["scheduled_ns"].null_count == 0) is (open_loop is True)


def test_a_load_without_a_schedule_has_no_scheduled_times() -> None:
    burst = [Sent(due_s=0.0, first_s=1.0 + place) for place in range(20)]
    assert vllm.result_of(results.vllm(burst, request_rate="inf")).open_loop is False
    closed = vllm.result_of(results.vllm(in_turn(traffic(30)), request_rate="inf", max_concurrency=2))
    assert closed.requests["scheduled_ns"].null_count == closed.requests.num_rows
    assert aiperf.result_of(results.aiperf([ONE])).open_loop is None, "its summary is missing"
    assert inference_perf.result_of(results.inference_perf([ONE])).open_loop is None
    older = results.vllm([ONE])
    del older["latencies"], older["queue_times"]
    assert vllm.result_of(older).requests["scheduled_ns"].to_pylist() == [None]


def test_contradictions_in_a_file_are_problems() -> None:
    assert len(vllm.result_of(results.vllm([ONE, FAILED], completed=2)).problems) == 1
    assert vllm.result_of(results.vllm([ONE, FAILED])).problems == ()
    stopped = {**results.aiperf_summary(1), "is_complete": False, "incomplete_reason": "stalled"}
    assert "stalled" in aiperf.result_of(results.aiperf([ONE]), stopped).problems[0]
    early = guidellm.result_of(timed(targeted_start=-0.75))
    assert early.requests["scheduled_ns"].null_count == len(early.problems) == 1


def test_warm_up_and_cancelled_requests_of_aiperf_are_marked() -> None:
    warm, cut = results.aiperf([ONE, ONE])
    lines = [changed(warm, "metadata", benchmark_phase="warmup"), changed(cut, "metadata", was_cancelled=True)]
    first, second = aiperf.result_of(lines).requests.to_pylist()
    assert (first["phase"], second["phase"], second["status"]) == ("rampup", "measure", "CANCELLED")


def test_the_count_of_a_sampled_report_is_that_of_all_requests() -> None:
    document = results.guidellm(traffic(10))
    kept = document["benchmarks"][0]["requests"]
    kept["successful"] = kept["successful"][:5]
    result = guidellm.result_of(document)
    assert (result.requests.num_rows, result.sent) == (5, 40)
    assert aiperf.result_of(results.aiperf([ONE]), results.aiperf_summary(480)).sent == 480


@pytest.mark.parametrize(
    ("table", "changes", "said"),
    [
        ("metadata", {"request_start_ns": None}, "request_start_ns None in line 1"),
        ("metadata", {"request_start_ns": -5}, "request_start_ns -5"),
        ("metadata", {"credit_issued_ns": 10**19}, "credit_issued_ns 10000000000000000000"),
        ("metrics", {"request_latency": {"value": -1.0, "unit": "ms"}}, "request_latency[0] is -1.0"),
        ("metrics", {"time_to_first_token": {"value": 1, "unit": "s"}}, "time_to_first_token in 's'"),
        ("metrics", {"inter_chunk_latency": {"value": [1, None], "unit": "ms"}}, "inter_chunk_latency[1] is null"),
    ],
)
def test_a_value_of_aiperf_that_cannot_be_read_is_named(table: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(RecordError) as caught:
        aiperf.result_of([changed(*results.aiperf([ONE]), table, **changes)])
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ttfts": ...}, "--save-detailed"),
        ({"itls": [[]]}, "itls 1"),
        ({"latencies": [1.0]}, "latencies 1"),
        ({"errors": "none"}, "errors"),
        ({"ttfts": [0.1, -0.5]}, "ttfts[1] is -0.5"),
        ({"ttfts": [None, 0.1]}, "ttfts[0] is null"),
        ({"start_times": [math.inf, 1.0]}, "start_times[0] is inf"),
        ({"start_times": [10**400, 1.0]}, "start_times[0] is 1000"),
        ({"itls": [[0.1], [0.1, "x"]]}, "itls[1][1] is 'x'"),
        ({"itls": [0.1, 0.2]}, "itls[0] is 0.1"),
        ({"output_lens": [3, 2**31]}, "output_lens[1] is 2147483648"),
    ],
)
def test_a_value_of_vllm_that_cannot_be_read_is_named(changes: dict[str, Any], said: str) -> None:
    document = {key: value for key, value in (results.vllm([ONE, FAILED]) | changes).items() if value is not ...}
    with pytest.raises(RecordError) as caught:
        vllm.result_of(document)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("read", "said"),
    [
        *((lambda at=at: guidellm.result_of(timed(request_start=at)), repr(at)) for at in (-1.0, "soon", 1e12, True)),
        (lambda: guidellm.result_of({"benchmarks": results.guidellm([ONE])["benchmarks"] * 3}), "3 benchmarks"),
        (lambda: guidellm.result_of(results.guidellm([])), "summary alone"),
        (
            lambda: inference_perf.result_of([{**row, "info": None} for row in results.inference_perf([ONE])]),
            "per_request_fields.info: true",
        ),
        (
            lambda: inference_perf.result_of([{**row, "start_time": None} for row in results.inference_perf([ONE])]),
            "start_time[0] is null",
        ),
        (
            lambda: inference_perf.result_of([{**row, "end_time": -1} for row in results.inference_perf([ONE])]),
            "end_time[0] is -1",
        ),
    ],
)
def test_a_report_that_cannot_be_read_is_refused_with_the_value(read: Callable[[], Any], said: str) -> None:
    with pytest.raises(RecordError) as caught:
        read()
    assert said in str(caught.value)


def test_several_phases_of_aiperf_are_refused() -> None:
    summary = results.aiperf_summary(1)
    summary["input_config"]["phases"] *= 2
    with pytest.raises(RecordError, match="2 phases"):
        aiperf.result_of(results.aiperf([ONE]), summary)


SECONDS = st.floats(0.0, 100.0).map(lambda value: round(value, 6))
SENT = st.builds(
    Sent,
    due_s=SECONDS,
    late_s=SECONDS,
    first_s=SECONDS.map(lambda value: value + 0.001),
    gaps_s=st.lists(SECONDS, max_size=5),
    error=st.sampled_from(["", "", "broken"]),
)


@settings(max_examples=25)
@given(st.lists(SENT, min_size=1, max_size=8))
def test_any_request_has_its_times_in_order(requests: list[Sent]) -> None:
    for row, request in zip(vllm.result_of(results.vllm(requests)).requests.to_pylist(), requests, strict=True):
        assert 0 < row["scheduled_ns"] <= row["sent_ns"] <= row["end_ns"]
        assert abs(row["sent_ns"] - row["scheduled_ns"] - request.late_s * 1e9) < 1_000
        if not request.error:
            assert row["sent_ns"] < row["first_token_ns"] <= row["end_ns"] + 1
            assert len(row["token_ns"]) == request.tokens
