"""The figures of hosts and devices in each trial, as the HTML report shows them."""

from __future__ import annotations

from collections.abc import Mapping

from analysis.records.schemas import RUN_HOST
from analysis.report.values import DASH, byte_size, count, figure, percent, seconds, text
from analysis.run.machine_records import THROTTLES
from analysis.summary.model import MachineDevice, Machines, MachineSpeed

_SPEEDS = {
    "matmul_tflops": ("matrix product", "TFLOP/s"),
    "read_gb_per_s": ("read", "GB/s"),
    "launch_us": ("launch", "µs"),
    "python_ms": ("Python", "ms"),
}


def figures(machines: Machines) -> list[dict[str, str]]:
    """A row for each host and device in each trial: what it did during the traffic, and its speed before and after."""
    found: dict[tuple[int, str], dict[str, str]] = {}

    def add(
        trial: int, host: str, name: str, parts: Mapping[str, str], column: str = "During the traffic"
    ) -> dict[str, str]:
        place = text(name) if host == RUN_HOST else f"{text(host)}: {text(name)}"
        empty = {"Trial": count(trial), "Machine": place, "Arms": "", "During the traffic": "", "Reference": ""}
        shown = found.setdefault((trial, place), empty)
        known = [f"{key} {value}" for key, value in parts.items() if value != DASH]
        shown[column] = ", ".join(filter(None, (shown[column], *known)))
        return shown

    for host in machines.hosts:
        shares = {"busy": host.busy, "other work": host.foreign, "stolen": host.steal}
        shares["waiting for memory"] = host.pressure_memory
        add(host.trial, host.host, host.host, {name: _share(value) for name, value in shares.items()})
    for device in machines.devices:
        shown = add(device.trial, device.host, device.name, _of_device(device))
        shown["Arms"] = ", ".join(map(text, device.arms))
    for row in machines.speeds:
        name, unit = _SPEEDS[row.figure]
        add(row.trial, RUN_HOST, row.device, {name: _change(row, unit)}, "Reference")
    return list(found.values())


def _share(value: float | None) -> str:
    return DASH if value is None else f"{100.0 * value:.1f} %"


def _of_device(row: MachineDevice) -> dict[str, str]:
    held = [f"{THROTTLES.get(name, text(name))} {seconds(took)}" for name, took in (row.throttled_s or {}).items()]
    others = f"{count(row.foreign_processes)} for {seconds(row.foreign_s)}" if row.foreign_s else "0"
    return {
        "SM clock": DASH if row.low_mhz is None else f"{count(row.low_mhz)} to {count(row.high_mhz)} MHz",
        "power": DASH if row.power_w is None else f"{count(row.power_w)} of {count(row.power_limit_w)} W",
        "hottest": DASH if row.temperature_c is None else f"{count(row.temperature_c)} °C",
        "used": percent(row.utilisation_pct),
        "memory": byte_size(row.memory_bytes),
        "throttled:": "unknown" if row.throttled_s is None else ", ".join(held) or "no",
        "processes of others:": "unknown" if row.foreign_s is None else others,
    }


def _change(row: MachineSpeed, unit: str) -> str:
    if not row.before or row.after is None:
        return f"{figure(row.after if row.before is None else row.before)} {unit}"
    # Plus 0.0: what is rounded to nothing has no sign.
    change = round(100.0 * (row.after / row.before - 1.0), 1) + 0.0
    return f"{figure(row.before)} → {figure(row.after)} {unit} ({change:+.1f} %)".replace("-", "−")
