from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.engine import main
from benchmarks.inprocess import InProcess
from servers.config import ArmConfig, EngineConfig, ModelConfig
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
