from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from servers import artifact
from servers.compiler.recorder import CompileRecorder
from servers.config import ArmConfig, EngineConfig
from servers.engine import runner as runner_module
from servers.engine.runner import ModelRunner
from servers.fields import ConfigError
from tests.servers.test_artifact import ARM, shipped, tailgate

__all__ = ["shipped"]


def libraries(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*.so")}


@pytest.mark.timeout(600)
def test_a_start_with_an_artifact_compiles_nothing_anew(shipped: Path, tmp_path: Path) -> None:
    fresh = tmp_path / "fresh"
    setting = f"compile.artifact={shipped}"
    found = tailgate("inspect", *ARM, "--shapes", "prefill 1x9", "--cache-dir", str(fresh), "--set", setting)
    assert [graph["cache"] for graph in found["graphs"]] == ["hit", "hit"]
    assert found["startup_ns"]["artifact"] > 0
    # A hit may still hide the C++ compiler, which torch does not report: it left nothing that was not shipped.
    unpacked = tmp_path / "unpacked"
    artifact.unpack(artifact.read(str(shipped)), unpacked)
    assert libraries(fresh) == libraries(unpacked)
    assert len(libraries(fresh)) > 2


@pytest.mark.timeout(600)
def test_an_artifact_of_another_policy_is_refused_before_anything_starts(shipped: Path) -> None:
    setting = f"compile.artifact={shipped}"
    said = tailgate("serve", "--preset", "compiled-padded", "--port", "0", "--set", setting, code=2)
    assert len(said.splitlines()) == 1
    assert "engine.slots 1 and here it is 8" in said


def test_an_artifact_of_another_machine_is_refused_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arm = ArmConfig.from_preset("compiled-padded", engine=EngineConfig(slots=1))
    (tmp_path / "cache").mkdir()
    facts = artifact.facts_of(arm, device="Another processor", threads=1, on_cpu=True)
    written = artifact.write(str(tmp_path / "other.compiled"), tmp_path / "cache", facts)
    arm = replace(arm, model=replace(arm.model, device="cpu"), compile=replace(arm.compile, artifact=written.path))
    loaded: list[object] = []
    monkeypatch.setattr(runner_module, "load_model", loaded.append)
    with pytest.raises(ConfigError, match="was written on Another processor and this is"):
        ModelRunner(arm, CompileRecorder()).load()
    assert loaded == []


def second_length(folder: Path, *words: str) -> tuple[str, list[bool]]:
    """What a second prompt length meets at a naive arm, and which of its graphs are dynamic."""
    naive = ("--arm", "compiled-naive", "--slots", "2", "--set", "compile.backend=aot_eager", "--shapes", "prefill 1x7")
    # the user's own name for a profile, which would carry one from start to start
    found = tailgate("inspect", *naive, "--cache-dir", str(folder), *words, code=None, TORCH_COMPILE_JOB_ID="mine")
    return found["shapes"][0]["outcome"], [graph["dynamic"] for graph in found["graphs"]]


@pytest.mark.timeout(600)
def test_what_an_earlier_start_learned_of_sizes_is_taken_over_only_where_it_is_asked_for(tmp_path: Path) -> None:
    first = ("recompile", [False, False, True])
    assert [second_length(tmp_path / "off") for _ in range(2)] == [first, first]
    asked = ("--set", "compile.profile=true")
    assert second_length(tmp_path / "on", *asked) == first
    assert second_length(tmp_path / "on", *asked) == ("ready", [True, False])
