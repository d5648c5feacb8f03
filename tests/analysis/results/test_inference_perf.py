"""inference-perf's requests: what each column is made of, and what is refused."""

import pytest

from analysis.records.tables import RecordError
from analysis.results.inference_perf import result_of
from tests.fakes.results import Sent, inference_perf

ONE = Sent(due_s=2.0, late_s=0.5, first_s=0.25, gaps_s=(0.125, 0.25), prompt_tokens=7)
FAILED = Sent(due_s=3.0, error="Bad Gateway")


def test_latency_counts_from_the_send_since_nothing_else_is_kept() -> None:
    result = result_of(inference_perf([ONE, FAILED]))
    first, second = result.requests.to_pylist()
    assert first["scheduled_ns"] is None
    assert first["sent_ns"] == 5_002_750_000_000
    assert first["first_token_ns"] - first["sent_ns"] == 250_000_000
    assert first["end_ns"] - first["sent_ns"] == 626_000_000
    assert first["token_ns"] == [250_000_000, 375_000_000, 625_000_000]  # of pieces, and not of what is read into them
    assert (first["status"], first["prompt_tokens"], first["output_tokens"]) == ("OK", 7, 3)
    assert (second["status"], second["error"]) == ("UNKNOWN", "HTTPError: Bad Gateway")
    assert (second["first_token_ns"], second["token_ns"]) == (None, [])
    assert result.open_loop is None
    assert "keeps no schedule" in result.pace


def test_client_counts_tokens_where_the_server_does_not() -> None:
    entries = inference_perf([ONE])
    del entries[0]["info"]["response_metrics"]["server_usage"]
    assert result_of(entries).requests["output_tokens"].to_pylist() == [4]


def test_times_of_tokens_stand_in_for_those_of_chunks() -> None:
    entries = inference_perf([ONE])
    del entries[0]["info"]["response_metrics"]["chunk_times"]
    assert len(result_of(entries).requests["token_ns"].to_pylist()[0]) == 6


def test_entries_without_info_are_refused() -> None:
    entries = [{**entry, "info": None} for entry in inference_perf([ONE])]
    with pytest.raises(RecordError, match=r"no time of a token: run it again with per_request_fields\.info: true"):
        result_of(entries)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"start_time": None}, "start_time[0] is null"),
        ({"end_time": -1}, "end_time[0] is -1, limits 0"),
        ({"info": {"response_metrics": {"chunk_times": [1.0, "x"]}}}, "request 1: chunk_times[1] is 'x'"),
    ],
)
def test_time_that_is_none_is_refused(changes: dict, said: str) -> None:
    entries = [{**entry, **changes} for entry in inference_perf([ONE])]
    with pytest.raises(RecordError) as caught:
        result_of(entries)
    assert said in str(caught.value)
