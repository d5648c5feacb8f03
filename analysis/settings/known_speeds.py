"""What devices and hosts of a known kind do in the reference beside a trial, so that a slow one shows by itself.

Add a kind by the name that its driver or its kernel reports, with medians that the reference measured on machines that
were idle. A figure that is left out is not compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# By the device's name in NVML. Of a bf16 matrix product on random data with a rest after each, and of a read of memory.
# Without the rests an H200's product has 720 to 800 TFLOP/s.
DEVICES: Final[Mapping[str, Mapping[str, float]]] = {
    "NVIDIA H200": {"matmul_tflops": 705.0, "read_gb_per_s": 4430.0},
}

# By the processor's model: the time of one small launch, and of a fixed piece of Python.
HOSTS: Final[Mapping[str, Mapping[str, float]]] = {}

# Below this share of what its kind does, a device or a host is not what it should be. Wide, since kinds vary.
LEAST_SHARE: Final = 0.8
