"""vLLM's result file: what each column of a request is made of, how it was sent, and what is refused."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.records.tables import RecordError
from analysis.results.vllm import result_of
from tests.fakes.results import Sent, in_turn, traffic, vllm

ONE = Sent(due_s=2.0, late_s=0.5, first_s=0.25, gaps_s=(0.125, 0.25), prompt_tokens=7)
FAILED = Sent(due_s=3.0, late_s=0.0, error="Bad Gateway")


def rows(document: dict) -> list[dict]:
    return result_of(document).requests.to_pylist()


def test_latency_counts_from_when_the_client_took_the_request_up() -> None:
    first, second = rows(vllm([ONE, FAILED]))
    assert first["sent_ns"] - first["scheduled_ns"] == 500_000_000
    assert first["first_token_ns"] - first["sent_ns"] == 250_000_000
    assert first["end_ns"] - first["sent_ns"] == 625_000_000
    assert first["token_ns"] == [250_000_000, 375_000_000, 625_000_000]
    assert (first["status"], first["prompt_tokens"], first["output_tokens"]) == ("OK", 7, 3)
    assert second["sent_ns"] - first["sent_ns"] == 500_000_000
    assert (second["status"], second["error"], second["first_token_ns"]) == ("UNKNOWN", "Bad Gateway", None)


def test_last_end_lies_at_the_date_of_the_file() -> None:
    result = rows(vllm([ONE], date="20260102-030405"))
    assert result[0]["end_ns"] == 1_767_323_045 * 10**9


def test_file_without_a_date_keeps_the_counter_of_the_host() -> None:
    assert rows(vllm([ONE], date="today"))[0]["sent_ns"] == 5_002_750_000_000


def test_older_version_ends_with_its_last_piece_and_counts_from_the_send() -> None:
    document = vllm([ONE])
    del document["latencies"], document["queue_times"]
    result = result_of(document)
    (row,) = result.requests.to_pylist()
    assert (row["scheduled_ns"], row["end_ns"] - row["sent_ns"]) == (None, 625_000_000)
    assert result.open_loop is True
    assert "from when a request was sent" in result.pace


@pytest.mark.parametrize(
    ("changes", "open_loop", "said"),
    [
        ({}, True, "took a request up"),
        ({"max_concurrency": 8}, True, "took a request up"),
        ({"max_concurrency": 8, "queue_times": None}, False, "at most 8"),
        ({"request_rate": "inf", "max_concurrency": 8}, False, "kept 8 requests under way"),
        ({"request_rate": "inf", "ramp_up_strategy": "linear"}, True, "took a request up"),
        ({"request_rate": "inf"}, True, "took a request up"),  # --self-timed: the data set says when
    ],
)
def test_how_requests_were_sent_follows_from_rate_and_limit(changes: dict, open_loop: bool, said: str) -> None:
    result = result_of(vllm(traffic(60), **changes))
    assert result.open_loop is open_loop
    assert said in result.pace
    assert result.concurrency == changes.get("max_concurrency")


def test_requests_sent_all_at_once_wait_for_each_other() -> None:
    burst = [Sent(due_s=0.0, first_s=1.0 + place) for place in range(20)]
    result = result_of(vllm(burst, request_rate="inf"))
    assert result.open_loop is False
    assert "every request at once" in result.pace


def test_closed_loop_has_no_scheduled_times() -> None:
    result = result_of(vllm(in_turn(traffic(30)), request_rate="inf", max_concurrency=2))
    assert result.requests["scheduled_ns"].null_count == result.requests.num_rows


def test_request_that_failed_before_it_was_sent_stands_where_it_was_taken_up() -> None:
    document = vllm([ONE, FAILED])
    document["start_times"][1], document["queue_times"][1] = 0.0, -5_003.25
    first, second = rows(document)
    assert second["sent_ns"] - first["sent_ns"] == 500_000_000


def test_count_that_its_lists_contradict_is_a_problem() -> None:
    assert result_of(vllm([ONE, FAILED], completed=2)).problems == (
        "says that 2 requests completed, and 1 did by its lists",
    )
    assert result_of(vllm([ONE, FAILED])).problems == ()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ttfts": ...}, "has no ttfts, so it is a summary alone: run it again with --save-result --save-detailed"),
        ({"itls": [[]]}, "unequal lengths (input_lens 2, output_lens 2, ttfts 2, itls 1"),
        ({"errors": "none"}, "errors no list"),
        ({"latencies": [1.0]}, "unequal lengths (latencies 1, ttfts 2)"),
        ({"ttfts": [0.1, -0.5]}, "ttfts[1] is -0.5, limits 0 and 3000000000: run it again"),
        ({"ttfts": [None, 0.1]}, "ttfts[0] is null"),
        ({"start_times": [math.inf, 1.0]}, "start_times[0] is inf"),
        ({"start_times": [10**400, 1.0]}, "start_times[0] is 1000"),
        ({"itls": [[0.1], [0.1, "x"]]}, "itls[1][1] is 'x'"),
        ({"itls": [0.1, 0.2]}, "itls[0] is 0.1 and no list"),
        ({"output_lens": [3, 2**31]}, "output_lens[1] is 2147483648, limits 0 and 2147483647"),
    ],
)
def test_what_cannot_be_read_is_refused(changes: dict, said: str) -> None:
    document = {key: value for key, value in (vllm([ONE, FAILED]) | changes).items() if value is not ...}
    with pytest.raises(RecordError) as caught:
        result_of(document)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


seconds = st.floats(0.0, 100.0).map(lambda value: round(value, 6))


@given(
    st.lists(
        st.builds(
            Sent,
            due_s=seconds,
            late_s=seconds,
            first_s=seconds.map(lambda value: value + 0.001),
            gaps_s=st.lists(seconds, max_size=5),
            error=st.sampled_from(["", "", "broken"]),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_any_request_has_its_times_in_order(requests: list[Sent]) -> None:
    for row, request in zip(rows(vllm(requests)), requests, strict=True):
        assert 0 < row["scheduled_ns"] <= row["sent_ns"] <= row["end_ns"]
        assert abs(row["sent_ns"] - row["scheduled_ns"] - request.late_s * 1e9) < 1_000
        if not request.error:
            assert row["sent_ns"] < row["first_token_ns"] <= row["end_ns"] + 1
            assert len(row["token_ns"]) == request.tokens
