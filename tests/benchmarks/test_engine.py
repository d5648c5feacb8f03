from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import quiet
from benchmarks.engine import main
from benchmarks.environment import ROOT
from benchmarks.inprocess import InProcess
from benchmarks.traffic import Request, churn_set, prompts
from servers.config import ArmConfig, EngineConfig, ModelConfig
from tests.fakes.patience import PATIENCE_S
from tests.servers.compiler.reset import reset_compiler

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


@pytest.fixture
def padded() -> Iterator[InProcess]:
    yield from loaded("compiled-padded")


def requests(target: InProcess, count: int, *, offset_ns: int = 0, new_tokens: int = 5) -> list[Request]:
    made = prompts([6] * count, target.vocab_size, np.random.default_rng(0))
    return [
        Request(prompt=prompt, max_tokens=new_tokens, offset_ns=offset_ns * number)
        for number, prompt in enumerate(made)
    ]


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


def test_a_planned_arm_is_quiet_while_requests_join_and_leave(padded: InProcess) -> None:
    rng = np.random.default_rng(3)
    mixed = churn_set(40, max_prompt=24, max_new=10, vocab_size=padded.vocab_size, rng=rng)
    session = quiet.churn(padded, mixed, rng)
    row = quiet.quietness(session)
    assert "failed" not in row
    assert row["events"] == {}
    batches = {output.step.batch for output in session.outputs if output.step and output.step.kind == "decode"}
    assert batches == {1, 2, 3}, "rows joined and left"
    assert "CANCELLED" in session.failed


def test_requests_that_fail_are_not_quiet_either(eager: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(step: object, batch_id: int) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(eager.runner, "launch", fail)
    session = eager.serve([Request(prompt=[5] * 6, max_tokens=3)])
    assert session.failed == {"INTERNAL": 1}
    assert quiet.quietness(session)["failed"] == "requests ended INTERNAL (1)"


def test_a_replay_sends_on_schedule_and_counts_from_it(eager: InProcess) -> None:
    session, lags = eager.replay(requests(eager, 8, offset_ns=20_000_000))
    assert session.output_tokens == 40
    assert session.failed == {}
    due = [item.due_ns for item in session.answers.values()]
    assert np.diff(due).tolist() == [20_000_000] * 7
    assert min(lags) >= 0
    assert all(item.token_ns[0] > item.due_ns for item in session.answers.values())


def test_the_recorder_is_out_of_the_compiler_while_it_is_off(eager: InProcess) -> None:
    context = torch._dynamo.utils.get_metrics_context()
    tapped = context._on_exit
    with eager.recording(False):
        assert context._on_exit is not tapped
        eager.serve(requests(eager, 2))
    assert eager.recorder.drain() == []


def test_the_measured_saturation_is_a_rate_of_the_engine(eager: InProcess) -> None:
    rows = quiet.Rows(offset_ns=np.array([0, 1]), input_tokens=np.array([4, 24]), output_tokens=np.array([10, 4]))
    rate = quiet.saturate(eager, rows, seconds=0.5, rng=np.random.default_rng(0))
    assert rate > 10  # thousands where nothing else runs


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["decode", "--arm", "fast"], '--arm: "fast" is unknown'),
        (["decode", "--batch", "0"], "--batch: '0' is no count"),
        (["decode", "--through", ","], "--through: the list is empty"),
        (["sideways"], '"sideways" is unknown: use startup, floor'),
        (["decode", "--batch", "1,99"], "--batch 99 is above engine.slots 8"),
        (["decode", "--new-tokens", "12"], "raise --new-tokens"),
        (["mixed", "--mixed-requests", "999"], "raise engine.max_queue"),
        (["quiet", "--trace", "/nowhere.csv"], "does not exist"),
        (["decode", "--set", "engine.slot=4"], "engine.slot is unknown"),
        (["decode", "--set", "slots=4"], "use model.KEY, engine.KEY"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, *SMALL]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1


def test_a_time_limit_loses_nothing_that_was_measured() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "engine.py"), "quiet", "mixed", "--arm", "eager", *SMALL]
    command += ["--repeats", "1000000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/") as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "mixed, repeat 1:" in line:
                break
        os.kill(process.pid, signal.SIGTERM)
        stdout, _ = process.communicate(timeout=PATIENCE_S)
    outcome = json.loads(stdout.splitlines()[-1])
    assert process.returncode == 1
    assert not outcome["complete"]
    assert [row["section"] for row in outcome["results"]] == ["quiet"]
