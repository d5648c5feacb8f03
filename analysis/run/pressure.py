"""The load that an experiment puts on its own machines: what it asked for, in words, and where a trial did not have
it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from analysis.records.plain_values import mapping, number, rows_of
from analysis.run.placement import devices_in
from analysis.wording import counted

_WEIGHTS = {"memory_share": "memory", "compute_share": "compute", "tenant_rps": "tenant", "cpus": "cpus"}
_LEAST_HAD = 0.5  # of a share of the time that was asked for
_FEW = 5.0  # requests that a tenant may leave unanswered before that means anything

Row = Mapping[str, Any]


def phases_of(experiment: Row) -> list[Row]:
    """The tables of [pressure] that weigh anything, as the experiment was resolved."""
    pressure = mapping(experiment.get("pressure"))
    tables = rows_of(pressure.get("schedule")) or [pressure]
    return [table for table in tables if any(number(table.get(key)) for key in _WEIGHTS)]


def in_words(phases: Sequence[Row]) -> str:
    """One sentence about all phases; empty without any."""
    if not phases:
        return ""
    parts = [f"{_when(phase)} {_what(phase)}" for phase in phases]
    return f"Under pressure: {'; '.join(parts)}."


def _when(phase: Row) -> str:
    start_s, end_s = number(phase.get("start_s")) or 0.0, number(phase.get("end_s")) or 0.0
    if end_s:
        return f"from {start_s:g} to {end_s:g} s"
    return f"from {start_s:g} s on" if start_s else "over the whole traffic"


def _what(phase: Row) -> str:
    memory, compute, tenant, cpus = (number(phase.get(key)) or 0.0 for key in _WEIGHTS)
    done = [f"held {100.0 * memory:g} % of the memory"] if memory else []
    done += [f"computed {100.0 * compute:g} % of the time"] if compute else []
    parts = [f"a neighbour on each device {' and '.join(done)}"] if done else []
    parts += [f"a second server on each device got {tenant:g} requests/s"] if tenant else []
    parts += [f"each replica had {counted(cpus, 'processor')}"] if cpus else []
    return ", ".join(parts[:-1]) + (", and " if parts[1:] else "") + parts[-1]


def faults(phases: Sequence[Row], infos: Sequence[Row]) -> list[str]:
    """Where a complete trial was not pressed as asked, or not on every device alike, a phrase for each."""
    complete = [info for info in infos if info.get("complete")]
    return [f"trial {info.get('trial')}: {fault}" for info in complete for fault in _faults(phases, info)]


def _faults(phases: Sequence[Row], info: Row) -> Iterator[str]:
    had = rows_of(info.get("pressure"))
    names = [arm.get("replicas") for arm in rows_of(info.get("arms"))]
    replicas = sum(len(each) for each in names if isinstance(each, list))
    devices = len(set(devices_in(info).values()))
    for phase in phases:
        start_s = number(phase.get("start_s")) or 0.0
        for key, kind in _WEIGHTS.items():
            if not number(phase.get(key)):
                continue
            rows = [row for row in had if row.get("kind") == kind and (number(row.get("from_s")) or 0.0) == start_s]
            wanted, what = (replicas, "replicas") if kind == "cpus" else (devices, "devices")
            if len(rows) < wanted:
                yield f"{kind} from {start_s:g} s on was on {len(rows)} of {wanted} {what}"
            for row in rows:
                if fault := _fault(kind, row):
                    yield f"{kind} on {row.get('device') or row.get('replica')}: {fault}"


def _fault(kind: str, row: Row) -> str:
    """What is wrong with one row of trial.json; empty when nothing is."""
    if row.get("error"):
        return str(row["error"])
    if kind == "compute":
        share, had = number(row.get("share")) or 0.0, number(row.get("had_share"))
        if had is None:
            return "how much of the time products took is not known"
        if had < _LEAST_HAD * share:
            return f"products took {100.0 * had:.2g} % of the time, not {100.0 * share:g} %"
    if kind == "tenant":
        start_ns, end_ns = number(row.get("start_ns")), number(row.get("end_ns"))
        due = (number(row.get("requests_per_s")) or 0.0) * ((end_ns or 0.0) - (start_ns or 0.0)) / 1e9
        answered = number(row.get("answered")) or 0.0
        if due > _FEW and answered < _LEAST_HAD * due:
            return f"{answered:.0f} of some {due:.0f} requests were answered"
    return ""
