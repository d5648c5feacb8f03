"""The engine on a CUDA device: `make test-gpu`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from servers.compile_events import CompileRecorder
from servers.config import ArmConfig, ModelConfig
from tests.servers.test_runner import ENGINE, assert_greedy_like_generate, jobs_for, recorder, runner_for, serve

__all__ = ["recorder"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]
FLOAT32 = ModelConfig(device="cuda", dtype="float32")


@pytest.mark.parametrize("preset", ["eager", "compiled-padded", "compiled-dynamic"])
def test_arms_decode_like_generate_and_are_quiet_after_warm_up(preset: str, recorder: CompileRecorder) -> None:
    runner = runner_for(ArmConfig.from_preset(preset, model=FLOAT32, engine=ENGINE), recorder)
    warm = {event.kind for event in recorder.drain()}
    jobs = jobs_for(runner.vocab_size, seed=1)
    serve(runner, jobs)
    assert [(event.kind, event.shape) for event in recorder.drain()] == []
    assert_greedy_like_generate(runner, jobs)
    if preset == "compiled-padded":
        assert {"compile", "graph_capture"} <= warm


def test_the_naive_arm_recompiles_on_a_gpu_too(recorder: CompileRecorder) -> None:
    arm = ArmConfig.from_preset("compiled-naive", model=FLOAT32, engine=ENGINE)
    runner = runner_for(replace(arm, compile=replace(arm.compile, backend="aot_eager")), recorder)
    recorder.drain()
    serve(runner, jobs_for(runner.vocab_size, seed=3))
    assert "recompile" in {event.kind for event in recorder.drain()}
