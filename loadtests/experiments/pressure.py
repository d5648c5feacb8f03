"""Pressure on the machines of a trial, the same for all arms: the `[pressure]` table of an experiment, checked."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Annotated

from servers.fields import ConfigError, Range, check_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class PressurePhase:
    """What weighs on the machines from `start_s` to `end_s` of the traffic; 0 as end is the end of the traffic.

    On each device that an arm uses, a neighbour holds `memory_share` of the memory and computes `compute_share` of the
    time, and a second server gets `tenant_rps` requests/s. Each replica may use `cpus` processors; 0 leaves each out.
    """

    start_s: Annotated[float, Range(0, 1e7)] = 0.0
    end_s: Annotated[float, Range(0, 1e7)] = 0.0
    memory_share: Annotated[float, Range(0, 0.95)] = 0.0
    compute_share: Annotated[float, Range(0, 1)] = 0.0
    tenant_rps: Annotated[float, Range(0, 1000)] = 0.0
    cpus: Annotated[float, Range(0, 4096)] = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "pressure")
        if 0 < self.end_s <= self.start_s:
            raise ConfigError(
                f"pressure.end_s is {self.end_s:g} but start_s is {self.start_s:g}: give a later end, or 0 for the end "
                "of the traffic"
            )

    @property
    def weighs(self) -> bool:
        """Whether anything is asked for."""
        return any((self.memory_share, self.compute_share, self.tenant_rps, self.cpus))

    @property
    def has_neighbour(self) -> bool:
        """Whether a process beside the arms is needed."""
        return any((self.memory_share, self.compute_share, self.tenant_rps))


@dataclass(frozen=True, slots=True, kw_only=True)
class PressureConfig(PressurePhase):
    """One phase, or several one after the other in `schedule`."""

    schedule: tuple[PressurePhase, ...] = ()

    def __post_init__(self) -> None:
        PressurePhase.__post_init__(self)
        if not self.schedule:
            if (self.start_s or self.end_s) and not self.weighs:
                raise ConfigError(f"[pressure] has times and nothing that weighs: give {_WEIGHTS}, or remove it")
            return
        for item in fields(PressurePhase):
            if value := getattr(self, item.name):
                raise ConfigError(
                    f"pressure.{item.name} is {value:g} beside [[pressure.schedule]]: write it into each of its tables"
                )
        for phase in self.schedule:
            if not phase.weighs:
                raise ConfigError(f"the pressure.schedule from {phase.start_s:g} s on has no weight: give {_WEIGHTS}")
        for one, next_one in pairwise(self.schedule):
            if not one.end_s or one.end_s > next_one.start_s:
                end = f"ends at {one.end_s:g} s" if one.end_s else "has no end_s"
                raise ConfigError(
                    f"the pressure.schedule from {one.start_s:g} s on {end} and the next starts at "
                    f"{next_one.start_s:g} s: let each end before the next starts"
                )

    @property
    def phases(self) -> tuple[PressurePhase, ...]:
        """Every phase, in order; empty without pressure."""
        if self.schedule:
            return self.schedule
        own = {item.name: getattr(self, item.name) for item in fields(PressurePhase)}
        return (PressurePhase(**own),) if self.weighs else ()


_WEIGHTS = "memory_share, compute_share, tenant_rps or cpus"
