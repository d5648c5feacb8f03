"""An arm with a fault that is known: `python -m benchmarks.planted_arm` stands where servers.front.serve stands.

PLANTED says what is wrong with it: "decode=1.1" makes every engine step last that much longer, busy on the processor as
slower code would be; "memory=1.3" has the engine process hold that many times its peak.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from typing import Any

VARIABLE = "PLANTED"


def planted(text: str) -> dict[str, float]:
    """The faults in "decode=1.1,memory=1.3"."""
    return {name: float(value) for name, value in (item.split("=") for item in text.split(",") if item)}


def plant(faults: dict[str, float]) -> None:
    """The engine of this process has the faults."""
    from servers.engine.engine import Engine
    from servers.engine.runner import ModelRunner

    advance, memory_bytes = Engine.advance, ModelRunner.memory_bytes
    held: list[bytearray] = []

    def slower(engine: Engine, arrivals: Any) -> Any:
        began = time.perf_counter()
        outputs = advance(engine, arrivals)
        if outputs[0]:
            until = began + faults.get("decode", 1.0) * (time.perf_counter() - began)
            while time.perf_counter() < until:
                pass
        return outputs

    def fatter(runner: ModelRunner) -> dict[str, int]:
        if not held:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            # Written to, so that its pages are there; the peak may lie above what is held now.
            now = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")  # noqa: PTH123, SIM115
            held.append(bytearray(b"\1") * max(0, int(faults.get("memory", 1.0) * peak) - now))
        return memory_bytes(runner)

    Engine.advance = slower  # type: ignore[method-assign,assignment]
    ModelRunner.memory_bytes = fatter  # type: ignore[method-assign,assignment]


if __name__ == "__mp_main__":  # the engine's process, which imports the main module of the front's
    plant(planted(os.environ.get(VARIABLE, "")))

if __name__ == "__main__":
    from servers.front.serve import main

    sys.exit(main())
