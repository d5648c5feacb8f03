from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servers.config import EngineConfig, ShapeConfig
from servers.engine.shapes import StepShape
from servers.engine.text_shapes import text_shapes
from servers.fields import ConfigError

ENGINE = EngineConfig(slots=6, max_prompt_tokens=100)


def test_exact_shapes_pad_texts_to_the_longest_of_their_batch_alone() -> None:
    assert text_shapes(ShapeConfig(), ENGINE).encode(3, 17) == StepShape("encode", 3, 17, 17)
    assert text_shapes(ShapeConfig(min_size=2), ENGINE).encode(1, 1) == StepShape("encode", 2, 2, 2)


def test_one_padded_shape_holds_every_batch() -> None:
    shapes = text_shapes(ShapeConfig(kind="pad"), ENGINE)
    assert list(shapes.planned()) == [StepShape("encode", 6, 100, 100)] == [shapes.encode(1, 1)]


def test_buckets_are_batch_by_length() -> None:
    shapes = text_shapes(ShapeConfig(kind="buckets"), ENGINE)
    assert {shape.batch for shape in shapes.planned()} == {1, 2, 4, 6}
    assert {shape.length for shape in shapes.planned()} == {32, 64, 100}
    assert len(list(shapes.planned())) == 12
    assert shapes.encode(3, 33) == StepShape("encode", 4, 64, 64)


def test_a_text_beyond_the_largest_bucket_names_the_bucket() -> None:
    shapes = text_shapes(ShapeConfig(kind="buckets", batch_ladder=(2,), length_ladder=(8,)), ENGINE)
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
