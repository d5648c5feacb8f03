"""Which steps a replica runs before it serves."""

from __future__ import annotations

from collections.abc import Iterator

from servers.config import CompileConfig
from servers.engine.scheduler import Kind
from servers.engine.shapes import ShapePolicy, StepShape, first_prompt

# Each shape runs this often in a warm-up: under CUDA graphs the first call compiles, the second warms the memory
# pool, the third records.
WARMUP_CALLS = 3


def warmup_plan(policy: CompileConfig, shapes: ShapePolicy, *, longest: int) -> list[tuple[Kind, StepShape]]:
    """The steps to run before serving, where a step takes at most `longest` tokens of a prompt.

    `minimal` is what an unsuspecting deployment does: one short request, then open the doors. The request that a
    replica asks itself is always among them.
    """
    minimal = policy.warmup == "minimal"
    prompt = first_prompt(shapes, longest=longest, minimal=minimal)
    first: list[tuple[Kind, StepShape]] = [
        ("prefill", shapes.prefill(1, prompt)),
        ("decode", shapes.decode(1, prompt + 1)),
    ]
    if minimal:
        return first
    plan = list(every_planned(shapes))
    if not policy.enabled or policy.mark_dynamic:
        return plan  # nothing is compiled for a size
    return plan + [step for step in first if step not in plan]


def every_planned(shapes: ShapePolicy) -> Iterator[tuple[Kind, StepShape]]:
    """The steps that the policy plans for, in the order in which they are warmed."""
    yield from (("prefill", shape) for shape in shapes.every_prefill())
    yield from (("extend", shape) for shape in shapes.every_extend())
    yield from (("decode", shape) for shape in shapes.every_decode())
