from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from benchmarks.command import MeasurementError
from benchmarks.engine import StepBytes, main, measure_bandwidth, steady_decode, step_bytes
from tailgate.servers.config import ModelConfig
from tailgate.servers.engine.messages import StepOutput
from tailgate.servers.engine.model import load_model
from tailgate.servers.rpc.telemetry_pb2 import StepRecord
from tests.servers.compiler.test_recorder import reset_compiler

LIMITS = ("engine.slots=4", "engine.max_prompt_tokens=16", "engine.max_new_tokens=48", "engine.threads=1")
SMALL = ["--prompt-tokens", "16", "--new-tokens", "48", "--repeats", "1", "--set", "model.device=cpu"]
SMALL += [word for limit in LIMITS for word in ("--set", limit)]


@pytest.fixture(autouse=True)
def _own_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(
        "benchmarks.engine.measure_bandwidth", partial(measure_bandwidth, tensor_bytes=1 << 24, repeats=3)
    )
    reset_compiler()
    yield
    reset_compiler()


def test_one_command_gives_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--arm", "eager", "--batch", "1,4", *SMALL]) == 0
    captured = capsys.readouterr()
    (line,) = captured.out.splitlines()
    outcome = json.loads(line)
    assert outcome["ok"]
    assert outcome["arm"]["engine"]["threads"] == 1
    assert outcome["machine"]["device"] == "cpu"
    assert outcome["command"].startswith("python benchmarks/engine.py --arm eager")
    rows = outcome["results"]
    assert [(row["section"], row.get("batch")) for row in rows] == [
        ("floor", None),
        ("decode", 1),
        ("prefill", 1),
        ("decode", 4),
        ("prefill", 4),
    ]
    for row in rows:
        if row["section"] == "decode":
            assert 0 < row["share_of_floor"] < 1
            assert row["share_of_floor"] == pytest.approx(row["tokens_s"]["median"] / row["floor_tokens_s"], rel=1e-4)
        elif row["section"] == "prefill":
            assert row["prompt_tokens_s"]["min"] > 0
    assert "share_of_floor" in captured.err


def test_an_arm_that_compiles_while_it_serves_is_not_measured() -> None:
    arguments = ["--arm", "compiled-naive", "--set", "compile.backend=eager", "--batch", "1", *SMALL]
    with pytest.raises(MeasurementError, match="compiler worked after the warm-up"):
        main(arguments)


def test_work_that_the_engine_does_not_take_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--arm", "eager", "--batch", "8", *SMALL])
    assert "--batch 8 is above engine.slots 4: raise engine.slots" in capsys.readouterr().err


def test_the_floor_moves_weights_once_and_the_cache_of_every_row() -> None:
    needed = StepBytes(weights=1000, position=10)
    assert needed.total(batch=2, positions=48) == 1000 + 10 * 50
    assert needed.floor_tokens_per_s(batch=2, positions=48, bytes_per_s=3000) == 4


def test_quantised_weights_count_as_they_are_stored() -> None:
    plain, fewer = (
        step_bytes(load_model(ModelConfig(device="cpu", quantisation=kind)))  # type: ignore[arg-type]
        for kind in ("none", "int8-weight-only")
    )
    assert plain.quantised == 0
    linear = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 176)
    assert linear < fewer.quantised < 1.1 * linear
    assert fewer.weights == plain.weights - 4 * linear + fewer.quantised


MS = 1_000_000


def step(at_ms: float, kind: str, names: str, *, batch: int = 0) -> StepOutput:
    """A step emitted at `at_ms` with one token for each letter of `names`; `batch` rows ran, as many unless given."""
    sizes = {"batch": batch or len(names), "padded_batch": 4, "tokens": len(names), "padded_tokens": 4}
    record = StepRecord(step_id=0, kind=kind, start_ns=0, end_ns=int(at_ms * MS), compiled=True, **sizes)
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
    seen = steady_decode(outputs, 100, batch=2)
    assert seen.steps == 3
    assert seen.seconds == pytest.approx(0.015)
    assert seen.step_ms == pytest.approx(5.0)
    assert seen.tokens_per_s == pytest.approx(2 * 3 / 0.015)


def test_positions_are_those_a_step_attends_to() -> None:
    outputs = [step(0, "prefill", "a"), step(1, "decode", "a"), step(2, "decode", "a")]
    # The third token is computed from the second, written at position 11: 12 positions with the ten of the prompt.
    assert steady_decode(outputs, 10, batch=1).positions == 12


def test_an_output_without_a_step_does_not_stop_the_clock() -> None:
    outputs = [step(0, "decode", "a"), StepOutput(emit_ns=3 * MS), step(5, "decode", "a")]
    assert steady_decode(outputs, 1, batch=1).step_ms == pytest.approx(5.0)
