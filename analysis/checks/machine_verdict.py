"""Whether a run's machines were quiet, in one line: what a reader must know before any figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from analysis.checks.check import Check
from analysis.checks.machines import disturbances_of
from analysis.records.schemas import RUN_HOST
from analysis.run.machine_records import DeviceTraffic, MachineRecords
from analysis.run.references import FIGURES
from analysis.wording import percent

QUIET, DISTURBED, UNMONITORED, PARTLY = "quiet", "disturbed", "not monitored", "partly monitored"

_LEAST_SAMPLED = 0.95  # of a trial's traffic
_MOST_NAMED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineVerdict:
    """The verdict on the machines, a sentence that begins with it, and what the records leave open, in words."""

    verdict: str  # quiet | disturbed | not monitored | partly monitored
    line: str
    unknown: tuple[str, ...] = ()


def machine_verdict(machines: MachineRecords, checks: Sequence[Check]) -> MachineVerdict:
    """Return the verdict: disturbed where a check names a disturbance, quiet only where nothing is unknown."""
    unknown = tuple(_unknown(machines)) if machines.monitored else ()
    disturbances = [item.text for _, item in disturbances_of(checks)]
    if not machines.monitored:
        verdict, line = UNMONITORED, "no machine monitor recorded how the machines of this run behaved"
    elif disturbances:
        more = len(disturbances) - _MOST_NAMED
        verdict, line = DISTURBED, "; ".join([*disturbances[:_MOST_NAMED], *([f"{more} more"] if more > 0 else [])])
    else:
        verdict, line = PARTLY if unknown else QUIET, "nothing that was recorded disturbed the machines"
        line += f"; unknown: {'; '.join(unknown)}" if unknown else ""
    return MachineVerdict(verdict=verdict, line=f"{verdict.capitalize()}: {line}.", unknown=unknown)


def _unknown(machines: MachineRecords) -> Iterator[str]:
    """What the records leave open: machines of which this is unknown are not called quiet."""
    hosts = [host for host in machines.hosts if host.host == RUN_HOST]
    sampled = {host.trial for host in hosts if host.seconds >= _LEAST_SAMPLED * machines.seconds[host.trial]}
    if short := [trial for trial in machines.trials if trial not in sampled]:
        yield f"what happened in at least {percent(1.0 - _LEAST_SAMPLED)} of {_trials(short)}, which was not sampled"
    if any(host.steal is None for host in machines.hosts):
        yield "what the hypervisor took"
    if any(host.foreign is None for host in hosts):
        yield "what else ran on the host"
    used = {(device.trial, device.card.name): device for device in machines.used if device.arms}
    cards = {(trial, name) for trial, row in machines.placed.items() for name in row.values() if name != "cpu"}
    for what, column in _OF_DEVICES.items():
        lacking = {
            place[1]
            for place in cards | used.keys()
            if place[0] in {host.trial for host in hosts} and not _reports(machines, used.get(place), column)
        }
        if lacking:
            yield what.format(", ".join(sorted(lacking)))
    yield from _unmeasured(machines)


_OF_DEVICES = {
    "who else was on {}": "foreign_processes",
    "whether {} was throttled": "throttle",
    "the clocks of {}": "sm_mhz",
}


def _reports(machines: MachineRecords, device: DeviceTraffic | None, column: str) -> bool:
    return (
        device is not None
        and device.seconds >= _LEAST_SAMPLED * machines.seconds[device.trial]
        and device.reported[column] >= _LEAST_SAMPLED
    )


def _unmeasured(machines: MachineRecords) -> Iterator[str]:
    own = [row for row in machines.references if row.host == RUN_HOST]
    measured = {(row.trial, row.device, row.when) for row in own if row.figures.keys() >= set(FIGURES)}
    places = {(row.trial, row.device) for row in own}
    places |= {(trial, device) for trial, row in machines.placed.items() for device in row.values()}
    lacking = {place[0] for place in places if not {(*place, "before"), (*place, "after")} <= measured}
    errors = "; ".join(dict.fromkeys(f"{row.device}: {row.error}" for row in machines.references if row.error))
    why = f" ({errors})" if errors else ""
    if not measured:
        yield f"how fast the machines were, since no reference was measured{why}"
    elif lacking:
        yield f"whether the speed stayed, since a reference is missing in {_trials(sorted(lacking))}{why}"


def _trials(numbers: Sequence[int]) -> str:
    return f"trial {numbers[0]}" if len(numbers) == 1 else f"trials {', '.join(map(str, numbers))}"
