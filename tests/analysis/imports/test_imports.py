"""Result files of other load tools: how requests are read, what is refused, and several files as one run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.imports import aiperf, guidellm, vllm
from analysis.imports.run_directory import read_result, write_run
from analysis.records.run_records import read_run
from analysis.records.tables import RecordError
from analysis.run.run import Run
from tests.fakes import results
from tests.fakes.processes import refusal
from tests.fakes.results import EPOCH_S, Sent, in_turn, traffic, write

ONE = Sent(due_s=2.0, late_s=0.5, first_s=0.25, gaps_s=(0.125, 0.25), prompt_tokens=7)
FAILED = Sent(due_s=3.0, error="Bad Gateway")
TIMES = [250_000_000, 375_000_000, 625_000_000]
REQUESTS = traffic(5)


def of_aiperf_with(table: str, **changes: object) -> dict[str, Any]:
    """The one request of AIPerf with other values."""
    (line,) = results.aiperf([ONE])
    (row,) = aiperf.result_of([{**line, table: {**line[table], **changes}}]).requests.to_pylist()
    return row


def timed(**changes: object) -> dict[str, Any]:
    """GuideLLM's report of two requests, with other timings of the first."""
    document = results.guidellm([ONE, ONE])
    document["benchmarks"][0]["requests"]["successful"][0]["info"]["timings"] |= changes
    return document


@pytest.mark.parametrize(
    ("read", "tokens"),
    [
        (lambda: aiperf.result_of(results.aiperf([ONE, FAILED]), results.aiperf_summary(2)), TIMES),
        (lambda: guidellm.result_of(results.guidellm([ONE, FAILED])), None),
        (lambda: vllm.result_of(results.vllm([ONE, FAILED])), TIMES),
    ],
)
def test_latency_counts_from_the_schedule(read: Callable[[], Any], tokens: list[int] | None) -> None:
    first, second = read().requests.to_pylist()
    assert first["sent_ns"] - first["scheduled_ns"] == pytest.approx(500_000_000, abs=1_000)
    assert first["first_token_ns"] - first["sent_ns"] == pytest.approx(250_000_000, abs=1_000)
    assert first["end_ns"] - first["sent_ns"] == pytest.approx(625_500_000, abs=501_000)
    assert first["token_ns"] == tokens
    assert (first["status"], first["prompt_tokens"], first["output_tokens"]) == ("OK", 7, 3)
    assert (second["status"], second["first_token_ns"]) == ("UNKNOWN", None)
    assert "Bad Gateway" in second["error"]


def test_tools_that_record_the_time_of_the_day_keep_it() -> None:
    expected = int(EPOCH_S) * 10**9 + 2_500_000_000
    for read in (aiperf.result_of(results.aiperf([ONE])), guidellm.result_of(results.guidellm([ONE]))):
        assert read.requests["sent_ns"].to_pylist() == [pytest.approx(expected, abs=1_000)]


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
        *((of_guidellm, {"type_": kind}, True, None) for kind in ("poisson", "constant", "trace")),
        *((of_guidellm, {"type_": kind}, False, None) for kind in ("synchronous", "throughput")),
        (of_guidellm, {"type_": "concurrent", "streams": 8}, False, 8),
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
    without = {key: value for key, value in results.vllm([ONE]).items() if key not in ("latencies", "queue_times")}
    assert vllm.result_of(without).requests["scheduled_ns"].to_pylist() == [None]


def test_contradictions_in_a_file_are_problems() -> None:
    assert len(vllm.result_of(results.vllm([ONE, FAILED], completed=2)).problems) == 1
    assert vllm.result_of(results.vllm([ONE, FAILED])).problems == ()
    stopped = {**results.aiperf_summary(1), "is_complete": False, "incomplete_reason": "stalled"}
    assert "stalled" in aiperf.result_of(results.aiperf([ONE]), stopped).problems[0]
    early = guidellm.result_of(timed(targeted_start=-0.75))
    assert early.requests["scheduled_ns"].null_count == len(early.problems) == 1


def test_warm_up_and_cancelled_requests_of_aiperf_are_marked() -> None:
    first, second = (
        of_aiperf_with("metadata", **change) for change in ({"benchmark_phase": "warmup"}, {"was_cancelled": True})
    )
    assert (first["phase"], second["phase"], second["status"]) == ("rampup", "measure", "CANCELLED")


def test_the_count_of_a_sampled_report_is_that_of_all_requests() -> None:
    document = results.guidellm(traffic(10))
    kept = document["benchmarks"][0]["requests"]
    kept["successful"] = kept["successful"][:5]
    result = guidellm.result_of(document)
    assert (result.requests.num_rows, result.sent) == (5, 40)
    assert aiperf.result_of(results.aiperf([ONE]), results.aiperf_summary(480)).sent == 480


def of_vllm_with(**changes: object) -> object:
    document = results.vllm([ONE, FAILED]) | changes
    return vllm.result_of({key: value for key, value in document.items() if value is not ...})


def of_several_phases() -> object:
    summary = results.aiperf_summary(1)
    summary["input_config"]["phases"] *= 2
    return aiperf.result_of(results.aiperf([ONE]), summary)


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (lambda: of_aiperf_with("metadata", request_start_ns=None), "request 1: metadata.request_start_ns is null"),
        (lambda: of_aiperf_with("metadata", request_start_ns=-5), "request_start_ns is -5"),
        (lambda: of_aiperf_with("metadata", credit_issued_ns=10**19), "credit_issued_ns is 10000000000000000000"),
        (
            lambda: of_aiperf_with("metrics", request_latency={"value": -1.0, "unit": "ms"}),
            "request_latency.value is -1",
        ),
        (lambda: of_aiperf_with("metrics", time_to_first_token={"value": 1, "unit": "s"}), "in 's'"),
        (lambda: of_aiperf_with("metrics", inter_chunk_latency={"value": [1, None], "unit": "ms"}), "[1] is null"),
        (of_several_phases, "2 phases"),
        (lambda: of_vllm_with(ttfts=...), "--save-detailed"),
        (lambda: of_vllm_with(itls=[[]]), "itls 1"),
        (lambda: of_vllm_with(latencies=[1.0]), "latencies 1"),
        (lambda: of_vllm_with(errors="none"), "errors"),
        (lambda: of_vllm_with(ttfts=[0.1, -0.5]), "request 2: ttfts is -0.5"),
        (lambda: of_vllm_with(start_times=[math.inf, 1.0]), "start_times is inf"),
        (lambda: of_vllm_with(start_times=[10**400, 1.0]), "start_times is 1000"),
        (lambda: of_vllm_with(itls=[[0.1], [0.1, "x"]]), "request 2: itls[1] is 'x'"),
        (lambda: of_vllm_with(itls=[0.1, 0.2]), "itls is 0.1"),
        (lambda: of_vllm_with(output_lens=[3, 2**31]), "output_lens is 2147483648"),
        *((lambda at=at: guidellm.result_of(timed(request_start=at)), repr(at)) for at in (-1.0, "soon", 1e12, True)),
        (
            lambda: guidellm.result_of({"benchmarks": results.guidellm([ONE])["benchmarks"] * 3}),
            "holds 3 benchmarks",
        ),
        (lambda: of_vllm_with(start_times=...), "has no start_times"),
        (lambda: guidellm.result_of(results.guidellm([])), "summary alone"),
    ],
)
def test_a_value_that_cannot_be_read_is_named(read: Callable[[], Any], words: str) -> None:
    assert words in refusal(RecordError, read)


@pytest.mark.parametrize(
    ("name", "content", "tool"),
    [
        ("results.json", results.vllm(REQUESTS), "vLLM bench serve"),
        ("profile_export.jsonl", results.aiperf(REQUESTS), "AIPerf"),
        ("one.jsonl", results.aiperf([ONE]), "AIPerf"),
        ("benchmarks.json", results.guidellm(REQUESTS), "GuideLLM"),
        ("0.4.json", {"args": {}, "benchmarks": results.guidellm(REQUESTS)["benchmarks"]}, "GuideLLM"),
    ],
)
def test_each_tool_is_recognised_by_its_file(name: str, content: Any, tool: str, tmp_path: Path) -> None:
    result = read_result(write(tmp_path / name, content))
    assert (result.tool, result.requests.num_rows) == (tool, 1 if name == "one.jsonl" else len(REQUESTS))


def test_records_of_aiperf_are_read_with_their_summary(tmp_path: Path) -> None:
    path = write(tmp_path / "profile_export.jsonl", results.aiperf(REQUESTS))
    for summary, open_loop in (({"some": "other"}, None), (results.aiperf_summary(20), True)):
        write(tmp_path / "profile_export_aiperf.json", summary)
        assert read_result(path).open_loop is open_loop
    path.write_text(path.read_text()[:-100])
    assert "is no whole JSON" in refusal(RecordError, read_result, path)


WHOLE = results.vllm([ONE, Sent(due_s=3.0)])
SUMMARY = {key: value for key, value in WHOLE.items() if key not in ("ttfts", "itls", "errors")}
UNEQUAL = WHOLE | {key: [] for key in ("input_lens", "output_lens", "ttfts", "itls")}
EMPTY = {key: [] if isinstance(value, list) else value for key, value in WHOLE.items()}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", SUMMARY, "--save-result"),
        ("a.json", results.aiperf_summary(9), "profile_export.jsonl"),
        ("a.jsonl", [WHOLE, WHOLE], "holds 2 results: give a file of one"),
        *(("a.json", content, "no result file") for content in ({"latency": [1, 2]}, [1, 2, 3], "text", [])),
        ("a.json", UNEQUAL, "unequal"),
        ("a.json", EMPTY, "no request"),
    ],
)
def test_a_file_that_is_no_detailed_result_is_refused(name: str, content: Any, words: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, content)
    message = refusal(RecordError, read_result, path)
    assert str(path) in message
    assert words in message
    assert "cannot be read" in refusal(RecordError, read_result, tmp_path / "none.json")
    path.write_bytes(b"\xff\xfe{")
    assert "no text" in refusal(RecordError, read_result, path)


TEXTS = [json.dumps(item) for item in (WHOLE, results.guidellm([ONE]))]


@settings(max_examples=25)
@given(st.sampled_from(TEXTS), st.floats(0.0, 0.999))
def test_a_file_that_is_cut_off_anywhere_is_refused(tmp_path_factory: Any, text: str, share: float) -> None:
    path = tmp_path_factory.mktemp("cut") / "a.json"
    path.write_text(text[: int(share * len(text))])
    with pytest.raises(RecordError):
        read_result(path)


values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just([]) | st.just({})


@settings(max_examples=25)
@given(st.sampled_from(sorted(WHOLE)), values, st.booleans())
def test_a_value_of_any_kind_is_read_or_refused(tmp_path_factory: Any, key: str, value: Any, inside: bool) -> None:
    kept = WHOLE[key]
    other = [value, *kept[1:]] if inside and isinstance(kept, list) else value
    path = write(tmp_path_factory.mktemp("odd") / "a.json", {**WHOLE, key: other})
    with suppress(RecordError):
        assert read_result(path).requests.num_rows > 0


@pytest.fixture
def files(tmp_path: Path) -> list[tuple[str, Path]]:
    made = [("eager", 1), ("compiled", 2), ("compiled", 3)]
    return [(arm, write(tmp_path / f"{seed}.json", results.vllm(traffic(30, seed=seed)))) for arm, seed in made]


def test_each_file_is_a_trial_of_its_arm(files: list[tuple[str, Path]], tmp_path: Path) -> None:
    write_run(tmp_path / "run", files)
    run = Run.of(read_run(tmp_path / "run"))
    assert (run.control, run.arms, run.separate) == ("eager", ("eager", "compiled"), True)
    assert [len(run.trials_of(arm)) for arm in run.arms] == [1, 2]
    assert run.planned == {"eager": 120, "compiled": 240}
    assert run.account("compiled").external["model_name"] == "tiny"
    assert run.reported_open_loop is True
    assert not run.records.problems
    assert run.records.experiment["traffic"]["request_rate"] == 4.0


def test_problems_of_a_file_are_those_of_the_run(tmp_path: Path) -> None:
    named = [write(tmp_path / f"{seed}.json", results.vllm(traffic(9, seed=seed), completed=seed)) for seed in (1, 2)]
    write_run(tmp_path / "run", list(zip(("a", "b"), named, strict=True)))
    for number, problem in zip((1, 2), read_run(tmp_path / "run").problems, strict=True):
        assert all(part in problem for part in (f"{number}.json", f"{number} request", "36 did"))


def test_another_load_another_tool_or_the_same_run_twice_is_refused(
    files: list[tuple[str, Path]], tmp_path: Path
) -> None:
    for name, content, words in (
        ("faster.json", results.vllm(traffic(30), request_rate=8.0), "request_rate 4.0 and 8.0"),
        ("g.json", results.guidellm(traffic(30)), "tool vLLM bench serve and GuideLLM"),
        ("copy.json", results.vllm(traffic(30, seed=1)), "the same run"),
    ):
        second = ("other", write(tmp_path / name, content))
        assert words in refusal(RecordError, write_run, tmp_path / "run", [files[0], second])
    missing = ("other", tmp_path / "none.json")
    assert "none.json" in refusal(RecordError, write_run, tmp_path / "run", [files[0], missing])
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
