"""The shapes of steps, their borders, and the plan of the warm-up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailgate.servers.complaint import ConfigError
from tailgate.servers.config import (
    ArmConfig,
    CompileConfig,
    EngineConfig,
    ModelConfig,
    ShapeConfig,
    default_batches,
    default_lengths,
    prefill_lengths,
)
from tailgate.servers.engine.shapes import (
    Buckets,
    ShapePolicy,
    StepShape,
    first_prompt,
    policy_of,
    prompt_borders,
    warmup_plan,
)
from tailgate.servers.fields import read
from tailgate.servers.presets import PRESETS
from tests.servers.test_config import arm_from

ENGINE = EngineConfig(slots=4, max_prompt_tokens=40, max_new_tokens=12)
TEXTS = EngineConfig(slots=6, max_prompt_tokens=100)
ENCODER = ModelConfig(id="some/encoder", task="embed")
ENGINES = st.builds(
    EngineConfig,
    slots=st.integers(2, 64),
    max_prompt_tokens=st.integers(1, 5000),
    max_new_tokens=st.integers(1, 500),
    step_tokens=st.one_of(st.just(0), st.integers(65, 600)),
)


def text_shapes(shapes: ShapeConfig, engine: EngineConfig) -> ShapePolicy:
    return policy_of(ArmConfig(model=ENCODER, shapes=shapes, engine=engine))


POLICIES = st.sampled_from(
    [ShapeConfig(), ShapeConfig(min_size=2), ShapeConfig(kind="pad"), ShapeConfig(kind="buckets")]
)


@given(engine=ENGINES, shapes=POLICIES, data=st.data())
def test_a_step_holds_its_requests_and_is_planned(
    engine: EngineConfig, shapes: ShapeConfig, data: st.DataObject
) -> None:
    arm = ArmConfig(shapes=shapes, engine=engine)
    policy = policy_of(arm)
    length = data.draw(st.integers(1, arm.longest_step))
    rows = data.draw(st.integers(1, engine.slots))
    context = data.draw(st.integers(1, engine.max_length))
    prefill, decode = policy.prefill(length), policy.decode(rows, context)
    assert (prefill.batch, prefill.length >= length) == (1, True)
    assert rows <= decode.batch <= engine.slots
    assert decode.length == 1
    assert context <= decode.context <= max(engine.max_length, shapes.min_size)
    met = {prefill, decode}
    if policy.is_closed():
        assert met <= set(policy.planned())


def test_each_kind_of_policy_pads_as_its_name_says() -> None:
    engine = EngineConfig(slots=8, max_prompt_tokens=100, max_new_tokens=20)
    padded = policy_of(ArmConfig(shapes=ShapeConfig(kind="pad"), engine=engine))
    assert list(padded.planned()) == [StepShape("prefill", 1, 108, 108), StepShape("decode", 8, 1, 120)]
    for min_size, prefill, decode, encode in (
        (1, StepShape("prefill", 1, 1, 1), StepShape("decode", 1, 1, 91), StepShape("encode", 1, 1, 1)),
        (2, StepShape("prefill", 1, 2, 2), StepShape("decode", 2, 1, 91), StepShape("encode", 2, 2, 2)),
    ):
        exact = policy_of(ArmConfig(shapes=ShapeConfig(min_size=min_size)))
        assert (exact.prefill(1), exact.decode(1, 91)) == (prefill, decode)
        assert exact.prefill(37) == StepShape("prefill", 1, 37, 37)
        assert text_shapes(ShapeConfig(min_size=min_size), TEXTS).encode(1, 1) == encode
    padded_texts = text_shapes(ShapeConfig(kind="pad"), TEXTS)
    assert list(padded_texts.planned()) == [StepShape("encode", 6, 100, 100)] == [padded_texts.encode(1, 1)]
    buckets = text_shapes(ShapeConfig(kind="buckets"), TEXTS)
    sizes = {(batch, length) for batch in (1, 2, 4, 6) for length in (32, 64, 96, 100)}
    assert sorted((shape.batch, shape.length) for shape in buckets.planned()) == sorted(sizes)
    assert buckets.encode(3, 33) == StepShape("encode", 4, 64, 64)


def test_a_size_past_the_ladder_is_refused_with_the_largest_bucket() -> None:
    decoder = Buckets(batches=(4,), lengths=(128, 512), context=640)
    with pytest.raises(ConfigError, match=r"640 .* 512.*bucket of 640"):
        decoder.prefill(640)
    engine = EngineConfig(slots=2, max_prompt_tokens=8)
    encoder = text_shapes(ShapeConfig(kind="buckets", batch_ladder=(2,), length_ladder=(8,)), engine)
    with pytest.raises(ConfigError, match=r"9 .* 8"):
        encoder.encode(1, 9)


@given(min_size=st.integers(1, 4), slots=st.integers(4, 70), longest=st.integers(1, 600))
def test_an_open_policy_plans_the_smallest_and_largest_batch_of_texts(min_size: int, slots: int, longest: int) -> None:
    engine = EngineConfig(slots=slots, max_prompt_tokens=longest)
    planned = list(text_shapes(ShapeConfig(min_size=min_size), engine).planned())
    assert {min_size, slots} <= {shape.batch for shape in planned}
    assert len(planned) == len(set(planned))
    assert all(shape.batch >= min_size and shape.length >= min_size for shape in planned)
    if longest > 40:
        assert len({shape.length for shape in planned if shape.batch == slots}) > 1


def test_borders_of_prompts_are_both_ends_and_chunks() -> None:
    assert prompt_borders(ArmConfig(engine=ENGINE)) == {1, 2, 3, 40}
    assert prompt_borders(ArmConfig(engine=ENGINE, shapes=ShapeConfig(min_size=4))) == {1, 2, 3, 4, 5, 40}
    assert {16, 17} <= prompt_borders(ArmConfig(engine=ENGINE.replace(step_tokens=16)))


@given(
    ladder=st.lists(st.integers(1, 39), max_size=5, unique=True).map(lambda steps: (*sorted(steps), 44)),
    most=st.sampled_from([0, 16, 40]),
)
def test_wherever_the_shapes_of_two_neighbouring_prompts_differ_both_are_borders(
    ladder: tuple[int, ...], most: int
) -> None:
    shapes = ShapeConfig(kind="buckets", length_ladder=ladder)
    arm = ArmConfig(shapes=shapes, engine=ENGINE.replace(step_tokens=most))
    policy, step = policy_of(arm), arm.longest_step

    def met(length: int) -> list[object]:
        return [policy.prefill(min(length, step)), length > step, policy.decode(1, length + 1)]

    borders = prompt_borders(arm)
    assert borders <= set(range(1, 41))
    for length in range(1, 40):
        if met(length) != met(length + 1):
            assert {length, length + 1} <= borders


def plan_of(engine: EngineConfig) -> list[StepShape]:
    return warmup_plan(ArmConfig(engine=engine, compile=CompileConfig(enabled=True, warmup="lengths")))


def test_a_warm_up_by_lengths_runs_one_row_of_many_lengths_and_chunks() -> None:
    plan = plan_of(EngineConfig(slots=8, max_prompt_tokens=4096))
    assert {shape.batch for shape in plan} == {1}
    assert [shape.length for shape in plan if shape.kind == "prefill"] == [4095, 2047, 1023, 511, 255, 127, 63, 31]
    plan = plan_of(EngineConfig(max_prompt_tokens=1024, step_tokens=512))
    assert [str(shape) for shape in plan[:3]] == ["prefill 512", "prefill 511", "decode 1@1024"]
    assert len(set(plan)) == len(plan)


@pytest.mark.parametrize("preset", sorted(PRESETS))
@given(longest=st.integers(1, 5000), most=st.one_of(st.just(0), st.integers(9, 600)))
def test_the_first_request_of_a_replica_meets_shapes_that_were_warmed(preset: str, longest: int, most: int) -> None:
    engine = EngineConfig(max_prompt_tokens=longest, step_tokens=most)
    arm = arm_from(preset, engine=engine)
    arm = arm.replace(compile=arm.compile.replace(warmup="lengths", capture=False))
    shapes = policy_of(arm)
    plan, prompt = warmup_plan(arm), first_prompt(arm)
    assert shapes.prefill(min(prompt, arm.longest_step)) in plan
    assert shapes.decode(1, prompt + 1) in plan


def test_ladders_double_and_rise() -> None:
    assert [default_batches(slots) for slots in (1, 6, 70)] == [
        (1,),
        (1, 2, 4, 6),
        (1, 2, 4, 8, 16, 24, 32, 48, 64, 70),
    ]
    assert default_lengths(300) == (32, 64, 96, 128, 160, 192, 224, 256, 300)
    assert default_lengths(600)[-4:] == (384, 448, 512, 600)
    for longest in (2, 32, 100, 4096):
        arm = arm_from("compiled-bucketed", engine=EngineConfig(max_prompt_tokens=longest))
        assert default_lengths(longest + 8) == prefill_lengths(arm)
    for ladder in ([0, 1], [2, 2], [4, 2], [-1]):
        with pytest.raises(ConfigError, match="length_ladder"):
            read(ShapeConfig, {"kind": "buckets", "length_ladder": ladder})
