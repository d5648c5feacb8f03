"""How much a process and all that descend from it have worked, as the kernel counts it."""

from __future__ import annotations

import os
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float | None:
    """CPU seconds of the process `pid` and of its living descendants; None where the kernel does not tell (no /proc).

    Falls when a descendant ends, unless its parent has waited for it.
    """
    parents: dict[int, int] = {}
    worked: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # the second field is the program's name, in brackets, with anything in it
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(folder.name)] = int(fields[1])
        worked[int(folder.name)] = sum(int(ticks) for ticks in fields[11:15])
    if pid not in parents:
        return None
    family = {pid}
    while added := {child for child, parent in parents.items() if parent in family} - family:
        family |= added
    return sum(worked[member] for member in family) / _TICKS
