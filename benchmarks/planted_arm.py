"""An arm with a fault that is known: `python -m benchmarks.planted_arm` stands where tailgate.servers.front.serve does.

PLANTED says what is wrong with it: "decode=1.1" makes every engine step last that much longer, busy on the processor as
slower code would be; "memory=1.3" has the engine hold that many times its peak, of its card where it has one;
"stall_s=2,every_s=300" stops it for two seconds in every five minutes, without a reason in any record; with
"first_s=120" for the first time two minutes after its start, as a trial may be shorter than that. Where arms are named,
as in "slow:decode=1.1;fat:memory=1.3", each has its own, and those that are not named have none.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from tailgate.servers.engine.runner import ModelRunner

FAULTS = ("decode", "memory", "stall_s", "every_s", "first_s")
VARIABLE = "PLANTED"


def planted(text: str) -> dict[str, float]:
    """Parse the faults in "decode=1.1,memory=1.3". Raises ValueError for an unknown one."""
    faults = dict(item.partition("=")[::2] for item in text.split(",") if item)
    if unknown := faults.keys() - FAULTS:
        raise ValueError(f"{', '.join(sorted(unknown))} cannot be planted: use {', '.join(FAULTS)}")
    return {name: float(value) for name, value in faults.items()}


def planted_in(text: str, arguments: Sequence[str]) -> dict[str, float]:
    """Return the faults of the process with these arguments: if arms are named, those of the arm of its replica.

    Raises ValueError for an unknown fault.
    """
    parts = [item.rpartition(":") for item in text.split(";") if item]
    faults = {arm: planted(own) for arm, _, own in parts}
    names = [arguments[at + 1] for at, word in enumerate(arguments[:-1]) if word == "--replica"]
    arm = names[0].rpartition("-")[0] if names else ""
    return faults.get(arm, faults.get("", {}))


def plant(faults: dict[str, float]) -> None:
    """Give the engine of this process the faults."""
    from tailgate.servers.engine.engine import Engine
    from tailgate.servers.engine.runner import ModelRunner

    advance, memory_bytes = Engine.advance, ModelRunner.memory_bytes
    held: list[Any] = []
    every_s = faults.get("every_s", float("inf"))
    due = time.perf_counter() + faults.get("first_s", every_s)

    def slower(engine: Engine) -> Any:
        nonlocal due
        began = time.perf_counter()
        if began >= due:
            time.sleep(faults["stall_s"])
            due = began + every_s
        outputs = advance(engine)
        if outputs[0]:
            until = began + faults.get("decode", 1.0) * (time.perf_counter() - began)
            while time.perf_counter() < until:
                pass
        return outputs

    def fatter(runner: ModelRunner) -> dict[str, int]:
        if not held and "memory" in faults:
            held.append(_weight(runner, faults["memory"]))
        return memory_bytes(runner)

    Engine.advance = slower  # type: ignore[method-assign,assignment]
    ModelRunner.memory_bytes = fatter  # type: ignore[method-assign,assignment]


def _weight(runner: ModelRunner, times: float) -> Any:
    """Allocate memory until the engine holds `times` its peak: of its card, or of the host without one."""
    if runner.device.type == "cuda":
        import torch

        more = (times - 1.0) * torch.cuda.max_memory_allocated(runner.device)
        return torch.empty(int(more), dtype=torch.uint8, device=runner.device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    # Written to, so that its pages are there; the peak may lie above what is held now.
    return bytearray(b"\1") * max(0, int(times * peak) - psutil.Process().memory_info().rss)


# The engine's process, which imports the main module of the front's and has its arguments.
if __name__ == "__mp_main__" and (own_faults := planted_in(os.environ.get(VARIABLE, ""), sys.argv)):
    plant(own_faults)

if __name__ == "__main__":
    from tailgate.servers.front.serve import main

    sys.exit(main())
