"""Which steps a replica runs before it serves."""

from __future__ import annotations

from collections.abc import Iterator

from servers.config import ArmConfig
from servers.engine.shapes import PlannedShapes, ShapePolicy, StepShape, shape_policy
from servers.engine.text_shapes import text_shapes

# Each shape runs this often in a warm-up: under CUDA graphs the first call compiles, the second warms the memory
# pool, the third records.
WARMUP_CALLS = 3


def warmup_plan(arm: ArmConfig) -> list[StepShape]:
    """The steps to run before serving. A replica's request to itself always meets shapes among them.

    `minimal` is what an unsuspecting deployment does: one short request, then open the doors. `lengths` looks careful:
    prompts of many lengths, one after another, so that no step has ever two rows.
    """
    if arm.compile.warmup == "lengths":  # chunk by chunk: no ladder has a step for a prompt that is cut
        steps = (step for length in _lengths(arm.engine.max_prompt_tokens) for step in _alone(arm, length))
        return list(dict.fromkeys(steps))
    first = _first(arm)
    if arm.compile.warmup == "minimal":
        return first
    plan = list(_planned(arm).planned())
    if not arm.compile.enabled or arm.compile.mark_dynamic:
        return plan  # nothing is compiled for a size
    return plan + [shape for shape in first if shape not in plan]


def first_prompt(arm: ArmConfig) -> int:
    """Tokens of the prompt, or of the text, that a replica sends itself before it serves: a length that the warm-up has
    run."""
    if arm.compile.warmup == "lengths":
        return _lengths(arm.engine.max_prompt_tokens)[-1]
    planned = 5
    if arm.compile.warmup == "shapes":
        planned = min(shape.length for shape in _planned(arm).planned() if shape.kind in ("prefill", "encode"))
    return min(planned, arm.engine.prefill_tokens)


def _planned(arm: ArmConfig) -> PlannedShapes:
    if arm.model.embeds:
        return text_shapes(arm.shapes, arm.engine)
    return shape_policy(arm.shapes, arm.engine)


def _first(arm: ArmConfig) -> list[StepShape]:
    """The steps of the request that a replica sends itself: one is enough for a token."""
    prompt = first_prompt(arm)
    if arm.model.embeds:
        return [text_shapes(arm.shapes, arm.engine).encode(1, prompt)]
    shapes = shape_policy(arm.shapes, arm.engine)
    return [shapes.prefill(1, prompt), shapes.decode(1, prompt + 1)]


def _lengths(longest: int) -> list[int]:
    """Eight prompt lengths at most, halving from the longest. Odd, since an even one may equal a size of the model."""
    return list(dict.fromkeys(max(1, (longest >> halvings) - 1 | 1) for halvings in range(8)))


def _alone(arm: ArmConfig, length: int) -> Iterator[StepShape]:
    """The steps of a request that has the replica to itself: its prompt, chunk by chunk, and its first new token; or
    its text."""
    if arm.model.embeds:
        yield text_shapes(arm.shapes, arm.engine).encode(1, length)
    else:
        yield from _chunks(arm, shape_policy(arm.shapes, arm.engine), length)


def _chunks(arm: ArmConfig, shapes: ShapePolicy, length: int) -> Iterator[StepShape]:
    chunk = arm.engine.prefill_tokens
    yield shapes.prefill(1, min(length, chunk))
    for begun in range(chunk, length, chunk):
        yield shapes.extend(1, min(chunk, length - begun), min(begun + chunk, length))
    yield shapes.decode(1, length + 1)
