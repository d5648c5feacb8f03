"""What the HTML report says of the machines: what disturbed them, and their figures in each trial."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from analysis.report.tables import Table
from analysis.report.values import DASH, Row, at, byte_size, count, figure, is_number, percent, rows, seconds, text
from analysis.run.machine_records import THROTTLES
from analysis.wording import sentence

_REFERENCE = {
    "matmul_tflops": ("matrix product", "TFLOP/s"),
    "read_gb_per_s": ("read", "GB/s"),
    "launch_us": ("launch", "µs"),
    "python_ms": ("Python", "ms"),
}
_SHARES = {"busy": "busy", "other work": "foreign", "stolen": "steal", "waiting for memory": "pressure_memory"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSection:
    """The section on the machines, ready to print."""

    disturbances: Table
    figures: Table
    notes: tuple[str, ...]
    drawn: bool  # whether there is something to draw over time


def machine_section(summary: Row) -> MachineSection | None:
    """The section; None without a machine monitor."""
    machines = at(summary, "machines")
    if not any(rows(machines, key) for key in ("devices", "hosts", "references")):
        return None
    disturbances = [
        {
            "Trial": count(row.get("trial")),
            "What": f"{sentence([text(row.get('text'))])}.",
            "Check": text(row.get("check")),
            "Leaves open": "all arms" if (arms := row.get("arms")) is None else text(arms) if arms else "nothing",
        }
        for row in rows(machines, "disturbances")
    ]
    unknown = at(machines, "unknown")
    moved = [row for row in rows(machines, "devices") if at(row, "sm_mhz", "low") != at(row, "sm_mhz", "high")]
    commands = dict.fromkeys(text(row["lock_command"]) for row in moved if row.get("lock_command"))
    return MachineSection(
        disturbances=Table(rows=disturbances, kinds={"What": "reason", "Check": "words", "Leaves open": "words"}),
        figures=_figures(machines),
        notes=(
            *(f"Unknown: {text(line)}." for line in (unknown if isinstance(unknown, list) else [])),
            *([f"Clocks moved. To lock them: {'; '.join(commands)}"] if commands else []),
        ),
        drawn=bool(rows(machines, "series", "rows")),
    )


def _figures(machines: object) -> Table:
    """A row for each host and device in each trial."""
    found: dict[tuple[str, str], dict[str, str]] = {}

    def add(row: Row, name: object, column: str, parts: Mapping[str, str]) -> None:
        host, trial = text(row.get("host")), count(row.get("trial"))
        place = text(name) if host in ("run", DASH) else f"{host}: {text(name)}"
        empty = {"Trial": trial, "Machine": place, "Arms": "", "During the traffic": "", "Reference": ""}
        shown = found.setdefault((trial, place), empty)
        shown["Arms"] = text(row.get("arms")) if row.get("arms") else shown["Arms"]
        shown[column] = ", ".join(f"{key} {value}" for key, value in parts.items() if value != DASH) or shown[column]

    for row in rows(machines, "hosts"):
        shares = {name: row.get(key) for name, key in _SHARES.items()}
        known = {name: f"{100.0 * share:.1f} %" for name, share in shares.items() if is_number(share)}
        add(row, row.get("host"), "During the traffic", known)
    for row in rows(machines, "devices"):
        add(row, row.get("name"), "During the traffic", _of_device(row))
    pairs: dict[tuple[object, ...], dict[str, Row]] = {}
    for row in rows(machines, "references"):
        pairs.setdefault((row.get("trial"), row.get("host"), row.get("device")), {})[text(row.get("when"))] = row
    for pair in pairs.values():
        row = next(iter(pair.values()))
        figures = {name: _change(pair, key, unit) for key, (name, unit) in _REFERENCE.items()}
        errors = "; ".join(text(one.get("error")) for one in pair.values() if one.get("error"))
        add(row, row.get("device"), "Reference", figures | ({"failed:": errors} if errors else {}))
    kinds = {"Machine": "words", "Arms": "words", "During the traffic": "reason", "Reference": "reason"}
    return Table(rows=list(found.values()), kinds=kinds)


def _of_device(row: Row) -> dict[str, str]:
    low, high, limit = at(row, "sm_mhz", "low"), at(row, "sm_mhz", "high"), at(row, "power_limit_w", "low")
    took, reasons = row.get("foreign_s"), row.get("throttled_s")
    power, heat = at(row, "power_w", "median"), at(row, "temperature_c", "high")
    held = reasons.items() if isinstance(reasons, Mapping) else ()
    throttled = ", ".join(f"{THROTTLES.get(str(name), text(name))} {seconds(time)}" for name, time in held)
    others = f"{count(row.get('foreign_processes'))} for {seconds(took)}" if took else "0"
    return {
        "SM clock": f"{count(low)} to {count(high)} MHz" if is_number(low) and is_number(high) else DASH,
        "power": f"{count(power)} of {count(limit)} W" if is_number(power) else DASH,
        "hottest": f"{count(heat)} °C" if is_number(heat) else DASH,
        "used": percent(at(row, "utilisation_pct", "median")),
        "memory": byte_size(at(row, "memory_bytes", "high")),
        "throttled:": throttled or ("no" if isinstance(reasons, Mapping) else "unknown"),
        "processes of others:": others if is_number(took) else "unknown",
    }


def _change(pair: Mapping[str, Row], key: str, unit: str) -> str:
    before, after = (at(pair.get(when), "figures", key) for when in ("before", "after"))
    if not is_number(before) or not is_number(after) or not before:
        known = before if is_number(before) else after
        return f"{figure(known)} {unit}" if is_number(known) else DASH
    # Plus 0.0: what is rounded to nothing has no sign.
    change = round(100.0 * (after / before - 1.0), 1) + 0.0
    return f"{figure(before)} → {figure(after)} {unit} ({change:+.1f} %)".replace("-", "−")
