"""Compiled code in a file: whole or refused, and refused wherever it does not belong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tailgate.servers.compiler import artifacts
from tailgate.servers.config import ArmConfig, EngineConfig
from tests.servers.test_config import arm_from, refusal

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = b"machine code" * 400
BUCKETED = arm_from("compiled-bucketed", engine=EngineConfig(slots=4))


def written(arm: ArmConfig, path: Path, patch: pytest.MonkeyPatch, *, on: str = "cpu", **changed: Any) -> ArmConfig:
    """Return the arm with an artifact of its own, which says what `changed` of it."""
    facts_of = artifacts.facts_of
    with patch.context() as saving:
        saving.setenv("TORCHINDUCTOR_CACHE_DIR", str(path.parent / "compiled"))
        saving.setattr(artifacts, "facts_of", lambda *given: {**facts_of(*given), **changed})
        (path.parent / "compiled/locks").mkdir(parents=True)
        for name in ("kernel.so", "locks/kernel.lock"):
            (path.parent / "compiled" / name).write_bytes(LIBRARY)
        artifacts.save(str(path), arm, on, graphs=1)
    return arm.replace(compile=arm.compile.replace(artifact=str(path)))


@pytest.fixture
def arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ArmConfig:
    return written(BUCKETED, tmp_path / "arm.compiled", monkeypatch)


def test_an_artifact_is_read_as_it_was_written_and_a_byte_changed_or_missing_anywhere_is_damage(arm: ArmConfig) -> None:
    path = Path(arm.compile.artifact)
    assert len(artifacts.read(arm, "cpu").identity) == 16
    whole = path.read_bytes()
    begin = whole.index(b"\n") + 1
    for at in (begin, begin + 63, begin + 65, begin + 400, len(whole) // 2, len(whole) - 1):
        for content in (whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :], whole[:at], whole + b"\0"):
            path.write_bytes(content)
            assert "is damaged" in refusal(artifacts.read, arm, "cpu"), at


def test_an_open_library_is_replaced_and_not_written_to(
    arm: ArmConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that has loaded a library ends by SIGSEGV when its bytes change."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(artifacts, "compile_portably", lambda: None)
    library = tmp_path / "kernel.so"
    library.write_bytes(b"loaded")
    with library.open("rb") as loaded:
        artifacts.load(arm, "cpu")
        assert (loaded.read(), library.read_bytes()) == (b"loaded", LIBRARY)
    assert not (tmp_path / "locks").exists()


def test_a_file_that_is_no_artifact_is_refused(tmp_path: Path) -> None:
    (tmp_path / "older").write_bytes(b"tailgate compiled code 2\nabc\n")
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "pipe")
    for name in ("older", "empty", "pipe", "missing", "."):
        arm = BUCKETED.replace(compile=BUCKETED.compile.replace(artifact=str(tmp_path / name)))
        assert "no file of compiled code in this version's format" in refusal(artifacts.read, arm, "cpu")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"torch": "2.11.0+cu130"}, "torch 2.11.0+cu130"),
        ({"device": "NVIDIA H100"}, "device NVIDIA H100 and here it is a processor with"),
        ({"model name": "llama"}, "model name llama and here it is random:tiny"),
        ({"engine.slots": 8}, "engine.slots 8 and here it is 4"),
        ({"engine.later": 8}, "engine.later 8 and here it is not set"),
        ({"compile.options.combo_kernels": False}, "compile.options.combo_kernels False"),
    ],
)
def test_an_artifact_of_another_place_model_or_policy_is_refused(
    changed: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "other.compiled"
    message = refusal(artifacts.read, written(BUCKETED, path, monkeypatch, **changed), "cpu")
    assert all(word in message for word in (words, '"compiled-bucketed"', f'compile.artifact "{path}"'))


def test_settings_that_no_graph_depends_on_may_differ(arm: ArmConfig) -> None:
    mine = arm.replace(
        name="other",
        model=arm.model.replace(seed=7, device="cpu"),
        engine=arm.engine.replace(max_queue=1, drain_grace_s=1.0),
    )
    assert artifacts.read(mine, "cpu") == artifacts.read(arm, "cpu")


SETTINGS = ("engine.slots=1", "engine.max_prompt_tokens=16", "engine.max_new_tokens=4")
ARM = ("--arm", "compiled-padded", *(word for setting in SETTINGS for word in ("--set", setting)))


def tailgate(*words: str, code: int | None = 0, **environment: str) -> Any:
    """What `tailgate` says as JSON, or its stderr where it is to refuse. Any exit code will do where it is None."""
    command = [sys.executable, "-m", "tailgate.loadtests.commands.main", *words, "--json"]
    ended = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=500, check=False, env={**os.environ, **environment}
    )
    assert code in (None, ended.returncode), ended.stderr
    return ended.stderr if code else json.loads(ended.stdout)


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shipped") / "padded.compiled"
    said = tailgate("precompile", *ARM, "--out", str(path))
    assert said["artifact"] == str(path)
    assert (said["graphs"], said["unkept"]) == (2, 0)
    return path
