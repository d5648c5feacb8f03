from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servers.config import PRESETS, ArmConfig, CompileConfig, EngineConfig, ModelConfig
from servers.engine.shapes import StepShape, shape_policy
from servers.engine.text_shapes import text_shapes
from servers.engine.warmup import first_prompt, warmup_plan


def plan_of(engine: EngineConfig) -> list[StepShape]:
    arm = ArmConfig(engine=engine, compile=CompileConfig(enabled=True, warmup="lengths"))
    return warmup_plan(arm)


def test_lengths_warms_prompts_of_many_lengths_and_never_two_rows() -> None:
    plan = plan_of(EngineConfig(slots=8, max_prompt_tokens=4096, prefill_batch=2))

    assert {shape.batch for shape in plan} == {1}
    assert [shape.length for shape in plan if shape.kind == "prefill"] == [4095, 2047, 1023, 511, 255, 127, 63, 31]


def test_a_long_prompt_is_warmed_chunk_by_chunk() -> None:
    plan = plan_of(EngineConfig(max_prompt_tokens=1024, prefill_chunk=512))

    assert plan[:3] == [
        StepShape("prefill", 1, 512, 512),
        StepShape("extend", 1, 511, 1023),
        StepShape("decode", 1, 1, 1024),
    ]
    assert len(set(plan)) == len(plan)


@pytest.mark.parametrize("preset", sorted(PRESETS))
@given(longest=st.integers(1, 5000), chunk=st.integers(0, 600))
def test_the_first_request_of_a_replica_meets_shapes_that_were_warmed(preset: str, longest: int, chunk: int) -> None:
    engine = EngineConfig(max_prompt_tokens=longest, prefill_chunk=chunk)
    arm = ArmConfig.from_preset(preset, engine=engine)
    arm = replace(arm, compile=replace(arm.compile, warmup="lengths", capture=False))
    shapes = shape_policy(arm.shapes, engine)
    plan, prompt = warmup_plan(arm), first_prompt(arm)

    assert shapes.prefill(1, min(prompt, engine.prefill_tokens)) in plan
    assert shapes.decode(1, prompt + 1) in plan


@pytest.mark.parametrize("warmup", ["shapes", "lengths", "minimal"])
@pytest.mark.parametrize("preset", sorted(PRESETS))
@given(longest=st.integers(1, 512), slots=st.integers(2, 40))
def test_the_first_text_of_an_encoder_meets_a_shape_that_was_warmed(
    warmup: Literal["shapes", "lengths", "minimal"], preset: str, longest: int, slots: int
) -> None:
    engine = EngineConfig(slots=slots, max_prompt_tokens=longest)
    arm = ArmConfig.from_preset(preset, engine=engine, model=ModelConfig(id="random:bert-tiny", task="embed"))
    if not arm.compile.capture:
        arm = replace(arm, compile=replace(arm.compile, warmup=warmup))
    plan, first = warmup_plan(arm), text_shapes(arm.shapes, engine).encode(1, first_prompt(arm))
    assert {shape.kind for shape in plan} == {"encode"}
    if arm.compile.enabled and not arm.compile.mark_dynamic:
        assert first in plan
    assert len(set(plan)) == len(plan)


@pytest.mark.parametrize("longest", [1, 2, 3, 64, 1000])
def test_no_length_is_warmed_twice(longest: int) -> None:
    lengths = [shape.length for shape in plan_of(EngineConfig(max_prompt_tokens=longest)) if shape.kind == "prefill"]

    assert all(before > after for before, after in pairwise(lengths))
    assert lengths[-1] >= 1
