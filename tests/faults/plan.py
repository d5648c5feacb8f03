"""What goes wrong in one run, drawn from a seed: the same on every machine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

from tests.faults import devices, lies, machine, memory_groups, network, signals, storage
from tests.faults.fault import CANDIDATE, Draw, Family, Kind, Moment, Situation, Truth

# Where faults come from, by the name that the campaign's --families takes.
FAMILIES: dict[str, Draw] = {
    "signals": signals.draw,
    "network": network.draw,
    "storage": storage.draw,
    "machine": machine.draw,
    "lies": lies.draw,
    "devices": devices.draw,
    "groups": memory_groups.draw,
}

# What is planned where nothing else is asked for: a seed stays the plan that it was when a family is added.
DEFAULT = ("signals",)

KINDS: tuple[Kind, ...] = get_args(Kind)
# How often each kind is planned; those that take minutes are rare.
_WEIGHTS: dict[Kind, int] = {
    "run": 8,
    "until-decided": 4,
    "ramp": 4,
    "workers": 4,
    "remote worker": 3,
    "external": 3,
    "engine": 1,
    "users' ramp": 2,
}
_TRUTHS: dict[Kind, tuple[Truth, ...]] = {
    "engine": ("good",),
    "external": ("good",),
    "users' ramp": ("good", "naive"),
}
_ALL_TRUTHS: tuple[Truth, ...] = ("good", "good", "naive", "slow", "other answers", "dies")
# Beside its traffic and what faults add, a run may take this long: its start, its stop and its judgement.
_BESIDES_S = 120.0
_TRIES = 100  # a family may have no fault for a kind of run
_ENGINE_S = 60.0  # two arms load torch, on two processors one after the other


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run: its kind, the truth about its candidate, and what goes wrong when."""

    seed: int
    kind: Kind
    truth: Truth
    family: Family
    quick: bool
    duration_s: float
    moments: tuple[Moment, ...] = field(default_factory=tuple)

    @property
    def limit_s(self) -> float:
        """The run ends by itself within so many seconds."""
        paused = sum(moment.lasts_s or 0.0 for moment in self.moments)
        extra = max((moment.fault.extra_s for moment in self.moments), default=0.0)
        engine = _ENGINE_S if self.kind == "engine" else 0.0
        return _BESIDES_S + engine + 1.5 * self.duration_s + paused + extra

    @property
    def is_bad(self) -> bool:
        """Whether the candidate must never pass, whatever else happens."""
        return self.truth != "good"

    def hurts(self, arm: str = CANDIDATE) -> bool:
        """Whether a fault may make the arm slower, or make its requests fail."""
        return any(arm in moment.fault.hurts for moment in self.moments)

    def __str__(self) -> str:
        wrong = "; ".join(map(str, self.moments)) or "nothing"
        return f"seed {self.seed}: {self.family}, {self.kind} of a candidate that is {self.truth!r}: {wrong}"


def plan(seed: int, *, quick: bool = False, families: Sequence[str] = DEFAULT, kind: Kind | None = None) -> Plan:
    """The plan of the seed. `quick` ones take seconds: no users' ramp, no engine, and nothing is stopped for long.

    One plan in twelve has no fault at all: it shows what the run comes to by itself.
    """
    rng = random.Random(seed)
    kinds = [item for item in KINDS if not (quick and item in ("engine", "users' ramp"))]
    drawn: Kind = rng.choices(kinds, [_WEIGHTS[item] for item in kinds])[0]
    kind = kind or drawn
    truth: Truth = rng.choice(_TRUTHS.get(kind, _ALL_TRUTHS))
    family: Family = rng.choices(("safety", "liveness", "none"), (7, 4, 1))[0]
    duration_s = {"ramp": 14.0, "users' ramp": 60.0}.get(kind, 5.0)
    situation = Situation(kind=kind, truth=truth, duration_s=duration_s, liveness=family == "liveness", quick=quick)
    count = 0 if family == "none" else rng.choices((1, 2, 3), (6, 3, 1))[0]
    moments: list[Moment] = []
    for _ in range(_TRIES):
        if len(moments) == count:
            break
        moment = FAMILIES[rng.choice(list(families))](rng, situation)
        if moment is not None:
            moments.append(moment)
    return Plan(
        seed=seed, kind=kind, truth=truth, family=family, quick=quick, duration_s=duration_s, moments=tuple(moments)
    )


def covering(count: int, within: int = 600, families: Sequence[str] = DEFAULT) -> list[int]:
    """The seeds of so many quick plans with one fault each, which together cover the most: each next one has what those
    before it did not. They follow from the families alone."""
    every = (plan(seed, quick=True, families=families) for seed in range(1, within + 1))
    waiting = [item for item in every if len(item.moments) == 1]
    waiting.sort(key=lambda item: item.moments[0].fault.name)  # of equals, SIGKILL comes first
    seen: set[str] = set()
    seeds = []
    for _ in range(count):
        best = max(waiting, key=lambda item: len(_features(item) - seen))
        waiting.remove(best)
        seen |= _features(best)
        seeds.append(best.seed)
    return seeds


def _features(item: Plan) -> set[str]:
    (moment,) = item.moments
    return {item.kind, item.truth, item.family, moment.phase, f"a {moment.fault.name}"}
