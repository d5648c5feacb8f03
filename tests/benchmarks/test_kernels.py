from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.inprocess import InProcess
from benchmarks.kernels import profile_decode
from benchmarks.traffic import WORKLOADS, decode_set
from servers.config import ArmConfig, EngineConfig, ModelConfig


@pytest.fixture(scope="module")
def eager() -> Iterator[InProcess]:
    engine = EngineConfig(slots=4, max_prompt_tokens=24, max_new_tokens=64, threads=1)
    arm = ArmConfig.from_preset("eager", model=ModelConfig(device="cpu"), engine=engine)
    target = InProcess.load(arm, lambda text: None)
    yield target
    target.close()


@pytest.mark.parametrize("batch", [1, 4])
def test_every_product_of_a_step_is_counted(eager: InProcess, batch: int) -> None:
    work = replace(WORKLOADS["small"], decode_new=64)
    profile = profile_decode(eager, decode_set(work, batch, eager.vocab_size, np.random.default_rng(0)))
    products = {kernel.name: kernel for kernel in profile.kernels}["aten::mm"]
    # seven projections in each of two layers, and the output; engine and profiler may be a step apart at an end
    assert products.calls == pytest.approx(15, abs=0.5)
    assert 0 < products.us < profile.busy_us < profile.step_us
    assert profile.steps == 32
