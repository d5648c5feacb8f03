"""What each compiled region left in memory: read before and after its compiles and the recordings of its CUDA graphs.

What its kernels take when they run is not among it: torch does not say which region an allocation is for. The callbacks
are a private interface of torch 2.11 to 2.13, which names the region by its compile id.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from torch._dynamo import callback

Held = tuple[int, int]
"""Bytes in tensors on the device, and bytes resident on the host."""


class CompileFootprint:
    """Sums up what `read` rose by in the compiles and recordings of each region, by compile id, while it is open."""

    def __init__(self, read: Callable[[], Held]) -> None:
        self.grown: dict[str, Held] = {}
        self._read = read
        self._before: Held = (0, 0)

    def __enter__(self) -> CompileFootprint:
        callback.on_compile_start(self._on_start)
        callback.on_compile_end(self._on_end)
        return self

    def __exit__(self, *_: object) -> None:
        callbacks = callback.callback_handler
        with contextlib.suppress(ValueError):  # a reset of the compiler has dropped them
            callbacks.remove_start_callback(self._on_start)
            callbacks.remove_end_callback(self._on_end)

    def _on_start(self, args: callback.CallbackArgs) -> None:
        self._before = self._read()

    def _on_end(self, args: callback.CallbackArgs) -> None:
        region, after = str(args.compile_id), self._read()
        on_device, resident = self.grown.get(region, (0, 0))
        self.grown[region] = (on_device + after[0] - self._before[0], resident + after[1] - self._before[1])
