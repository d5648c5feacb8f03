"""The device: a neighbour takes all the memory of the card that is left."""

from __future__ import annotations

import functools
import random
import subprocess
import sys
from dataclasses import dataclass, field

from tests.faults.fault import CANDIDATE, CONTROL, Fault, Live, Moment, Setup, Situation, some_instant

_ANSWER_S = 60.0
# It waits for a line, takes what is free, says so, and holds it until the next line. Plain allocations: each of them is
# the largest power of two that fits, down to 2 MiB.
_NEIGHBOUR = """\
import sys, torch
torch.zeros(1, device="cuda")
print("there", flush=True)
sys.stdin.readline()
held, size = [], 1 << 36
while size >= 1 << 21:
    try:
        held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        size >>= 1
print(sum(part.numel() for part in held), flush=True)
sys.stdin.readline()
"""


@dataclass(frozen=True)
class DeviceMemory(Fault):
    """Both arms run on one card, and somebody else has the rest of its memory; to the end, if it `stays`."""

    stays: bool
    _neighbours: list[subprocess.Popen[str]] = field(default_factory=list, repr=False, compare=False)

    @property
    def name(self) -> str:
        """Taken whole."""
        return "no more memory on the card"

    @property
    def is_watched(self) -> bool:
        """Somebody else on the card is what the watcher of machines is there to see."""
        return True

    @property
    def hurts(self) -> frozenset[str]:
        """Both: either may ask for more."""
        return frozenset({CONTROL, CANDIDATE})

    @property
    def forbids_pass(self) -> bool:
        """Others worked on the card all the time; one that goes may be gone before the traffic."""
        return self.stays

    def arrange(self, setup: Setup) -> None:
        """The engine is on the card, and the neighbour beside it, small as yet."""
        setup.settings.append("model.device=cuda")
        neighbour = subprocess.Popen(
            [sys.executable, "-c", _NEIGHBOUR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        setup.closing.callback(self._end)
        self._neighbours.append(neighbour)
        assert neighbour.stdout is not None
        neighbour.stdout.readline()

    def inject(self, live: Live) -> str:
        """It has all that was left."""
        (neighbour,) = self._neighbours
        assert neighbour.stdin is not None
        assert neighbour.stdout is not None
        neighbour.stdin.write("take\n")
        neighbour.stdin.flush()
        return f"{int(neighbour.stdout.readline()) / 2**30:.1f} GiB taken"

    def lift(self, live: Live) -> None:
        """It has given all back."""
        self._end()

    def _end(self) -> None:
        while self._neighbours:
            neighbour = self._neighbours.pop()
            neighbour.kill()
            neighbour.communicate(timeout=_ANSWER_S)


@functools.cache
def why_no_device() -> str:
    """Why no card can be taken away here; empty where one can."""
    code = "import torch; raise SystemExit(not torch.cuda.is_available())"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    return "no CUDA device" if done.returncode else ""


def draw(rng: random.Random, situation: Situation) -> Moment | None:
    """The memory of the card is taken at a random instant of a run of the engine. One that asked for more meanwhile
    may not go on afterwards: those are of safety."""
    phase, after_s = some_instant(rng, situation, "starting arms", "waiting for the last answers")
    lasts_s = round(rng.uniform(0.5, 3.0), 1) if rng.random() < 0.5 else None
    if situation.kind != "engine" or situation.liveness or why_no_device():
        return None
    return Moment(phase=phase, after_s=after_s, fault=DeviceMemory(lasts_s is None), lasts_s=lasts_s)
