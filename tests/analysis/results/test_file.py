"""A result file is known by what it holds; what is none, or a part of one, is refused in a line."""

import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.records.tables import RecordError
from analysis.results.file import read_result
from tests.fakes import results
from tests.fakes.results import Sent, traffic, write

ONE = Sent(due_s=2.0)
REQUESTS = traffic(5)


@pytest.mark.parametrize(
    ("name", "content", "tool"),
    [
        ("results.json", results.vllm(REQUESTS), "vLLM bench serve"),
        ("profile_export.jsonl", results.aiperf(REQUESTS), "AIPerf"),
        ("one.jsonl", results.aiperf([ONE]), "AIPerf"),
        ("benchmarks.json", results.guidellm(REQUESTS), "GuideLLM"),
        ("per_request_lifecycle_metrics.json", results.inference_perf(REQUESTS), "inference-perf"),
    ],
)
def test_each_tool_is_known_by_its_file(name: str, content, tool: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, content)
    result = read_result(path)
    assert result.tool == tool
    assert result.requests.num_rows == (1 if name == "one.jsonl" else len(REQUESTS))


def test_the_summary_in_the_folder_of_aiperfs_records_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "profile_export.jsonl", results.aiperf(REQUESTS))
    assert read_result(path).open_loop is None
    write(tmp_path / "profile_export_aiperf.json", results.aiperf_summary(20))
    assert read_result(path).open_loop is True
    write(tmp_path / "profile_export_aiperf.json", {"some": "other"})
    assert read_result(path).open_loop is None


def test_torn_last_line_costs_that_line_and_is_said(tmp_path: Path) -> None:
    path = write(tmp_path / "profile_export.jsonl", results.aiperf(REQUESTS))
    path.write_text(path.read_text()[:-100])
    result = read_result(path)
    assert result.requests.num_rows == len(REQUESTS) - 1
    assert result.problems == ("is cut off at its end",)


SUMMARY = {key: value for key, value in results.vllm(REQUESTS).items() if key not in ("ttfts", "itls", "errors")}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", SUMMARY, "has no ttfts, itls, errors, so it is a summary alone: run it again with --save-result"),
        ("a.json", results.aiperf_summary(9), "is AIPerf's summary, without its requests: give profile_export.jsonl"),
        ("a.json", {"load_summary": {}, "successes": {}, "failures": {}}, "per_request: true"),
        ("a.jsonl", [results.vllm([ONE]), results.vllm([ONE])], "holds 2 results (--append-result): give each a file"),
        ("a.json", {"latency": [1, 2]}, "is no result file that is read here: give one of vLLM bench serve, AIPerf"),
        ("a.json", [1, 2, 3], "is no result file that is read here"),
        ("a.json", "text", "is no result file that is read here"),
        ("a.json", [], "is no result file that is read here"),
        (
            "a.json",
            results.vllm([ONE]) | {key: [] for key in ("input_lens", "output_lens", "ttfts", "itls")},
            "unequal",
        ),
    ],
)
def test_what_is_no_detailed_result_is_refused(name: str, content, said: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(RecordError) as caught:
        read_result(path)
    assert str(caught.value).startswith(f"{path} ")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_file_without_a_request_is_refused(tmp_path: Path) -> None:
    empty = results.vllm([ONE]) | dict.fromkeys(("input_lens", "output_lens", "ttfts", "itls", "start_times", "errors"))
    for name in ("input_lens", "output_lens", "ttfts", "itls", "start_times", "errors", "latencies", "queue_times"):
        empty[name] = []
    with pytest.raises(RecordError, match="holds no request: run it again"):
        read_result(write(tmp_path / "a.json", empty))


def test_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"none.json cannot be read \(No such file"):
        read_result(tmp_path / "none.json")
    (tmp_path / "a.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(RecordError, match="is no text"):
        read_result(tmp_path / "a.json")


WHOLE = results.vllm([ONE, Sent(due_s=3.0)])
TEXTS = [json.dumps(item) for item in (WHOLE, results.guidellm([ONE]), results.inference_perf([ONE]))]


@settings(max_examples=25)
@given(st.sampled_from(TEXTS), st.floats(0.0, 0.999))
def test_file_cut_off_anywhere_is_refused(tmp_path_factory, text: str, share: float) -> None:
    path = tmp_path_factory.mktemp("cut") / "a.json"
    path.write_text(text[: int(share * len(text))])
    with pytest.raises(RecordError):
        read_result(path)


values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just([]) | st.just({})


@settings(max_examples=25)
@given(st.sampled_from(sorted(WHOLE)), values, st.booleans())
def test_value_of_any_kind_is_read_or_refused(tmp_path_factory, key: str, value, inside: bool) -> None:
    held = WHOLE[key]
    changed = [value, *held[1:]] if inside and isinstance(held, list) else value
    path = write(tmp_path_factory.mktemp("odd") / "a.json", {**WHOLE, key: changed})
    with suppress(RecordError):
        assert read_result(path).requests.num_rows > 0
