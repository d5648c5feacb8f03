"""Whether a run's machines were quiet, in one line: what a reader must know before any figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from tailgate.analysis.checks.check import MACHINES, Check
from tailgate.analysis.run.machine_records import FIGURES, LEAST_SAMPLED, MachineRecords
from tailgate.analysis.wording import percent


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineVerdict:
    """The verdict on the machines, and a sentence that begins with it and names what the records leave open."""

    verdict: Literal["quiet", "disturbed", "partly monitored", "not monitored"]
    line: str


def machine_verdict(machines: MachineRecords, checks: Sequence[Check]) -> MachineVerdict:
    """Return the verdict: disturbed where a check of the machines failed, quiet only where nothing is unknown."""
    if not machines.monitored:
        line = "Not monitored: no monitor recorded the machines of this run."
        return MachineVerdict(verdict="not monitored", line=line)
    if disturbed := [row.reason for row in checks if row.rule.rank == MACHINES and not row.ok]:
        return MachineVerdict(verdict="disturbed", line=f"Disturbed: {' '.join(disturbed)}")
    if unknown := "; ".join(_unknown(machines)):
        line = f"Partly monitored: no disturbance was recorded; unknown: {unknown}."
        return MachineVerdict(verdict="partly monitored", line=line)
    return MachineVerdict(verdict="quiet", line="Quiet: no disturbance was recorded.")


def _unknown(machines: MachineRecords) -> Iterator[str]:
    """Yield what the records leave open: machines are quiet only if all of this is known."""
    sampled = {host.trial for host in machines.hosts if host.known}
    if short := [trial for trial in machines.placed if trial not in sampled]:
        yield f"what happened in at least {percent(1.0 - LEAST_SAMPLED)} of {_trials(short)}, which was not sampled"
    if any(host.steal is None or host.foreign is None for host in machines.hosts):
        yield "CPU steal, or other work on the host"
    known = {(device.trial, device.name) for device in machines.used if device.known}
    cards = {(trial, name) for trial, row in machines.placed.items() for name in row.values() if name != "cpu"}
    cards |= {(device.trial, device.name) for device in machines.used}
    if lacking := {name for trial, name in cards - known if trial in {host.trial for host in machines.hosts}}:
        yield f"other processes, clocks and throttling of {', '.join(sorted(lacking))}"
    twice = {(item.trial, item.device, item.figure) for item in machines.speeds if len(item.logs) == 2}
    placed = {(trial, device) for trial, row in machines.placed.items() for device in row.values()}
    placed |= {(item.trial, item.device) for item in machines.speeds}
    short = sorted({place[0] for place in placed if any((*place, figure) not in twice for figure in FIGURES)})
    why = f" ({'; '.join(machines.errors)})" if machines.errors else ""
    if not twice:
        yield f"the speed of the machines, since no reference was measured{why}"
    elif short:
        yield f"changes of speed, since a reference is missing in {_trials(short)}{why}"


def _trials(numbers: Sequence[int]) -> str:
    return f"trial {numbers[0]}" if len(numbers) == 1 else f"trials {', '.join(map(str, numbers))}"
