"""Which machine this is, in twelve characters that say nothing else: two runs with the same ones shared a machine."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable
from pathlib import Path

from loadtests.bed.nvml import Nvml
from loadtests.workers.clock_offsets import host_identity

_MACHINE_ID = Path("/etc/machine-id")


def gpu_uuids() -> list[str]:
    """The UUIDs of the NVIDIA GPUs that the driver shows, empty where there is none."""
    try:
        import pynvml

        return [card.uuid for card in Nvml(pynvml).cards()]
    except Exception:  # no library, no driver, or a broken one
        return []


def machine_identity(uuids: Iterable[str], machine_id: Path = _MACHINE_ID) -> str | None:
    """From the GPUs' UUIDs, otherwise from the system's machine id, otherwise from its last start; None without any."""
    text = " ".join(sorted(uuids))
    if not text:
        with contextlib.suppress(OSError, ValueError):
            text = machine_id.read_text(encoding="ascii").strip()
    text = text or host_identity()
    return hashlib.sha256(text.encode()).hexdigest()[:12] if text else None
