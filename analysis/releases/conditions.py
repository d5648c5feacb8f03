"""What two releases must have alike to be compared, and what may differ and is said."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from analysis.records.added_settings import value_before
from analysis.records.plain_values import mapping
from analysis.releases.release import Release

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


def obstacles(baseline: Release, candidate: Release, arms: Mapping[str, str]) -> list[Departure]:
    """Where a difference would be the traffic's, the model's, the replicas' or the objectives'; `arms`: the candidate's
    of each of the baseline's.

    A setting that one of them does not have at all came or went with the version of tailgate; it is no obstacle.
    """
    found = [*_departures("", baseline.conditions, candidate.conditions, both=True)]
    for name, other in arms.items():
        one, two = (
            {key: config.get(key) for key in _OF_ARM if config.get(key) is not None}
            for config in (baseline.arms[name].config, candidate.arms[other].config)
        )
        if one.get("kind") != two.get("kind"):
            found.append(Departure(what=f"{other}.kind", baseline=one.get("kind"), candidate=two.get("kind")))
        found += _departures(f"{other}.", one, two, both=True)
    return found


def departures(baseline: Release, candidate: Release, arms: Mapping[str, str]) -> list[Departure]:
    """What differs besides, and may be the cause: versions, machine, policies, the arms that ran beside."""
    found = [*_departures("", baseline.environment, candidate.environment)]
    for name, other in arms.items():
        one, two = (
            {key: config.get(key) for key in ("preset", "shapes", "compile", "engine")}
            for config in (baseline.arms[name].config, candidate.arms[other].config)
        )
        found += [item for item in _departures(f"{other}.", one, two) if not _was_so_before(item, f"{other}.")]
    if set(baseline.arms) != set(candidate.arms):
        found.append(Departure(what="arms", baseline=sorted(baseline.arms), candidate=sorted(candidate.arms)))
    if baseline.trials != candidate.trials:
        found.append(Departure(what="trials", baseline=baseline.trials, candidate=candidate.trials))
    return found


def _departures(
    where: str, one: Mapping[str, Any], two: Mapping[str, Any], *, both: bool = False
) -> Iterator[Departure]:
    """The leaves in which two tables differ; with `both`, of the keys that both have."""
    keys = [key for key in one if key in two] if both else [*dict.fromkeys((*one, *two))]
    for key in keys:
        left, right = one.get(key), two.get(key)
        if isinstance(left, Mapping) or isinstance(right, Mapping):
            yield from _departures(f"{where}{key}.", mapping(left), mapping(right), both=both)
        elif left != right:
            yield Departure(what=f"{where}{key}", baseline=left, candidate=right)


def _was_so_before(item: Departure, where: str) -> bool:
    """Whether a version of tailgate added the setting, and the other side has what was done before there was it."""
    before = value_before(item.what.removeprefix(where), {})
    own = item.candidate if item.baseline is None else item.baseline
    return before is not None and None in (item.baseline, item.candidate) and own == before


def _shown(value: Any) -> str:
    if value is None or value == "" or value == []:
        return "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(str(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
