"""Which machine this is, in twelve characters that say nothing else: two runs with the same ones shared a machine."""

from __future__ import annotations

import contextlib
import hashlib
import platform
from collections.abc import Iterable
from pathlib import Path

from loadtests.generator.clock_offsets import host_identity

_MACHINE_ID = Path("/etc/machine-id")


def gpu_uuids() -> list[str]:
    """Return the UUIDs of the NVIDIA GPUs that the driver shows, none where there is no driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    except Exception:  # no library, no driver, or a broken one
        return []


def machine_identity(uuids: Iterable[str], machine_id: Path = _MACHINE_ID) -> str | None:
    """Return a hash of the GPUs' UUIDs, else of the system's machine id, else of its last start; None without any."""
    text = " ".join(sorted(uuids))
    if not text:
        with contextlib.suppress(OSError, ValueError):
            text = machine_id.read_text(encoding="ascii").strip()
    text = text or host_identity()
    return hashlib.sha256(text.encode()).hexdigest()[:12] if text else None


def cpu_model() -> str:
    """Return the processor's name, as the kernel has it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
