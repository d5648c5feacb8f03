"""Which steps a replica runs before it serves."""

from __future__ import annotations

from servers.config import ArmConfig
from servers.engine.shapes import ShapePolicy, StepShape

# Each shape runs this often in a warm-up: under CUDA graphs the first call compiles, the second warms the memory
# pool, the third records.
WARMUP_CALLS = 3


def warmup_plan(arm: ArmConfig, shapes: ShapePolicy) -> list[StepShape]:
    """The steps to run before serving. A replica's request to itself always meets shapes among them.

    `minimal` is what an unsuspecting deployment does: one short request, then open the doors.
    """
    prompt = first_prompt(arm, shapes)
    first = [shapes.prefill(1, prompt), shapes.decode(1, prompt + 1)]
    if arm.compile.warmup == "minimal":
        return first
    plan = list(shapes.planned())
    if not arm.compile.enabled or arm.compile.mark_dynamic:
        return plan  # nothing is compiled for a size
    return plan + [shape for shape in first if shape not in plan]


def first_prompt(arm: ArmConfig, shapes: ShapePolicy) -> int:
    """Tokens of the prompt that a replica sends itself before it serves: a length that the warm-up has run."""
    planned = 5
    if arm.compile.warmup != "minimal":
        planned = min(shape.length for shape in shapes.planned() if shape.kind == "prefill")
    return min(planned, arm.engine.prefill_tokens)
