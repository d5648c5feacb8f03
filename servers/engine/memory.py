"""What the engine process holds of its device and of the host, read between steps.

A reading takes some tens of microseconds: counters of the allocator, and one line of the process table. The device is
not asked, so that a step under way goes on.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from servers.clock import now_ns
from servers.engine.messages import MemoryReading

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


def resident_bytes() -> int | None:
    """What the process holds of the host's memory; None where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
