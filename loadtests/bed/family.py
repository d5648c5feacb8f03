"""A process and its descendants, as the kernel's files show them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
GONE = (FileNotFoundError, ProcessLookupError)
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Stat(NamedTuple):
    """What the kernel says of a process on one line. Times are in ticks since its start, or the host's."""

    parent: int
    cpu_ticks: int  # its own, and of children that it waited for
    threads: int
    started: int
    pages: int  # resident


def stat_of(pid: int, proc: Path = PROC) -> Stat:
    """What the kernel says of the process. Raises OSError where it cannot be read, ValueError or IndexError for what is
    no such line."""
    # Not through Path, which takes three times as long: this is read for every process each second.
    descriptor = os.open(f"{proc}/{pid}/stat", os.O_RDONLY)
    try:
        line = os.read(descriptor, 4096)
    finally:
        os.close(descriptor)
    # pid (name) state parent ...: the name may hold brackets and spaces.
    fields = line.rpartition(b")")[2].split()
    return Stat(
        parent=int(fields[1]),
        cpu_ticks=sum(int(field) for field in fields[11:15]),
        threads=int(fields[17]),
        started=int(fields[19]),
        pages=int(fields[21]),
    )


def family_of(pid: int, proc: Path = PROC) -> Iterator[tuple[int, Stat]]:
    """The process and its descendants that live now, parents first; nothing when it is gone or there is no /proc.

    Raises as `stat_of` does for what lives and cannot be read.
    """
    waiting = [pid]
    for member in waiting:
        try:
            stat = stat_of(member, proc)
            waiting += _children(member, proc)
        except GONE:
            continue
        yield member, stat


def threads_of(pid: int, proc: Path = PROC) -> list[Path]:
    """The folder of each thread of the process, named by its number."""
    return list((proc / str(pid) / "task").iterdir())


def cpu_seconds(pid: int) -> float | None:
    """CPU seconds of the process `pid` and of its living descendants; None where that cannot be read.

    Falls when a descendant ends, unless its parent has waited for it.
    """
    try:
        ticks = [stat.cpu_ticks for _, stat in family_of(pid)]
    except (OSError, ValueError, IndexError):
        return None
    return sum(ticks) / TICKS_PER_S if ticks else None


def _children(pid: int, proc: Path) -> list[int]:
    """The children of all threads of a process. A kernel that does not list them has each process looked at."""
    children: list[int] = []
    for thread in threads_of(pid, proc):
        try:
            children += map(int, (thread / "children").read_bytes().split())
        except GONE:
            if (thread / "stat").exists():
                return [int(path.name) for path in proc.glob("[0-9]*") if _is_child(int(path.name), pid, proc)]
    return children


def _is_child(pid: int, parent: int, proc: Path) -> bool:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return stat_of(pid, proc).parent == parent
    return False
