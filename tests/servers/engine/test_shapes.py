from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servers.config import ArmConfig, EngineConfig, ShapeConfig
from servers.engine.shapes import Buckets, StepShape, shape_policy
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
