"""Both sides of every border of an arm's shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servers.config import ArmConfig, CompileConfig, EngineConfig, ModelConfig, ShapeConfig
from servers.engine.borders import batch_borders, late_contexts, prompt_borders
from servers.engine.shapes import shape_policy

ENGINE = EngineConfig(slots=4, max_prompt_tokens=40, max_new_tokens=12)


def test_exact_shapes_have_their_ends_and_the_sizes_that_compilers_treat_apart() -> None:
    assert prompt_borders(ArmConfig(engine=ENGINE)) == {1, 2, 3, 40}
    assert prompt_borders(ArmConfig(engine=ENGINE, shapes=ShapeConfig(min_size=4))) == {1, 2, 3, 4, 5, 40}


def test_a_prompt_whose_last_chunk_is_one_token_is_among_them() -> None:
    assert {16, 17} <= prompt_borders(ArmConfig(engine=replace(ENGINE, prefill_chunk=16)))


def test_given_bounds_are_met_from_both_sides() -> None:
    policy = CompileConfig(
        enabled=True, mark_dynamic=True, guarded=True, length_bounds=(8, 40), context_bounds=(20, 52)
    )
    borders = prompt_borders(ArmConfig(engine=ENGINE, compile=policy))
    assert {7, 8, 40} <= borders
    assert {18, 19, 20} <= borders, "decoded at 19 and 20, extended to 19 and 20"


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


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        (ShapeConfig(), {1, 2, 3, 20}),
        (ShapeConfig(min_size=4), {1, 2, 3, 4, 5, 20}),
        (ShapeConfig(kind="pad"), {1, 2, 20}),
        (ShapeConfig(kind="buckets", batch_ladder=(6, 20)), {1, 2, 6, 7, 20}),
        (ShapeConfig(kind="buckets"), {1, 2, 3, 4, 5, 8, 9, 16, 17, 20}),
    ],
)
def test_batches_of_texts_lie_on_both_sides_of_every_border(shapes: ShapeConfig, expected: set[int]) -> None:
    model = ModelConfig(id="random:bert-tiny", task="embed")
    assert batch_borders(ArmConfig(model=model, shapes=shapes, engine=EngineConfig(slots=20))) == expected


def test_contexts_that_no_prompt_reaches_are_asked_on_both_sides_up_to_the_longest() -> None:
    assert late_contexts(ArmConfig(engine=ENGINE)) == {51}
    shapes = ShapeConfig(kind="buckets", context_ladder=(16, 40, 41, 46, 52))
    assert late_contexts(ArmConfig(engine=ENGINE, shapes=shapes)) == {42, 46, 47, 51}
    policy = CompileConfig(enabled=True, mark_dynamic=True, context_bounds=(2, 52))
    assert late_contexts(ArmConfig(engine=ENGINE, compile=policy)) == {51}
    # one new token is the prefill's; of two, the second is decoded from the context that the longest prompt itself has
    assert not late_contexts(ArmConfig(engine=replace(ENGINE, max_new_tokens=1)))
    assert not late_contexts(ArmConfig(engine=replace(ENGINE, max_new_tokens=2)))
