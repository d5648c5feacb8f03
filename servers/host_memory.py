"""What a host has of memory, as the kernel counts it."""

from __future__ import annotations

from pathlib import Path


def host_memory(proc: Path = Path("/proc")) -> tuple[int, int]:
    """(total, available) bytes: available is what programs can get without swapping. Raises OSError, or KeyError where
    the kernel does not say."""
    lines = (proc / "meminfo").read_text(encoding="utf-8").splitlines()
    kib = {name: int(size.split()[0]) for name, _, size in (line.partition(":") for line in lines)}
    return kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024
