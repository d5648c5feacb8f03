"""What a process of an arm takes over from earlier ones: what its cache folder holds, and its profile if it asks."""

from __future__ import annotations

from dataclasses import replace

from servers.config import ArmConfig, CompileConfig, ModelConfig
from servers.program import isolate_compiler, on_its_card_alone

ARM = ArmConfig.from_preset("compiled-naive")


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


def test_a_process_of_an_arm_sees_that_arms_card_alone() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "4,7"}
    arm = ArmConfig.from_preset("eager", model=ModelConfig(device="cuda:1"))
    assert on_its_card_alone(arm, environment).model.device == "cuda:0"
    assert environment == {"CUDA_VISIBLE_DEVICES": "7"}
