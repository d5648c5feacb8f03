"""What the engine process holds of its device and of the host, read between steps.

A reading takes some tens of microseconds: counters of the allocator, and one line of the process table. The device is
not asked, so that a step under way goes on.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from servers.clock import now_ns
from servers.engine.messages import MemoryReading
from servers.engine.startup import graph_pools

EVERY_NS = 1_000_000_000


class MemoryWatch:
    """Says once a second what the process holds of `device`. The first time that it is asked begins the first second,
    and what was allocated before leaves no trace in `peak_bytes`."""

    def __init__(self, device: torch.device, clock: Callable[[], int] = now_ns) -> None:
        self._device = device
        self._clock = clock
        self._due_ns = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def due(self) -> MemoryReading | None:
        """A reading, if the last one is a second old."""
        at_ns = self._clock()
        if at_ns < self._due_ns:
            return None
        self._due_ns = at_ns + EVERY_NS
        return read_memory(self._device, at_ns)


def read_memory(device: torch.device, at_ns: int) -> MemoryReading:
    """What the process holds now. The next `peak_bytes` counts from here."""
    if device.type != "cuda":
        return MemoryReading(at_ns=at_ns, memory_bytes=resident_bytes())
    # nested, because flattening it takes longer than asking
    counters = torch.cuda.memory_stats_as_nested_dict(device)
    allocated = counters["allocated_bytes"]["all"]
    torch.cuda.reset_peak_memory_stats(device)
    return MemoryReading(
        at_ns=at_ns,
        memory_bytes=resident_bytes(),
        allocated_bytes=allocated["current"],
        reserved_bytes=counters["reserved_bytes"]["all"]["current"],
        peak_bytes=allocated["peak"],
        allocator_retries=counters["num_alloc_retries"],
        out_of_memory=counters["num_ooms"],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What a piece of work added to what the process holds, in bytes; below 0 where it gave something back.

    `peak_bytes`: the most at once in tensors above what was there before. `kept_bytes`: in tensors afterwards.
    `graph_bytes`: in the pools of CUDA graphs. `resident_bytes`: on the host. The first three are None on a CPU, which
    has no allocator to ask.
    """

    peak_bytes: int | None
    kept_bytes: int | None
    graph_bytes: int | None
    resident_bytes: int | None


class GrowthMeter:
    """Measures what the work since its making added. One at a time, as there is one peak; it waits for the device.

    `highest` is the most that was in tensors at once before it began, or up to its stop; 0 on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.highest = 0
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self.highest = torch.cuda.max_memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
        self._before = _holding(device)

    def stop(self) -> Growth:
        """The growth up to now."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        allocated, graphs, resident = self._before
        allocated_now, graphs_now, resident_now = _holding(self._device)
        peak = torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None
        self.highest = max(self.highest, peak or 0)
        return Growth(
            peak_bytes=_less(peak, allocated),
            kept_bytes=_less(allocated_now, allocated),
            graph_bytes=_less(graphs_now, graphs),
            resident_bytes=_less(resident_now, resident),
        )


def held_in_all(device: torch.device) -> tuple[int, int]:
    """(bytes in tensors on the device, bytes resident on the host), 0 where it cannot be read."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0, resident_bytes() or 0


def _holding(device: torch.device) -> tuple[int | None, int | None, int | None]:
    """(in tensors, in the pools of CUDA graphs, resident on the host)."""
    if device.type != "cuda":
        return None, None, resident_bytes()
    segments: Any = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    index = torch.cuda.current_device() if device.index is None else device.index
    own = [item for item in segments if item.get("device", index) == index]
    return torch.cuda.memory_allocated(device), graph_pools(own), resident_bytes()


def _less(now: int | None, before: int | None) -> int | None:
    return None if now is None or before is None else now - before


def resident_bytes() -> int | None:
    """What the process holds of the host's memory; None where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
