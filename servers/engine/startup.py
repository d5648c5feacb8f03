"""What the start of a replica cost, stretch by stretch, and what it left in memory."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from servers.clock import now_ns


def process_started_ns(pid: int) -> int:
    """When the process `pid` began, to about 10 ms; now, where the system does not say."""
    try:
        # the name of a program may hold anything, so fields are counted from its closing bracket
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        since_boot_ns = int(fields[19]) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return now_ns()
    return now_ns() - max(0, time.clock_gettime_ns(time.CLOCK_BOOTTIME) - since_boot_ns)


def itemised(
    items: Mapping[str, int], *, started_ns: int, entered_ns: int, imported_ns: int, ready_ns: int
) -> dict[str, int]:
    """The whole time from `started_ns` to `ready_ns`: what came before, the runner's `items`, and the small rest."""
    known = {"process": entered_ns - started_ns, "import": imported_ns - entered_ns, **items}
    return {**known, "other": max(0, ready_ns - started_ns - sum(known.values()))}


def memory_peaks(segments: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """The most memory that this process ever held on the host, and what CUDA graphs hold of the device's.

    `segments` are those of torch.cuda.memory_snapshot(): graphs draw from pools of their own.
    """
    pools = sum(item["total_size"] for item in segments if tuple(item.get("segment_pool_id", (0, 0))) != (0, 0))
    return {
        "process_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        **({"graph_pools": pools} if pools else {}),
    }
