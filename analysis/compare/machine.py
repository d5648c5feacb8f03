"""Whether two runs had machines of the same speed, by the references that each run took before and after its trials."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from analysis.run.references import CARD_FIGURES, FIGURES, speed_of

_NOISE = 0.01  # of a log reference, by which two runs of one machine may differ
_PLAUSIBLE = (1e-9, 1e12)  # what a reference may be, in any of its units

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
    one_sided: frozenset[str] = frozenset()  # parts of which one run has references and both have none

    @property
    def drifted(self) -> tuple[Speed, ...]:
        """The references that differ by more than `drift`."""
        return tuple(speed for speed in self.speeds if abs(speed.slower) > math.log1p(self.drift))

    @property
    def moved(self) -> tuple[Speed, ...]:
        """The references that differ by more than their noise: small differences count, since limits are small too."""
        return tuple(speed for speed in self.speeds if abs(speed.slower) > min(_NOISE, math.log1p(self.drift)))

    @property
    def range(self) -> tuple[float, float]:
        """By how much the machine may have made the candidate's times longer: at least, at most. It holds 0, since a
        server may not depend on what the reference shows."""
        return _range(self.moved)

    @property
    def drift_range(self) -> tuple[float, float]:
        """As `range`, by the references that drifted."""
        return _range(self.drifted)

    @property
    def known(self) -> bool:
        """Whether the speeds can be told apart from the servers': by references of each part of the machine that either
        run measured, or since the machine is the same."""
        return self.same_machine is True or (bool(self.speeds) and not self.one_sided)

    @property
    def text(self) -> str:
        """The references that differ: "the candidate's host was slower (Python ×1.08)"."""
        words = []
        for side, slower in (("slower", True), ("faster", False)):
            own = [speed for speed in self.moved if (speed.slower > 0) is slower]
            if own:
                parts = " and ".join(dict.fromkeys(speed.part for speed in own))
                listed = ", ".join(f"{speed.name} ×{math.exp(abs(speed.slower)):.2f}" for speed in own)
                were = "were" if " and " in parts else "was"
                words.append(f"the candidate's {parts} {were} {side} ({listed})")
        return "; ".join(words)


def _range(speeds: Iterable[Speed]) -> tuple[float, float]:
    slower = [0.0, *(speed.slower for speed in speeds)]
    return min(slower), max(slower)


def machine_speeds(
    baseline: Mapping[str, float],
    candidate: Mapping[str, float],
    *,
    drift: float,
    same_machine: bool | None,
) -> MachineSpeeds:
    """The speeds by the typical references of two runs. What no machine can be is left out."""
    one, two = (_plausible(figures) for figures in (baseline, candidate))
    speeds = tuple(
        Speed(
            key=key,
            name=_NAMES[key],
            part=_part(key),
            baseline=one[key],
            candidate=two[key],
            slower=speed_of(key, one[key]) - speed_of(key, two[key]),
        )
        for key in FIGURES
        if key in one and key in two
    )
    measured = {_part(key) for key in (*one, *two)}
    return MachineSpeeds(
        same_machine=same_machine,
        speeds=speeds,
        drift=drift,
        one_sided=frozenset(measured - {speed.part for speed in speeds}),
    )


def _part(key: str) -> str:
    return "card" if key in CARD_FIGURES else "host"


def _plausible(figures: Mapping[str, float]) -> dict[str, float]:
    low, high = _PLAUSIBLE
    return {key: figures[key] for key in FIGURES if key in figures and low <= figures[key] <= high}
