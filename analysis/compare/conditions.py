"""What two runs must have alike to be compared, and what may differ and is said."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from analysis.compare.compared_run import ComparedRun
from analysis.records.plain_values import mapping

_OF_ARM = ("model", "kind", "model_name", "replicas")  # of an arm that must be alike


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """One thing in which the candidate is not as the baseline. A value that one of them lacks is None."""

    what: str
    baseline: Any
    candidate: Any

    @property
    def text(self) -> str:
        """As a reader is told: "traffic.rate 4 → 8"."""
        return f"{self.what} {_shown(self.baseline)} → {_shown(self.candidate)}"


def obstacles(baseline: ComparedRun, candidate: ComparedRun, arms: Mapping[str, str]) -> list[Departure]:
    """Where a difference would be the traffic's, the model's, the replicas' or the objectives'; `arms`: the candidate's
    of each of the baseline's."""
    found = [*_departures("", baseline.conditions, candidate.conditions)]
    for name, other in arms.items():
        one, two = (
            {key: config.get(key) for key in _OF_ARM}
            for config in (baseline.arms[name].config, candidate.arms[other].config)
        )
        found += _departures(f"{other}.", one, two)
    return found


def departures(baseline: ComparedRun, candidate: ComparedRun, arms: Mapping[str, str]) -> list[Departure]:
    """What differs besides, and may be the cause: versions, machine, policies, the arms that ran beside."""
    found = [*_departures("", baseline.environment, candidate.environment)]
    for name, other in arms.items():
        one, two = (
            {key: config.get(key) for key in ("preset", "shapes", "compile", "engine")}
            for config in (baseline.arms[name].config, candidate.arms[other].config)
        )
        found += _departures(f"{other}.", one, two)
    if set(baseline.arms) != set(candidate.arms):
        found.append(Departure(what="arms", baseline=sorted(baseline.arms), candidate=sorted(candidate.arms)))
    if baseline.trials != candidate.trials:
        found.append(Departure(what="trials", baseline=baseline.trials, candidate=candidate.trials))
    return found


def _departures(where: str, one: Mapping[str, Any], two: Mapping[str, Any]) -> Iterator[Departure]:
    """The leaves in which two tables differ."""
    for key in dict.fromkeys((*one, *two)):
        left, right = one.get(key), two.get(key)
        if isinstance(left, Mapping) or isinstance(right, Mapping):
            yield from _departures(f"{where}{key}.", mapping(left), mapping(right))
        elif left != right:
            yield Departure(what=f"{where}{key}", baseline=left, candidate=right)


def _shown(value: Any) -> str:
    if value is None or value == "" or value == []:
        return "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(str(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
