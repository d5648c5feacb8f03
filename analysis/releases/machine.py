"""Whether two runs had machines of the same speed, by the references that each run took before and after its trials."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from analysis.run.references import CARD_FIGURES, FIGURES, speed_of

_NAMES = {
    "matmul_tflops": "matrix product",
    "read_gb_per_s": "memory read",
    "launch_us": "launches",
    "python_ms": "Python",
}


def typical(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The median of each figure over the references that have it."""
    taken = list(rows)
    known = {key: [row[key] for row in taken if key in row] for key in FIGURES}
    return {key: statistics.median(values) for key, values in known.items() if values}


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """One reference on both machines. `slower` is the log of how many times longer the candidate's took."""

    key: str
    name: str
    part: str  # card | host
    baseline: float
    candidate: float
    slower: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSpeeds:
    """How much the machines of two runs of one arm differ in speed."""

    same_machine: bool | None  # by identity; None where a run does not say
    speeds: tuple[Speed, ...]  # references that both runs have
    drift: float  # from which on a reference says that the machines differ

    @property
    def drifted(self) -> tuple[Speed, ...]:
        """The references that differ by more than `drift`."""
        return tuple(speed for speed in self.speeds if abs(speed.slower) > math.log1p(self.drift))

    @property
    def range(self) -> tuple[float, float]:
        """By how much the machine may have made the candidate's times longer: at least, at most. It holds 0, since a
        server may not depend on what the reference shows."""
        slower = [0.0, *(speed.slower for speed in self.drifted)]
        return min(slower), max(slower)

    @property
    def known(self) -> bool:
        """Whether the speeds can be told apart from the servers': by references, or since the machine is the same."""
        return bool(self.speeds) or self.same_machine is True

    @property
    def text(self) -> str:
        """The references that differ: "the candidate's host was slower (Python ×1.08)"."""
        words = []
        for side, slower in (("slower", True), ("faster", False)):
            own = [speed for speed in self.drifted if (speed.slower > 0) is slower]
            if own:
                parts = " and ".join(dict.fromkeys(speed.part for speed in own))
                listed = ", ".join(f"{speed.name} ×{math.exp(abs(speed.slower)):.2f}" for speed in own)
                were = "were" if " and " in parts else "was"
                words.append(f"the candidate's {parts} {were} {side} ({listed})")
        return "; ".join(words)


def machine_speeds(
    baseline: Mapping[str, float],
    candidate: Mapping[str, float],
    *,
    drift: float,
    same_machine: bool | None,
) -> MachineSpeeds:
    """The speeds by the typical references of two runs."""
    speeds = tuple(
        Speed(
            key=key,
            name=_NAMES[key],
            part="card" if key in CARD_FIGURES else "host",
            baseline=baseline[key],
            candidate=candidate[key],
            slower=speed_of(key, baseline[key]) - speed_of(key, candidate[key]),
        )
        for key in FIGURES
        if baseline.get(key, 0.0) > 0 < candidate.get(key, 0.0)
    )
    return MachineSpeeds(same_machine=same_machine, speeds=speeds, drift=drift)
