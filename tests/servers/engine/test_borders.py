"""Both sides of every border of an arm's shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servers.config import ArmConfig, CompileConfig, EngineConfig, ShapeConfig
from servers.engine.borders import prompt_borders
from servers.engine.shapes import shape_policy

ENGINE = EngineConfig(slots=4, max_prompt_tokens=40, max_new_tokens=12)


def test_exact_shapes_have_their_ends_and_the_sizes_that_compilers_treat_apart() -> None:
    assert prompt_borders(ArmConfig(engine=ENGINE)) == {1, 2, 3, 40}
    assert prompt_borders(ArmConfig(engine=ENGINE, shapes=ShapeConfig(min_size=4))) == {1, 2, 3, 4, 5, 40}


def test_a_prompt_whose_last_chunk_is_one_token_is_among_them() -> None:
    assert {16, 17} <= prompt_borders(ArmConfig(engine=replace(ENGINE, prefill_chunk=16)))


def test_given_bounds_are_met_from_both_sides() -> None:
    policy = CompileConfig(enabled=True, mark_dynamic=True, length_bounds=(8, 40), context_bounds=(20, 52))
    borders = prompt_borders(ArmConfig(engine=ENGINE, compile=policy))
    assert {7, 8, 40} <= borders
    assert {18, 19, 20} <= borders, "decoded at 19 and 20, extended to 19 and 20"


@settings(deadline=None)
@given(
    ladder=st.lists(st.integers(1, 39), max_size=5, unique=True).map(lambda steps: (*sorted(steps), 40)),
    contexts=st.lists(st.integers(1, 51), max_size=3, unique=True).map(lambda steps: (*sorted(steps), 52)),
    chunk=st.sampled_from([0, 16, 40]),
)
def test_wherever_the_shapes_of_two_neighbouring_prompts_differ_both_are_borders(
    ladder: tuple[int, ...], contexts: tuple[int, ...], chunk: int
) -> None:
    shapes = ShapeConfig(kind="buckets", length_ladder=ladder, context_ladder=contexts)
    arm = ArmConfig(shapes=shapes, engine=replace(ENGINE, prefill_chunk=chunk))
    policy, step = shape_policy(arm.shapes, arm.engine), arm.engine.prefill_tokens

    def met(length: int) -> list[object]:
        begun = policy.prefill(1, min(length, step))
        rest = [policy.extend(1, 1, length)] if length > step else []
        return [begun, *rest, policy.decode(1, length + 1)]

    borders = prompt_borders(arm)
    for length in range(1, 40):
        if met(length) != met(length + 1):
            assert {length, length + 1} <= borders


@pytest.mark.parametrize("preset", ["eager", "compiled-bucketed", "compiled-strict"])
def test_borders_are_prompts_that_the_engine_takes(preset: str) -> None:
    assert prompt_borders(ArmConfig.from_preset(preset, engine=ENGINE)) <= set(range(1, 41))
