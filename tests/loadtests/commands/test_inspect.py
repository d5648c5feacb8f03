"""`tailgate inspect`: how it picks its arm, and that it ends in one JSON line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from loadtests.commands.inspect import inspected_arm
from loadtests.commands.main import build_parser, main
from servers.config import ArmConfig
from servers.fields import ConfigError

ROOT = Path(__file__).resolve().parents[3]


def arm_of(*arguments: str) -> ArmConfig:
    return inspected_arm(build_parser().parse_args(["inspect", *arguments]))


def test_without_an_experiment_the_arm_is_a_preset_with_the_flags_of_serve() -> None:
    arm = arm_of(
        "--arm", "compiled-padded", "--slots", "3", "--model", "random:qwen3-0.6b", "--set", "compile.mode=default"
    )
    assert (arm.name, arm.preset, arm.engine.slots, arm.model.id) == (
        "compiled-padded",
        "compiled-padded",
        3,
        "random:qwen3-0.6b",
    )
    assert arm.compile.mode == "default"
    assert arm_of("--preset", "eager") == ArmConfig.from_preset("eager")


def test_an_arm_of_an_experiment_has_the_experiments_engine_and_settings() -> None:
    arm = arm_of("demo", "--arm", "compiled-naive", "--set", "engine.slots=5")
    assert (arm.name, arm.engine.slots, arm.engine.max_prompt_tokens) == ("compiled-naive", 5, 192)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--arm", "slow"], ("slow", "compiled-naive")),
        (["external", "--arm", "candidate"], ("candidate", "external", "openai")),
        (["demo", "--arm", "slow"], ("slow", "demo", "eager, compiled-padded, compiled-naive")),
        (["demo", "--arm", "eager", "--max-new-tokens", "9"], ("--max-new-tokens", "--set")),
        (["--arm", "eager", "--device", "tpu"], ("tpu", "cuda")),
    ],
)
def test_what_cannot_be_inspected_is_one_line(
    arguments: list[str], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    for word in words:
        assert word in line


def test_a_shape_that_cannot_be_is_named_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError):
        arm_of("--arm", "eager", "--slots", "0")
    command = [sys.executable, "-m", "loadtests.commands.main", "inspect", "--arm", "eager", "--shapes", "prefill 9"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.splitlines() == [ended.stderr.strip()]
    assert "prefill 9" in ended.stderr
