"""Result files of vLLM: how requests are read, what is refused, and several files as one run."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailgate.analysis.imports import vllm
from tailgate.analysis.imports.vllm import read_result, write_run
from tailgate.analysis.records.run_records import read_run
from tailgate.analysis.records.tables import RecordError
from tailgate.analysis.run.run import Run
from tests.fakes import results
from tests.fakes.processes import refusal
from tests.fakes.results import Sent, in_turn, traffic, write

ONE = Sent(due_s=2.0, late_s=0.5, first_s=0.25, gaps_s=(0.125, 0.25), prompt_tokens=7)
FAILED = Sent(due_s=3.0, error="Bad Gateway")
TIMES = [250_000_000, 375_000_000, 625_000_000]


def test_latency_counts_from_the_schedule() -> None:
    first, second = vllm.result_of(results.vllm([ONE, FAILED])).requests.to_pylist()
    assert first["sent_ns"] - first["scheduled_ns"] == pytest.approx(500_000_000, abs=1_000)
    assert first["first_token_ns"] - first["sent_ns"] == pytest.approx(250_000_000, abs=1_000)
    assert first["end_ns"] - first["sent_ns"] == pytest.approx(625_500_000, abs=501_000)
    assert first["token_ns"] == TIMES
    assert (first["status"], first["prompt_tokens"], first["output_tokens"]) == ("OK", 7, 3)
    assert (second["status"], second["first_token_ns"]) == ("UNKNOWN", None)
    assert "Bad Gateway" in second["error"]


@pytest.mark.parametrize(
    ("changes", "open_loop", "concurrency"),
    [
        ({}, True, None),
        ({"max_concurrency": 8}, True, 8),
        ({"max_concurrency": 8, "queue_times": None}, False, 8),
        ({"request_rate": "inf", "max_concurrency": 8}, False, 8),
        ({"request_rate": "inf", "ramp_up_strategy": "linear"}, True, None),
        ({"request_rate": "inf"}, True, None),  # --self-timed: the data set says when
    ],
)
def test_whether_the_load_was_an_open_loop_follows_from_its_settings(
    changes: dict[str, object], open_loop: bool, concurrency: int | None
) -> None:
    result = vllm.result_of(results.vllm(traffic(60), **changes))
    assert (result.open_loop, result.concurrency) == (open_loop, concurrency)


def test_a_load_without_a_schedule_has_no_scheduled_times() -> None:
    burst = [Sent(due_s=0.0, first_s=1.0 + place) for place in range(20)]
    assert vllm.result_of(results.vllm(burst, request_rate="inf")).open_loop is False
    closed = vllm.result_of(results.vllm(in_turn(traffic(30)), request_rate="inf", max_concurrency=2))
    assert closed.requests["scheduled_ns"].null_count == closed.requests.num_rows
    without = {key: value for key, value in results.vllm([ONE]).items() if key not in ("latencies", "queue_times")}
    assert vllm.result_of(without).requests["scheduled_ns"].to_pylist() == [None]


def test_contradictions_in_a_file_are_problems() -> None:
    assert len(vllm.result_of(results.vllm([ONE, FAILED], completed=2)).problems) == 1
    assert vllm.result_of(results.vllm([ONE, FAILED])).problems == ()


def of_vllm_with(**changes: object) -> object:
    document = results.vllm([ONE, FAILED]) | changes
    return vllm.result_of({key: value for key, value in document.items() if value is not ...})


@pytest.mark.parametrize(
    ("read", "words"),
    [
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
        (lambda: of_vllm_with(start_times=...), "has no start_times"),
    ],
)
def test_a_value_that_cannot_be_read_is_named(read: Callable[[], Any], words: str) -> None:
    assert words in refusal(RecordError, read)


WHOLE = results.vllm([ONE, Sent(due_s=3.0)])
SUMMARY = {key: value for key, value in WHOLE.items() if key not in ("ttfts", "itls", "errors")}
UNEQUAL = WHOLE | {key: [] for key in ("input_lens", "output_lens", "ttfts", "itls")}
EMPTY = {key: [] if isinstance(value, list) else value for key, value in WHOLE.items()}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", SUMMARY, "--save-result"),
        ("a.jsonl", [WHOLE, WHOLE], "without --append-result"),
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
    assert "is not one whole JSON" in refusal(RecordError, read_result, path)


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


def test_another_load_or_the_same_run_twice_is_refused(files: list[tuple[str, Path]], tmp_path: Path) -> None:
    for name, content, words in (
        ("faster.json", results.vllm(traffic(30), request_rate=8.0), "request_rate 4.0 and 8.0"),
        ("copy.json", results.vllm(traffic(30, seed=1)), "the same run"),
    ):
        second = ("other", write(tmp_path / name, content))
        assert words in refusal(RecordError, write_run, tmp_path / "run", [files[0], second])
    missing = ("other", tmp_path / "none.json")
    assert "none.json" in refusal(RecordError, write_run, tmp_path / "run", [files[0], missing])
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
