"""One CUDA graph for one planned shape: recorded once, replayed with new inputs.

Graph trees, which `mode="reduce-overhead"` brings, decide at every call what to record. A captured step decides
nothing: its kernels were fixed in the warm-up, so that neither a guard nor the compiler runs while serving.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

Tensors = tuple[torch.Tensor, ...]


@contextmanager
def uncollected() -> Iterator[None]:
    """Nothing is garbage-collected inside.

    What a collection destroys may call the driver, which breaks a recording: another CUDA graph, or a kernel that lost
    a tuning. torch has not collected before a recording since 2.9 (github.com/pytorch/pytorch/pull/161037).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class CapturedStep:
    """`call(*varying, *fixed)` as a graph. Its outputs are overwritten by the next replay of any graph in the pool."""

    def __init__(self, call: Callable[..., Any], varying: Sequence[torch.Tensor], fixed: Tensors, pool: Any) -> None:
        self.compiled = True  # whether what was recorded is compiled code
        self._inputs = [tensor.clone() for tensor in varying]
        self._fixed = fixed  # the graph reads their memory
        self._graph = torch.cuda.CUDAGraph()
        # "thread_local": the threads that move messages may not break a capture
        graph = torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local")
        with uncollected(), graph:
            self._outputs: Tensors = call(*self._inputs, *fixed)

    def __call__(self, varying: Sequence[torch.Tensor]) -> Tensors:
        """The outputs for `varying`, which have the shapes of the capture."""
        torch._foreach_copy_(self._inputs, list(varying))
        self._graph.replay()
        return self._outputs
