"""What all reports say of the test bed: what disturbed it, each machine in each trial, and how figures vary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from analysis.report.arms import arm_names, arms_of
from analysis.report.tables import Figure, Table
from analysis.report.values import (
    DASH,
    Row,
    at,
    byte_size,
    count,
    figure,
    is_number,
    metric_label,
    milliseconds,
    percent,
    rate,
    rows,
    seconds,
    text,
)
from analysis.run.test_bed import THROTTLES
from analysis.wording import counted, sentence

FLAG = "▲"  # beside what varies by more than 5 %


@dataclass(frozen=True, slots=True, kw_only=True)
class Bed:
    """The section on the test bed, ready to print."""

    disturbances: Table
    tables: tuple[tuple[str, str, Table], ...]  # title, note
    folded: tuple[tuple[str, Table], ...]
    notes: tuple[str, ...]
    drawn: bool  # whether there is something to draw over time


@dataclass(frozen=True, slots=True, kw_only=True)
class Variations:
    """Mean and coefficient of variation over trials: arms side by side, then machines."""

    lead: str
    arms: tuple[Figure, ...]
    machines: Table


def bed_section(summary: Row) -> Bed | None:
    """The section; None where nobody watched the machines."""
    bed = at(summary, "bed")
    if not any(rows(bed, key) for key in ("devices", "hosts", "references")):
        return None
    return Bed(
        disturbances=Table(
            kinds={"What": "reason", "Check": "words", "Leaves open": "words"},
            rows=[
                {
                    "Check": text(row.get("check")),
                    "What": f"{sentence([text(row.get('text'))])}.",
                    "Leaves open": _scope(row.get("arms")),
                }
                for row in rows(bed, "disturbances")
            ],
        ),
        tables=(
            ("Devices during the traffic", "", _devices(bed)),
            ("Hosts during the traffic", "", _hosts(bed)),
            (
                "The reference before and after each trial",
                "The matrix product and the read of memory tell the speed of the card, small launches and Python that "
                "of its host.",
                _references(bed),
            ),
        ),
        folded=(("Processes of the run", _processes(bed)), ("What could not be read", _unreadable(bed))),
        notes=_notes(bed),
        drawn=bool(rows(bed, "series", "rows")),
    )


def _scope(arms: object) -> str:
    if not isinstance(arms, list | tuple):
        return "all arms"
    return text(arms) if arms else "nothing"


def _place(row: Row, name: str) -> str:
    host = text(row.get("host"))
    return text(row.get(name)) if host in ("run", DASH) else f"{host}: {text(row.get(name))}"


def _devices(bed: object) -> Table:
    return Table(
        kinds={"Device": "words", "Arms": "words", "Throttled": "words", "Others on it": "words"},
        rows=[
            {
                "Trial": count(row.get("trial")),
                "Device": _place(row, "name"),
                "Arms": text(row.get("arms")),
                "SM clock": _range(row.get("sm_mhz"), "MHz"),
                "Locked": {True: "yes", False: "no"}.get(row.get("locked"), DASH),  # type: ignore[arg-type]
                "Power": _of_limit(row),
                "Hottest": _most(row.get("temperature_c"), "°C"),
                "Used": percent(at(row, "utilisation_pct", "median")),
                "Memory": byte_size(at(row, "memory_bytes", "high")),
                "Throttled": _throttled(row.get("throttled_s")),
                "Others on it": _others(row),
            }
            for row in rows(bed, "devices")
        ],
    )


def _range(value: object, unit: str) -> str:
    low, high = at(value, "low"), at(value, "high")
    if not is_number(low) or not is_number(high):
        return DASH
    return f"{count(high)} {unit}" if low == high else f"{count(low)} to {count(high)} {unit}"


def _most(value: object, unit: str) -> str:
    high = at(value, "high")
    return f"{count(high)} {unit}" if is_number(high) else DASH


def _of_limit(row: Row) -> str:
    drawn, limit = at(row, "power_w", "median"), at(row, "power_limit_w", "low")
    if not is_number(drawn) and not is_number(limit):
        return DASH
    return f"{count(drawn)} of {count(limit)} W"


def _throttled(reasons: object) -> str:
    if not isinstance(reasons, Mapping):
        return "unknown"
    held = [f"{THROTTLES.get(str(name), text(name))} {seconds(took)}" for name, took in reasons.items()]
    return ", ".join(held) or "no"


def _others(row: Row) -> str:
    took, most = row.get("foreign_s"), row.get("foreign_processes")
    if not is_number(took):
        return "unknown"
    return f"{count(most)} for {seconds(took)}" if took > 0 else "nobody"


def _share(value: object) -> str:
    return f"{100.0 * value:.1f} %" if is_number(value) else DASH


def _hosts(bed: object) -> Table:
    return Table(
        kinds={"Host": "words"},
        rows=[
            {
                "Trial": count(row.get("trial")),
                "Host": text(row.get("host")),
                "Processors": count(row.get("cpus")),
                "Busy": _share(row.get("busy")),
                "Not of the run": _share(row.get("foreign")),
                "Stolen": _share(row.get("steal")),
                "Waiting: CPU": _share(row.get("pressure_cpu")),
                "Memory": _share(row.get("pressure_memory")),
                "Disk": _share(row.get("pressure_io")),
                "Load per CPU": figure(at(row, "load_per_cpu", "median")),
                "Frequency": _range(row.get("frequency_mhz"), "MHz"),
                "Memory used": byte_size(at(row, "memory_bytes", "high")),
            }
            for row in rows(bed, "hosts")
        ],
    )


_REFERENCE_HEADS: dict[str, tuple[str, Callable[[object], str], str]] = {
    "matmul_tflops": ("Matrix product", figure, "TFLOP/s"),
    "read_gb_per_s": ("Read", count, "GB/s"),
    "launch_us": ("Launch", figure, "µs"),
    "python_ms": ("Python", figure, "ms"),
}


def _references(bed: object) -> Table:
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows(bed, "references"):
        found.setdefault((row.get("trial"), row.get("host"), row.get("device")), {})[text(row.get("when"))] = row
    shown = []
    for place, pair in found.items():
        errors = [text(row.get("error")) for row in pair.values() if row.get("error")]
        first = next(iter(pair.values()))
        cells = {
            head: _change(at(pair.get("before"), "figures", name), at(pair.get("after"), "figures", name), show, unit)
            for name, (head, show, unit) in _REFERENCE_HEADS.items()
        }
        shown.append(
            {
                "Trial": count(place[0]),
                "Device": _place(first, "device"),
                "Arms": text(first.get("arms")),
                **cells,
                "Python by processor": _span(pair),
                **(
                    {"Failed": "; ".join(errors) or DASH}
                    if any(row.get("error") for row in rows(bed, "references"))
                    else {}
                ),
            }
        )
    return Table(rows=shown, kinds={"Device": "words", "Arms": "words", "Failed": "reason"})


def _span(pair: Mapping[str, Row]) -> str:
    """The lowest and the highest decile of before and after."""
    spans = [at(row, "python_range_ms") for row in pair.values()]
    ends = [end for span in spans if isinstance(span, list | tuple) for end in span if is_number(end)]
    return f"{figure(min(ends))} to {figure(max(ends))} ms" if ends else DASH


def _change(before: object, after: object, show: Callable[[object], str], unit: str) -> str:
    if not is_number(before) or not is_number(after) or not before:
        known = before if is_number(before) else after
        return f"{show(known)} {unit}" if is_number(known) else DASH
    # Plus 0.0: what is rounded to nothing has no sign.
    change = round(100.0 * (after / before - 1.0), 1) + 0.0
    return f"{show(before)} → {show(after)} {unit} ({change:+.1f} %)".replace("-", "−")


def _processes(bed: object) -> Table:
    return Table(
        kinds={"Process": "words"},
        rows=[
            {
                "Trial": count(row.get("trial")),
                "Process": _place(row, "name"),
                "Cores": figure(row.get("cores")),
                "Threads": count(row.get("threads")),
                "Switches": rate(row.get("switches_per_s")),
                "Forced": rate(row.get("forced_switches_per_s")),
                "Memory": byte_size(at(row, "memory_bytes", "high")),
                "Files": count(row.get("files")),
            }
            for row in rows(bed, "processes")
        ],
    )


def _unreadable(bed: object) -> Table:
    return Table(
        kinds={"Where": "words", "What": "words", "Why": "reason"},
        rows=[
            {"Where": _place(row, "name"), "What": text(row.get("what")), "Why": text(row.get("why"))}
            for row in rows(bed, "unreadable")
        ],
    )


def _notes(bed: object) -> tuple[str, ...]:
    unknown = at(bed, "unknown")
    notes = [f"Cannot tell: {text(line)}." for line in unknown] if isinstance(unknown, list) else []
    machines = (
        f"{text(row.get('host'))}: {text(row.get('cpu'))}, {counted(row.get('cpus'), 'processor', count)}, kernel "
        f"{text(row.get('kernel'))}{', virtual (' + text(row['virtual']) + ')' if row.get('virtual') else ''}."
        for row in rows(bed, "machines")
    )
    notes += [f"Host {line}" for line in dict.fromkeys(machines)]
    free = [row for row in rows(bed, "devices") if row.get("locked") is not True and row.get("lock_command")]
    commands = dict.fromkeys(text(row["lock_command"]) for row in free)
    if commands:
        notes.append(f"Clocks are free to move. To lock them: {'; '.join(commands)}")
    return tuple(notes)


# --- Over trials ------------------------------------------------------------------------------------------------------

_UNITS: dict[str, tuple[str, Callable[[object], str]]] = {
    "goodput_rps": ("goodput", rate),
    "output_tokens_per_s": ("output tokens", rate),
    "decode_step_ms": ("decode step, p50", milliseconds),
    "encode_step_ms": ("encode step, p50", milliseconds),
    "startup_s": ("start-up", seconds),
    "sm_mhz": ("SM clock, median", lambda value: f"{count(value)} MHz"),
    "power_w": ("power, median", lambda value: f"{count(value)} W"),
    "matmul_tflops": ("matrix product", lambda value: f"{figure(value)} TFLOP/s"),
    "read_gb_per_s": ("read", lambda value: f"{count(value)} GB/s"),
    "launch_us": ("launch", lambda value: f"{figure(value)} µs"),
    "python_ms": ("Python", milliseconds),
}


def variation(summary: Row) -> Variations | None:
    """How figures vary over the trials; None where nothing is known of it at all."""
    found = rows(summary, "bed", "variation")
    if not found:
        return None
    most = max((row["n"] for row in found if is_number(row.get("n"))), default=0)
    if most < 2:
        lead = "One trial says nothing of how the figures vary from start to start: more trials would show it."
        return Variations(lead=lead, arms=(), machines=Table(rows=[], kinds={}))
    flagged = sum(row.get("flagged") is True for row in found)
    lead = (
        f"Mean ± coefficient of variation (standard deviation over the mean) over {count(most)} trials, each a fresh "
        f"start. {FLAG} marks more than 5 %: {flagged or 'none'} of {len(found)}."
    )
    if most < 6:
        lead += f" From {count(most)} trials that is a guess, and the truth may be several times as large: run more."
    names = [arm.get("name") for arm in arms_of(summary)]
    of_arm = {(row.get("of"), row.get("figure")): row for row in found if row.get("of") in names}
    figures = dict.fromkeys(name for _, name in of_arm)
    return Variations(
        lead=lead,
        arms=tuple(
            Figure(
                group="Latency" if text(name).startswith("p") else "Work and start",
                name=_figure_name(name)[0],
                values=tuple(_cell(of_arm.get((arm, name)), most) for arm in names),
            )
            for name in figures
        ),
        machines=Table(
            kinds={"Device": "words", "Figure": "words"},
            rows=[
                {
                    "Device": text(row.get("of")),
                    "Figure": _figure_name(row.get("figure"))[0],
                    "Mean ± variation": _cell(row, most),
                }
                for row in found
                if row.get("of") not in arm_names(summary)
            ],
        ),
    )


def _figure_name(name: object) -> tuple[str, Callable[[object], str]]:
    """What a reader calls the figure, and how its values read."""
    known = text(name)
    if known in _UNITS:
        return _UNITS[known]
    quantile, _, metric = known.removesuffix("_ms").partition("_")
    return (f"{quantile} {metric_label(metric)}", milliseconds) if metric else (known, figure)


def _cell(row: Row | None, most: float) -> str:
    if row is None or not is_number(row.get("mean")):
        return DASH
    shown = _figure_name(row.get("figure"))[1](row.get("mean"))
    if is_number(row.get("cv")):
        shown += f" ± {100.0 * row['cv']:.1f} %{f' {FLAG}' if row.get('flagged') is True else ''}"
    return shown if row.get("n") == most else f"{shown} (n {count(row.get('n'))})"
