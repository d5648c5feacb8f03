"""Whether all arms met the load that an experiment puts on its own machines ([pressure])."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tailgate.analysis.checks.check import Check, Evidence, rule
from tailgate.analysis.records.plain_values import mapping, number
from tailgate.analysis.wording import counted, digits

_LEAST_SHARE = 0.95  # of the traffic


def asked(experiment: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the table [pressure] of the experiment; None where nothing weighs."""
    table = mapping(experiment.get("pressure"))
    return table if any(number(table.get(key)) for key in ("gpu_gib", "processors")) else None


def in_words(experiment: Mapping[str, Any]) -> str:
    """Say what weighs on the machines; empty without [pressure]."""
    table = asked(experiment)
    if table is None:
        return ""
    gib, processors = (number(table.get(key)) or 0.0 for key in ("gpu_gib", "processors"))
    parts = [f"held {digits(gib)} GiB of each GPU"] if gib else []
    parts += [f"kept {counted(int(processors), 'processor')} busy"] if processors else []
    return f"a neighbour {' and '.join(parts)} over the whole traffic"


@rule(
    "pressure",
    sees="What `[pressure]` asks for was not on, or not for the whole traffic.",
    says="The machines were not under the pressure that the experiment asks for: {}.",
    remedy="See neighbour.log in the trial's folder, lower what [pressure] asks for, and run again.",
    opens=("noninferiority", "slo", "goodput", "memory"),
    at_end=True,
)
def pressure(seen: Evidence) -> Iterator[Check]:
    """Pressure on one arm alone explains a difference."""
    table = asked(seen.run.records.experiment)
    if table is not None:
        infos = [info for info in seen.run.infos if info and info.get("start_ns")]
        named = [(seen.run.trial_name(info["trial"]), info) for info in infos]
        yield pressure.found([f"{name}: {fault}" for name, info in named for fault in _faults(table, info)])


def _faults(table: Mapping[str, Any], info: Mapping[str, Any]) -> Iterator[str]:
    had = mapping(info.get("pressure"))
    began_ns, ended_ns = number(had.get("start_ns")), number(had.get("end_ns"))
    if error := had.get("error"):
        yield str(error)
    elif any(had.get(key) != table.get(key, 0) for key in ("gpu_gib", "processors")):
        yield "the applied pressure is not what [pressure] asks for"
    elif began_ns is None or (info.get("complete") and ended_ns is None):
        yield "it is not recorded from when to when it was on"
    elif info.get("complete") and ended_ns is not None:
        traffic_ns, duration_s = number(info.get("start_ns")) or 0.0, number(info.get("duration_s")) or 0.0
        first_s, last_s = max(0.0, (began_ns - traffic_ns) / 1e9), (ended_ns - traffic_ns) / 1e9
        if min(last_s, duration_s) - first_s < _LEAST_SHARE * duration_s:
            yield f"it was on from {digits(first_s)} to {digits(last_s)} s of the traffic"
