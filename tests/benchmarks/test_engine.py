from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.engine import main
from benchmarks.floor import StepBytes, step_bytes
from benchmarks.inprocess import InProcess
from benchmarks.kernels import profile_decode
from benchmarks.measure import (
    Answer,
    Session,
    latencies,
    median_interval,
    steady_decode,
    throughput,
)
from benchmarks.traffic import (
    WORKLOADS,
    decode_set,
    mixed_lengths,
    mixed_set,
    trace_rows,
)
from benchmarks.wire import Wire
from servers.config import ArmConfig, EngineConfig, ModelConfig
from servers.engine.messages import StepOutput, StepRecord
from servers.engine.model import load_model
from tests.servers.compiler.test_recorder import reset_compiler

SMALL = ["--workload", "small", "--set", "engine.threads=1", "--set", "model.device=cpu", "--repeats", "1"]
ENGINE = EngineConfig(slots=3, max_prompt_tokens=24, max_new_tokens=10, threads=1)


@pytest.fixture(autouse=True)
def _own_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    reset_compiler()
    yield
    reset_compiler()


def loaded(preset: str) -> Iterator[InProcess]:
    arm = ArmConfig.from_preset(preset, model=ModelConfig(device="cpu"), engine=ENGINE)
    if arm.compile.enabled:
        arm = replace(arm, compile=replace(arm.compile, backend="eager", mode="default"))
    target = InProcess.load(arm, lambda text: None)
    try:
        yield target
    finally:
        target.close()


@pytest.fixture
def eager() -> Iterator[InProcess]:
    yield from loaded("eager")


def test_one_command_gives_one_json_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    assert main(["mixed", "decode", "quiet", "--arm", "eager", "--batch", "1,4", "--out", str(out), *SMALL]) == 0
    captured = capsys.readouterr()
    (line,) = captured.out.splitlines()
    outcome = json.loads(line)
    assert outcome["ok"]
    assert outcome["complete"]
    assert outcome["arm"]["engine"]["threads"] == 1
    assert outcome["machine"]["device"] == "cpu"
    assert {"torch", "transformers"} <= outcome["machine"]["versions"].keys()
    rows = outcome["results"]
    assert [(row["section"], row.get("batch")) for row in rows] == [
        ("quiet", None),
        ("floor", None),
        ("decode", 1),
        ("decode", 4),
        ("mixed", None),
    ]
    head, *kept = [json.loads(text) for text in out.read_text().splitlines()]
    assert rows == kept
    assert head["command"].startswith("python benchmarks/engine.py mixed decode quiet --arm eager")
    assert (head["section"], head["machine"], head["arm"]) == ("run", outcome["machine"], outcome["arm"])
    for row in rows[2:4]:
        assert 0 < row["share_of_floor"] < 1
        assert row["share_of_floor"] == pytest.approx(row["tokens_s"]["median"] / row["floor_tokens_s"], rel=1e-4)
    assert "share_of_floor" in captured.err


def test_a_naive_arm_is_not_quiet_and_the_command_fails(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["quiet", "--arm", "compiled-naive", "--set", "compile.backend=eager", "--churn", "4", *SMALL]
    assert main(arguments) == 1
    outcome = json.loads(capsys.readouterr().out)
    assert not outcome["ok"]
    (row,) = outcome["results"]
    assert row["events"]["recompile"] >= 1
    assert "recompile while serving" in row["failed"]


def test_the_floor_moves_weights_once_and_the_cache_of_every_row() -> None:
    needed = StepBytes(weights=1000, position=10)
    assert needed.total(batch=2, positions=48) == 1000 + 10 * 50
    assert needed.floor_tokens_per_s(batch=2, positions=48, bytes_per_s=3000) == 4


def test_quantised_weights_count_as_they_are_stored_and_have_their_share_of_the_floor() -> None:
    plain, fewer = (
        step_bytes(load_model(ModelConfig(device="cpu", quantisation=kind)))  # type: ignore[arg-type]
        for kind in ("none", "int8-weight-only")
    )
    assert (plain.quantised, plain.quantised_share(batch=1, positions=10)) == (0, 0.0)
    linear = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 176)
    assert linear < fewer.quantised < 1.1 * linear
    assert fewer.weights == plain.weights - 4 * linear + fewer.quantised
    assert fewer.quantised_share(batch=2, positions=48) == fewer.quantised / fewer.total(batch=2, positions=48)
    assert fewer.bytes_a_token(batch=2, positions=48) == fewer.total(batch=2, positions=48) / 2


@pytest.fixture(scope="module")
def eager_target() -> Iterator[InProcess]:
    engine = EngineConfig(slots=4, max_prompt_tokens=24, max_new_tokens=64, threads=1)
    arm = ArmConfig.from_preset("eager", model=ModelConfig(device="cpu"), engine=engine)
    target = InProcess.load(arm, lambda text: None)
    yield target
    target.close()


@pytest.mark.parametrize("batch", [1, 4])
def test_every_product_of_a_step_is_counted(eager_target: InProcess, batch: int) -> None:
    work = replace(WORKLOADS["small"], decode_new=64)
    profile = profile_decode(eager_target, decode_set(work, batch, eager_target.vocab_size, np.random.default_rng(0)))
    products = {kernel.name: kernel for kernel in profile.kernels}["aten::mm"]
    # seven projections in each of two layers, and the output; engine and profiler may be a step apart at an end
    assert products.calls == pytest.approx(15, abs=0.5)
    assert 0 < products.us < profile.busy_us < profile.step_us
    assert profile.steps == 32


MS = 1_000_000


def step(at_ms: float, kind: str, names: str, *, batch: int = 0) -> StepOutput:
    """A step emitted at `at_ms` with one token for each letter of `names`; `batch` rows ran, as many unless given."""
    record = StepRecord(
        step_id=0,
        kind=kind,
        start_ns=0,
        end_ns=int(at_ms * MS),
        batch=batch or len(names),
        padded_batch=4,
        tokens=len(names),
        padded_tokens=4,
        compiled=True,
    )
    return StepOutput(emit_ns=int(at_ms * MS), tokens=[(name, 7) for name in names], step=record)


def test_only_full_decode_steps_behind_full_decode_steps_count() -> None:
    outputs = [
        step(0, "prefill", "a"),
        step(10, "decode", "a"),  # one row: not full
        step(50, "prefill", "b"),
        step(60, "decode", "ab"),  # full, but it waited behind a prefill: starts the clock
        step(64, "decode", "ab"),  # 4 ms
        step(70, "decode", "ab"),  # 6 ms
        step(170, "prefill", "c"),
        step(171, "decode", "ab", batch=3),  # another row ran with them
        step(172, "decode", "ab"),  # full again: starts the clock
        step(177, "decode", "ab"),  # 5 ms
        step(178, "decode", "a"),
    ]
    seen = steady_decode(outputs, {"a": 100, "b": 200, "c": 5}, batch=2)
    assert seen.steps == 3
    assert seen.seconds == pytest.approx(0.015)
    assert seen.step_ms == pytest.approx(5.0)
    assert seen.tokens_per_s == pytest.approx(2 * 3 / 0.015)


def test_positions_are_those_a_step_attends_to() -> None:
    outputs = [step(0, "prefill", "a"), step(1, "decode", "a"), step(2, "decode", "a")]
    # The third token is computed from the second, written at position 11: 12 positions with the ten of the prompt.
    assert steady_decode(outputs, {"a": 10}, batch=1).positions == 12


def test_an_output_without_a_step_does_not_stop_the_clock() -> None:
    outputs = [step(0, "decode", "a"), StepOutput(emit_ns=3 * MS), step(5, "decode", "a")]
    assert steady_decode(outputs, {"a": 1}, batch=1).step_ms == pytest.approx(5.0)


def answer(*token_ms: float, due_ms: float = 0, status: str = "OK") -> Answer:
    return Answer(
        prompt_tokens=1, due_ns=int(due_ms * MS), token_ns=[int(at_ms * MS) for at_ms in token_ms], status=status
    )


def test_throughput_is_counted_from_the_start_to_the_last_token() -> None:
    session = Session(
        start_ns=100 * MS,
        end_ns=900 * MS,
        answers={"a": answer(200, 300), "b": answer(250, 600)},
        outputs=[],
        events=[],
    )
    assert throughput(session) == pytest.approx(4 / 0.5)
    assert session.failed == {}


def test_latencies_count_from_the_due_time_and_leave_failures_out() -> None:
    figures = latencies([answer(30, 40, 60, due_ms=10), answer(1, 500, due_ms=0, status="INTERNAL")])
    assert figures["p50_ttft_ms"] == pytest.approx(20)
    assert figures["p50_itl_ms"] == pytest.approx(15)
    assert figures["max_itl_ms"] == pytest.approx(20)
    assert figures["p99_itl_over_median"] == pytest.approx(19.9 / 15)


@pytest.mark.parametrize(
    ("n", "interval"),
    [(1, None), (5, None), (6, (1, 6)), (8, (1, 8)), (9, (2, 8)), (20, (6, 15))],  # Hollander & Wolfe's table for 95 %
)
def test_the_interval_of_a_median_is_the_sign_tests(n: int, interval: tuple[int, int] | None) -> None:
    assert median_interval(list(range(n, 0, -1))) == interval


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_mixed_lengths_follow_the_lognormal_law_within_their_limits() -> None:
    work = WORKLOADS["full"]
    drawn = np.concatenate([mixed_lengths(work, rng(seed)) for seed in range(50)])
    assert (drawn.min(), drawn.max()) == (8, 1024)
    assert 230 < np.median(drawn) < 260  # exp(5.5) = 245
    made = mixed_set(work, 259, rng())
    assert len(made) == 96
    assert {request.max_tokens for request in made} == {128}


def test_a_trace_is_clipped_to_what_the_engine_takes(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.0,400,10\n2023-11-16 18:15:47.5,30,900\n"
    )
    found = trace_rows(str(path), max_prompt=64, max_new=48)
    assert found.input_tokens.tolist() == [64, 30]
    assert found.output_tokens.tolist() == [10, 48]
    assert [len(request.prompt) for request in found.requests(259, rng())] == [64, 30]


def test_a_served_arm_streams_all_tokens_to_a_client_behind_envoy(tmp_path: Path) -> None:
    engine = EngineConfig(slots=4, max_prompt_tokens=64, max_new_tokens=256, threads=1)
    arm = ArmConfig.from_preset("eager", model=ModelConfig(device="cpu"), engine=engine)
    wire = Wire(arm, folder=tmp_path, cache_dir=str(tmp_path / "cache"), note=lambda text: None)
    try:
        requests = decode_set(WORKLOADS["small"], 4, wire.vocab_size, np.random.default_rng(0))
        with wire.watched(True):
            session = wire.serve(requests)
        assert session.failed == {}
        assert session.output_tokens == 4 * 256
        assert throughput(session) > 0
        assert all(answer.token_ns == sorted(answer.token_ns) for answer in session.answers.values())
        assert wire.snapshot().counters["tokens"] == 4 * 256
    finally:
        wire.close()
