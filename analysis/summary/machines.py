"""The machines as a part of the summary: their verdict, each of them in each trial, and samples over time."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from analysis.checks.machines import disturbances_of
from analysis.judging.judgement import Judgement
from analysis.run.machine_records import DeviceTraffic
from analysis.run.run import Run
from analysis.summary.series import machine_series


def machines_row(run: Run, judgement: Judgement) -> dict[str, Any]:
    """The key `machines`; without a machine monitor, the verdict alone."""
    machines, verdict = judgement.machines, judgement.machine_verdict
    row: dict[str, Any] = {"verdict": verdict.verdict, "line": verdict.line}
    if not machines.monitored:
        return row
    traffic = {(host.trial, host.host): asdict(host) for host in machines.hosts}
    return row | {
        "unknown": list(verdict.unknown),
        "disturbances": [{"check": check, **asdict(item)} for check, item in disturbances_of(judgement.checks)],
        "hosts": [
            {"trial": place[0], "host": place[1], **machines.facts.get(place, {}), **traffic.get(place, {})}
            for place in sorted({*machines.facts, *traffic})
        ],
        "devices": [_device(device) for device in machines.devices],
        "references": [{**asdict(row), "arms": machines.arms_on(row.trial, row.device)} for row in machines.references],
        **({"series": series} if (series := machine_series(run)) else {}),
    }


def _device(device: DeviceTraffic) -> dict[str, Any]:
    row = asdict(device)
    return {"trial": row.pop("trial"), **row.pop("card"), **row}
