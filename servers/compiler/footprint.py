"""What each compiled region left in memory: read before and after its compiles and the recordings of its CUDA graphs.

What its kernels take when they run is not among it: torch does not say which region an allocation is for. It names the
region by its compile id. Where this torch is not read (`internals.torch_blind_spots`), nothing is known of any region.
"""

from __future__ import annotations

from collections.abc import Callable

from servers.compiler import internals

Held = tuple[int, int]
"""Bytes in tensors on the device, and bytes resident on the host."""


class CompileFootprint:
    """Sums up what `read` rose by in the compiles and recordings of each region, by compile id, while it is open."""

    def __init__(self, read: Callable[[], Held]) -> None:
        self.grown: dict[str, Held] = {}
        self._read = read
        self._before: Held = (0, 0)
        self._taps = internals.Taps()

    def __enter__(self) -> CompileFootprint:
        if not internals.torch_blind_spots():
            self._taps.regions(self._on_start, self._on_end)
        return self

    def __exit__(self, *_: object) -> None:
        self._taps.remove()

    def _on_start(self) -> None:
        self._before = self._read()

    def _on_end(self, region: str) -> None:
        after = self._read()
        on_device, resident = self.grown.get(region, (0, 0))
        self.grown[region] = (on_device + after[0] - self._before[0], resident + after[1] - self._before[1])
