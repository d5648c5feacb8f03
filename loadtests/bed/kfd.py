"""AMD's GPUs as the kernel's driver lists them. Needs neither ROCm nor torch."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

TOPOLOGY = Path("/sys/class/kfd/kfd/topology/nodes")


def amd_gpus(topology: Path = TOPOLOGY) -> list[str]:
    """One name for each GPU, such as "AMD GPU gfx942", in the driver's order; empty where there is none."""
    names = []
    nodes = [node for node in topology.glob("[0-9]*") if node.name.isdigit()]
    for node in sorted(nodes, key=lambda node: int(node.name)):
        with suppress(OSError, ValueError):
            lines = (line.split() for line in (node / "properties").read_text(encoding="ascii").splitlines())
            properties = {pair[0]: int(pair[1]) for pair in lines if len(pair) == 2}
            if version := properties.get("gfx_target_version"):  # a processor has 0
                # major, minor, stepping: two decimal digits each, of which the last two are written in hexadecimal
                names.append(f"AMD GPU gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}")
    return names
