"""Both sides of every border of an arm's shapes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servers.config import PRESETS, ArmConfig, CompileConfig, EngineConfig, ModelConfig, ShapeConfig
from servers.engine.borders import batch_borders, late_contexts, prompt_borders
from servers.engine.shapes import Buckets, StepShape, shape_policy
from servers.engine.text_shapes import text_shapes
from servers.engine.warmup import first_prompt, warmup_plan
from servers.fields import ConfigError

ENGINES = st.builds(
    EngineConfig,
    slots=st.integers(2, 64),
    prefill_batch=st.integers(1, 2),
    max_prompt_tokens=st.integers(1, 5000),
    max_new_tokens=st.integers(1, 500),
    prefill_chunk=st.integers(0, 600),
)
POLICIES = st.sampled_from(
    [
        ShapeConfig(kind="exact"),
        ShapeConfig(kind="exact", min_size=2),
        ShapeConfig(kind="pad"),
        ShapeConfig(kind="buckets"),
    ]
)


@given(engine=ENGINES, shapes=POLICIES, data=st.data())
def test_no_step_is_smaller_than_what_it_must_hold(
    engine: EngineConfig, shapes: ShapeConfig, data: st.DataObject
) -> None:
    policy = shape_policy(shapes, engine)
    length = data.draw(st.integers(1, engine.prefill_tokens))
    batch = data.draw(st.integers(1, engine.prefill_batch))
    if engine.prefill_tokens < engine.max_prompt_tokens:
        end = data.draw(st.integers(engine.prefill_tokens + 1, engine.max_prompt_tokens))
        chunk = policy.extend(batch, length, end)
        assert (chunk.batch >= batch, chunk.length >= length, chunk.context >= end) == (True, True, True)
        assert chunk.context <= max(engine.max_prompt_tokens, shapes.min_size)
    prefill = policy.prefill(batch, length)
    assert prefill.batch >= batch
    assert prefill.length >= length
    assert prefill.context >= prefill.length
    rows = data.draw(st.integers(1, engine.slots))
    context = data.draw(st.integers(1, engine.max_length))
    decode = policy.decode(rows, context)
    assert decode.batch >= rows
    assert decode.context >= context
    assert decode.length == 1
    assert decode.batch <= engine.slots
    assert decode.context <= engine.max_length or engine.max_length < shapes.min_size


@given(engine=ENGINES, shapes=POLICIES, data=st.data())
def test_a_closed_policy_lists_every_shape_that_it_can_produce(
    engine: EngineConfig, shapes: ShapeConfig, data: st.DataObject
) -> None:
    policy = shape_policy(shapes, engine)
    if not policy.is_closed():
        return
    planned = set(policy.planned())
    length = data.draw(st.integers(1, engine.prefill_tokens))
    batch = data.draw(st.integers(1, engine.prefill_batch))
    if engine.prefill_tokens < engine.max_prompt_tokens:
        end = data.draw(st.integers(engine.prefill_tokens + 1, engine.max_prompt_tokens))
        assert policy.extend(batch, length, end) in planned
    assert policy.prefill(batch, length) in planned
    rows, context = data.draw(st.integers(1, engine.slots)), data.draw(st.integers(1, engine.max_length))
    assert policy.decode(rows, context) in planned


def test_padded_has_one_prefill_and_one_decode_shape() -> None:
    policy = shape_policy(ShapeConfig(kind="pad"), EngineConfig(slots=8, max_prompt_tokens=100, max_new_tokens=20))
    assert list(policy.planned()) == [StepShape("prefill", 1, 100, 100), StepShape("decode", 8, 1, 120)]


def test_exact_pads_nothing() -> None:
    policy = shape_policy(ShapeConfig(), EngineConfig())
    assert policy.prefill(1, 37) == StepShape("prefill", 1, 37, 37)
    assert policy.decode(3, 91) == StepShape("decode", 3, 1, 91)


def test_dynamic_pads_one_to_two_because_compilers_specialise_one() -> None:
    policy = shape_policy(ShapeConfig(min_size=2), EngineConfig())
    assert policy.prefill(1, 1) == StepShape("prefill", 1, 2, 2)
    assert policy.decode(1, 9).batch == 2


def test_a_value_past_the_ladder_is_refused_with_value_limit_and_remedy() -> None:
    policy = Buckets(batches=(4,), prefill_batches=(1,), lengths=(128, 512), contexts=(640,))
    with pytest.raises(ConfigError, match="prompt has 640 tokens; largest bucket is 512: add a bucket of 640"):
        policy.prefill(1, 640)


def test_min_size_beyond_the_slots_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.slots"):
        ArmConfig(shapes=ShapeConfig(min_size=2), engine=EngineConfig(slots=1))


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


ENGINE_TEXT_SHAPES = EngineConfig(slots=6, max_prompt_tokens=100)


def test_exact_shapes_pad_texts_to_the_longest_of_their_batch_alone() -> None:
    assert text_shapes(ShapeConfig(), ENGINE_TEXT_SHAPES).encode(3, 17) == StepShape("encode", 3, 17, 17)
    assert text_shapes(ShapeConfig(min_size=2), ENGINE_TEXT_SHAPES).encode(1, 1) == StepShape("encode", 2, 2, 2)


def test_one_padded_shape_holds_every_batch() -> None:
    shapes = text_shapes(ShapeConfig(kind="pad"), ENGINE_TEXT_SHAPES)
    assert list(shapes.planned()) == [StepShape("encode", 6, 100, 100)] == [shapes.encode(1, 1)]


def test_buckets_are_batch_by_length() -> None:
    shapes = text_shapes(ShapeConfig(kind="buckets"), ENGINE_TEXT_SHAPES)
    assert {shape.batch for shape in shapes.planned()} == {1, 2, 4, 6}
    assert {shape.length for shape in shapes.planned()} == {32, 64, 100}
    assert len(list(shapes.planned())) == 12
    assert shapes.encode(3, 33) == StepShape("encode", 4, 64, 64)


def test_a_text_beyond_the_largest_bucket_names_the_bucket() -> None:
    shapes = text_shapes(ShapeConfig(kind="buckets", batch_ladder=(2,), length_ladder=(8,)), ENGINE_TEXT_SHAPES)
    with pytest.raises(ConfigError, match="text has 9 tokens; largest bucket is 8"):
        shapes.encode(1, 9)


@given(kind=st.sampled_from(["pad", "buckets"]), slots=st.integers(1, 70), longest=st.integers(1, 600), data=st.data())
def test_a_closed_policy_has_planned_whatever_can_come(
    kind: str, slots: int, longest: int, data: st.DataObject
) -> None:
    engine = EngineConfig(slots=slots, max_prompt_tokens=longest)
    shapes = text_shapes(replace(ShapeConfig(), kind=kind), engine)
    batch, length = data.draw(st.integers(1, slots)), data.draw(st.integers(1, longest))
    shape = shapes.encode(batch, length)
    assert shapes.is_closed()
    assert shape in set(shapes.planned())
    assert shape.batch >= batch
    assert shape.length >= length


@given(min_size=st.integers(1, 4), slots=st.integers(4, 70), longest=st.integers(1, 600))
def test_an_open_policy_plans_both_ends_of_the_batch_and_two_lengths_of_each_graph(
    min_size: int, slots: int, longest: int
) -> None:
    engine = EngineConfig(slots=slots, max_prompt_tokens=longest)
    planned = list(text_shapes(ShapeConfig(min_size=min_size), engine).planned())
    assert {min_size, slots} <= {shape.batch for shape in planned}
    assert len(planned) == len(set(planned))
    assert all(shape.batch >= min_size and shape.length >= min_size for shape in planned)
    if longest > 40:
        assert len({shape.length for shape in planned if shape.batch == slots}) > 1


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
