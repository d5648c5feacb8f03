"""What a process of an arm takes over from earlier ones: what its cache folder holds, and its profile if it asks."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from servers.artifact import made_for
from servers.config import ArmConfig, CompileConfig, ModelConfig
from servers.program import isolate_compiler, on_its_card_alone

ARM = ArmConfig.from_preset("compiled-naive")


@pytest.fixture(autouse=True)
def torch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where torch is taken to lie: a build without an assembler, as those for CPUs are."""
    folder = tmp_path / "torch"
    (folder / "bin").mkdir(parents=True)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: ModuleSpec(name, None, origin=f"{folder}/__init__.py")
    )
    return folder


def variables(arm: ArmConfig = ARM, folder: str = "/cache", **others: str) -> dict[str, str]:
    environment = {"PATH": "/bin", **others}
    isolate_compiler(environment, folder, arm)
    return environment


def test_nothing_is_taken_over_but_the_folder() -> None:
    carried = {
        "TORCH_COMPILE_JOB_ID": "mine",
        "TORCH_COMPILE_STICKY_PGO_READ": "mine",
        "TORCH_COMPILE_DYNAMIC_SOURCES": "L['x']",
        "TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE": "1",
        "TRITON_CACHE_DIR": "/home/me/.triton",
        "TORCHINDUCTOR_CACHE_DIR": "/tmp/mine",
        "TORCH_DYNAMO_AUTOMATIC_DYNAMIC_LOCAL_PGO": "1",
        "TORCHINDUCTOR_FX_COMPILE_MODE": "async+SUBPROCESS",
    }
    assert variables(**carried) == {
        "PATH": "/bin",
        "TORCHINDUCTOR_CACHE_DIR": "/cache",
        "TRITON_CACHE_DIR": "/cache/triton",
        "TORCH_DYNAMO_AUTOMATIC_DYNAMIC_LOCAL_PGO": "0",
    }


def test_without_a_folder_the_compilers_own_place_is_left_alone() -> None:
    kept = variables(folder="", TORCHINDUCTOR_CACHE_DIR="/tmp/mine")
    assert (kept["TORCHINDUCTOR_CACHE_DIR"], "TRITON_CACHE_DIR" in kept) == ("/tmp/mine", False)


def test_every_process_keys_kernels_by_the_assembler_that_torch_brings(torch_folder: Path) -> None:
    assembler = torch_folder / "bin" / "ptxas"
    assembler.touch(mode=0o644)
    assert "TRITON_PTXAS_PATH" not in variables(), "what cannot be run is not named"
    assembler.chmod(0o755)
    assert variables()["TRITON_PTXAS_PATH"] == str(assembler)
    assert variables(TRITON_PTXAS_PATH="/usr/bin/ptxas")["TRITON_PTXAS_PATH"] == "/usr/bin/ptxas"


def test_without_torch_no_assembler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "TRITON_PTXAS_PATH" not in variables()


def profile_name(arm: ArmConfig) -> str:
    asked = replace(arm, compile=replace(arm.compile, profile=True))
    kept = variables(asked, TORCH_COMPILE_JOB_ID="mine")
    assert kept["TORCH_DYNAMO_AUTOMATIC_DYNAMIC_LOCAL_PGO"] == "1"
    return kept["TORCH_COMPILE_JOB_ID"]


def test_arms_that_ask_for_their_profile_do_not_share_it() -> None:
    mine = profile_name(ARM)
    assert mine.startswith("tailgate-")
    assert profile_name(replace(ARM, name="other")) == mine, "a name is no policy"
    assert profile_name(replace(ARM, compile=replace(ARM.compile, artifact="file"))) == mine
    assert profile_name(ArmConfig(compile=CompileConfig(enabled=True, fullgraph=True))) != mine


def test_only_an_arm_that_asks_compiles_in_the_background() -> None:
    asked = replace(ARM, compile=replace(ARM.compile, background=True))
    kept = variables(asked, TORCHINDUCTOR_FX_COMPILE_MODE="SERIALIZE", TORCHINDUCTOR_FX_GRAPH_CACHE="1")
    assert kept["TORCHINDUCTOR_FX_COMPILE_MODE"] == "progressive+SUBPROCESS"
    assert (kept["TORCHINDUCTOR_FX_GRAPH_CACHE"], kept["TORCHINDUCTOR_AUTOGRAD_CACHE"]) == ("0", "0")
    assert made_for(asked, on_cpu=True) != made_for(ARM, on_cpu=True)
    assert ArmConfig.from_dict(asked.to_dict()) == asked


def test_a_process_of_an_arm_sees_that_arms_card_alone() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "4,7"}
    arm = ArmConfig.from_preset("eager", model=ModelConfig(device="cuda:1"))
    assert on_its_card_alone(arm, environment).model.device == "cuda:0"
    assert environment == {"CUDA_VISIBLE_DEVICES": "7"}
