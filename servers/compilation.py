"""The compile policy: what torch.compile is asked for, and which shapes a warm-up runs.

Only this file and compile_events.py, which records what the compiler did, touch torch._dynamo and torch._inductor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch._dynamo
import torch._inductor.config
from torch import nn

from servers.config import CompileConfig
from servers.shapes import ShapePolicy, StepShape

# Each shape runs this often in a warm-up: under CUDA graphs the first call compiles, the second warms the memory
# pool, the third records.
WARMUP_CALLS = 3


def configure_compiler(policy: CompileConfig, shapes: ShapePolicy) -> None:
    """Set the process-wide compiler options that the policy needs."""
    if not policy.enabled:
        return
    known = 2 * (len(list(shapes.every_prefill())) + len(list(shapes.every_decode())))
    if policy.recompile_limit:
        torch._dynamo.config.recompile_limit = policy.recompile_limit
    elif shapes.is_closed():
        # a bucket is a graph; the limit guards against unplanned shapes, not against the ladder
        torch._dynamo.config.recompile_limit = max(8, known)
    torch._dynamo.config.accumulated_recompile_limit = max(256, known, policy.recompile_limit)
    if policy.mark_dynamic:
        # Two dimensions that happen to be equal in the first batch are not one dimension.
        torch.fx.experimental._config.use_duck_shape = False  # type: ignore[attr-defined]


def compile_step(step: nn.Module, policy: CompileConfig) -> Callable[..., torch.Tensor]:
    """`step` as the policy wants it: itself when compiling is off, otherwise under torch.compile."""
    if not policy.enabled:
        return step
    # torch refuses mode together with a backend other than inductor
    mode = policy.mode if policy.backend == "inductor" and policy.mode != "default" else None
    if policy.regional:
        for block in repeated_blocks(step):
            block.compile(mode=mode, dynamic=policy.dynamic, fullgraph=policy.fullgraph, backend=policy.backend)
        return step
    compiled: Callable[..., torch.Tensor] = torch.compile(
        step, mode=mode, dynamic=policy.dynamic, fullgraph=policy.fullgraph, backend=policy.backend
    )
    return compiled


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """The layers of the longest list of like modules: a transformer's repeated blocks."""
    lists = [list(item) for item in module.modules() if isinstance(item, nn.ModuleList)]
    return max(lists, key=len, default=[])


def mark_dimension(tensor: torch.Tensor, dimension: int, *, low: int, high: int) -> None:
    """Tell the compiler that this dimension varies within low … high. A single possible size stays static."""
    if low < high and tensor.shape[dimension] >= low:
        torch._dynamo.mark_dynamic(tensor, dimension, min=low, max=high)


@contextmanager
def step_boundary(policy: CompileConfig) -> Iterator[None]:
    """Around each step: tells CUDA-graph trees that the outputs of the previous step are no longer read."""
    if policy.enabled and policy.mode in ("reduce-overhead", "max-autotune"):
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
    yield


def warmup_shapes(policy: CompileConfig, shapes: ShapePolicy) -> tuple[list[StepShape], list[StepShape]]:
    """(prefill, decode) shapes to run before serving.

    `minimal` is what an unsuspecting deployment does: one short request, then open the doors.
    """
    if policy.warmup == "minimal":
        first = shapes.prefill(1, min(5, max(shape.length for shape in shapes.every_prefill())))
        return [first], [shapes.decode(1, first.context + 1)]
    return list(shapes.every_prefill()), list(shapes.every_decode())
