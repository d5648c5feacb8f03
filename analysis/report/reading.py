"""What all reports say alike: the facts of a run, gates by arm, worst events, and what would decide open gates."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.report.values import (
    DASH,
    at,
    byte_size,
    count,
    interval,
    is_number,
    label,
    milliseconds,
    percent,
    rate,
    ratio,
    rows,
    scientific,
    seconds,
    span,
    text,
    verdict,
)

Row = Mapping[str, Any]
KEY_FIGURES = {
    "requests",
    "error rate",
    "goodput",
    "p50 TTFT",
    "p99 TTFT",
    "p99 E2E",
    "compiles while serving",
    "longest stall",
    "requests hit",
    "p99 E2E without compiles",
}
ORDER = {"FAIL": 0, "INCONCLUSIVE": 1, DASH: 2, "PASS": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One named value about the run, ready to print."""

    name: str
    value: str
    note: str = ""


def headline(summary: Row) -> str:
    """The summary's own sentence, or one made of the verdict when it has none."""
    said = text(at(summary, "headline"))
    if said != DASH:
        return said
    return {
        "PASS": "Every gate passed.",
        "FAIL": "At least one gate failed.",
        "INCONCLUSIVE": "The data cannot carry a verdict.",
    }.get(verdict(at(summary, "overall")), "This run has no verdict.")


def facts(summary: Row) -> list[Fact]:
    """Design, duration, blocks, requests, machine: what the verdict rests on."""
    design = at(summary, "design")
    trials, blocks, each = at(design, "trials"), at(design, "blocks"), at(design, "block_s")
    loop = at(design, "open_loop")
    return [
        Fact(
            name="Design",
            value=text(at(design, "design")),
            note={True: "open loop", False: "closed loop"}.get(loop, "") if isinstance(loop, bool) else "",
        ),
        Fact(
            name="Duration",
            value=span(at(design, "duration_s")),
            note=_many(trials, "trial") if is_number(trials) else "",
        ),
        Fact(name="Blocks", value=count(blocks), note=f"of {seconds(each)}" if is_number(each) else ""),
        Fact(name="Requests", value=_requests(summary), note=_planned(summary)),
        Fact(name="Generator lag", value=milliseconds(at(design, "generator_lag_p99_ms")), note="p99"),
        Fact(name="Machine", value=machine(summary), note=device(summary)),
    ]


def _many(number: float, noun: str) -> str:
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"


def _requests(summary: Row) -> str:
    known = [arm["requests"] for arm in rows(summary, "arms") if is_number(at(arm, "requests"))]
    return count(sum(known)) if known else DASH


def _planned(summary: Row) -> str:
    planned = at(summary, "design", "planned")
    arms = len(rows(summary, "arms"))
    if not is_number(planned):
        return _many(arms, "arm")
    return f"{count(planned)} planned, {_many(arms, 'arm')}"


def machine(summary: Row) -> str:
    """The processor that ran it, or the platform where that is unknown."""
    environment = at(summary, "environment")
    processor = text(at(environment, "cpu", "model"))
    return processor if processor != DASH else text(at(environment, "platform"))


def device(summary: Row) -> str:
    """The GPUs, or how many CPUs where there is none."""
    gpus, cpus = at(summary, "environment", "gpus"), at(summary, "environment", "cpu", "usable")
    if isinstance(gpus, list) and gpus:
        return f"{len(gpus)} × {text(gpus[0])}" if len(gpus) > 1 else text(gpus[0])
    return _many(cpus, "CPU") if is_number(cpus) else ""


def arms_of(summary: Row) -> list[Row]:
    """The arms' tables, the control first."""
    return sorted(rows(summary, "arms"), key=lambda arm: not at(arm, "control"))


def arm_names(summary: Row) -> list[str]:
    """Names of all arms, the control first, then those that only gates or comparisons name."""
    named = [arm.get("name") for arm in arms_of(summary)]
    named += [gate.get("arm") for gate in (*rows(summary, "gates"), *rows(summary, "comparisons"))]
    return list(dict.fromkeys(name for name in named if isinstance(name, str)))


def gates_of(summary: Row, arm: str) -> list[Row]:
    """One arm's gates: failures first, then open ones, each group in the summary's order."""
    mine = [gate for gate in rows(summary, "gates") if gate.get("arm") == arm]
    return sorted(mine, key=lambda gate: ORDER[verdict(gate.get("verdict"))])


@dataclass(frozen=True, slots=True, kw_only=True)
class GateList:
    """One arm's gates as a reader wants them: what several that did not pass have in common stands once, on top."""

    shared: tuple[tuple[str, str], ...]  # names of gates, the reason that they share
    rows: tuple[tuple[Row, str], ...]  # a gate, its own reason


SHARED = "see above"


def gate_list(summary: Row, arm: str) -> GateList:
    """One arm's gates in the order of `gates_of`, with the reasons that two or more of them share taken out."""
    gates = gates_of(summary, arm)
    by_reason: dict[str, list[str]] = {}
    for gate in gates:
        if verdict(gate.get("verdict")) != "PASS" and (reason := text(gate.get("reason"))) != DASH:
            by_reason.setdefault(reason, []).append(label(gate.get("gate")))
    shared = {reason: names for reason, names in by_reason.items() if len(names) > 1}

    def own(gate: Row) -> str:
        reason = text(gate.get("reason"))
        return SHARED if verdict(gate.get("verdict")) != "PASS" and reason in shared else reason

    return GateList(
        shared=tuple((", ".join(names), reason) for reason, names in shared.items()),
        rows=tuple((gate, own(gate)) for gate in gates),
    )


def open_gates(summary: Row) -> list[Row]:
    return [gate for gate in rows(summary, "gates") if gate.get("verdict") == "INCONCLUSIVE"]


def failed_checks(summary: Row) -> list[Row]:
    return [check for check in rows(summary, "validity") if check.get("ok") is not True]


def check_name(check: Row) -> str:
    """A validity check's name, with the arm that it is about."""
    name, arm = text(check.get("check")), text(check.get("arm"))
    return name if arm == DASH else f"{name} ({arm})"


def event_seconds(event: Row) -> float | None:
    """How long an event took; from its start and end where the summary gives no seconds."""
    given, start, end = event.get("seconds"), event.get("start_ns"), event.get("end_ns")
    if is_number(given):
        return given
    return (end - start) / 1e9 if is_number(start) and is_number(end) else None


def event_hits(event: Row) -> int | None:
    """Requests that waited for an event."""
    for key in ("requests_hit", "request_count"):
        if is_number(found := event.get(key)):
            return int(found)
    ids = event.get("request_ids")
    return len(ids) if isinstance(ids, list) else None


def worst_events(summary: Row, limit: int) -> list[Row]:
    """The `limit` longest events; those without a length last."""
    return sorted(rows(summary, "events"), key=lambda event: -(event_seconds(event) or 0.0))[:limit]


def trial_starts(summary: Row) -> dict[int, float]:
    """Epoch ns at which each trial began, as far as its events tell."""
    starts: dict[int, float] = {}
    for event in rows(summary, "events"):
        trial, start, offset = event.get("trial"), event.get("start_ns"), event.get("offset_s")
        if is_number(trial) and is_number(start) and is_number(offset):
            starts.setdefault(int(trial), start - offset * 1e9)
    return starts


def spike_offset_s(spike: Row, starts: Mapping[int, float]) -> float | None:
    """Seconds from a trial's start to a spike's; None where the trial's start is not known."""
    trial, start, given = spike.get("trial"), spike.get("start_ns"), spike.get("offset_s")
    if is_number(given):
        return given
    known = starts.get(int(trial)) if is_number(trial) else None
    return (start - known) / 1e9 if is_number(start) and known is not None else None


def deciders(summary: Row) -> list[str]:
    """Sentences that say what would decide the gates that are open; empty when none is."""
    said = text(at(summary, "advice", "text"))
    found = [said] if said != DASH and (open_gates(summary) or at(summary, "overall") == "INCONCLUSIVE") else []
    needed = at(summary, "advice", "needed_s")
    if not found and is_number(needed) and open_gates(summary):
        found.append(f"Run for {span(needed)} or more.")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One row of the side-by-side table: the same figure of every arm."""

    name: str
    values: tuple[str, ...]
    group: str
    key: bool = False


def side_by_side(summary: Row) -> list[Figure]:
    """Key figures, a row each, a value for every arm in the order of `arms_of`."""
    arms = arms_of(summary)
    shown = (
        ("Traffic", "requests", count, ("requests",)),
        ("Traffic", "failed", count, ("failed",)),
        ("Traffic", "cancelled", count, ("cancelled",)),
        ("Traffic", "error rate", percent, ("error_pct",)),
        ("Traffic", "request rate", rate, ("request_rate",)),
        ("Traffic", "output tokens", rate, ("output_token_rate",)),
        ("Traffic", "goodput", rate, ("goodput_rps",)),
        ("Latency", "p50 TTFT", milliseconds, ("metrics", "ttft", "p50_ms")),
        ("Latency", "p99 TTFT", milliseconds, ("metrics", "ttft", "p99_ms")),
        ("Latency", "p50 E2E", milliseconds, ("metrics", "e2e", "p50_ms")),
        ("Latency", "p99 E2E", milliseconds, ("metrics", "e2e", "p99_ms")),
        ("Latency", "p50 ITL", milliseconds, ("metrics", "itl", "p50_ms")),
        ("Latency", "p99 ITL", milliseconds, ("metrics", "itl", "p99_ms")),
        ("Latency", "p99 max ITL", milliseconds, ("metrics", "max_itl", "p99_ms")),
        ("Compiles", "compiles while serving", count, ("compile", "serving_events")),
        ("Compiles", "recompiles", count, ("compile", "recompiles")),
        ("Compiles", "of which in the cold start", count, ("compile", "cold", "recompiles")),
        ("Compiles", "of which past it", count, ("compile", "steady", "recompiles")),
        ("Compiles", "graph captures", count, ("compile", "graph_captures")),
        ("Compiles", "limit hits", count, ("compile", "limit_hits")),
        ("Compiles", "ran eager after the limit", percent, ("compile", "eager_fallback_pct")),
        ("Compiles", "longest stall", seconds, ("compile", "longest_stall_s")),
        ("Compiles", "stall time per minute", seconds, ("compile", "stall_s_per_min")),
        ("Compiles", "requests hit", count, ("compile", "requests_hit")),
        ("Compiles", "share of requests hit", percent, ("compile", "requests_hit_pct")),
        ("What compiles explain", "p99 TTFT without compiles", milliseconds, ("compile", "p99_ttft_ms_without")),
        ("What compiles explain", "p99 TTFT due to compiles", percent, ("compile", "p99_ttft_explained_pct")),
        ("What compiles explain", "p99 E2E without compiles", milliseconds, ("compile", "p99_e2e_ms_without")),
        ("What compiles explain", "p99 E2E due to compiles", percent, ("compile", "p99_e2e_explained_pct")),
    )
    return [
        Figure(group=group, name=name, values=tuple(show(at(arm, *path)) for arm in arms), key=name in KEY_FIGURES)
        for group, name, show, path in shown
    ]


def parity(summary: Row) -> list[Figure]:
    """What is known of the arms' numerics, a row each, a value for every arm in the order of `arms_of`; empty when
    nothing was measured and nobody asked."""
    told = {row.get("name"): row for row in rows(summary, "parity", "arms")}
    names = [arm.get("name") for arm in arms_of(summary)]
    if not any(at(row, "measured") or at(row, "answers") for row in told.values()):
        return []
    control = at(summary, "parity", "control")
    measured = [at(told.get(name), "measured") or {} for name in names]
    if at(control, "figures"):
        measured = [control if name == at(control, "name") else row for name, row in zip(names, measured, strict=True)]

    def finding(row: object, name: str) -> str:
        found = next((item for item in rows(row, "findings") if item.get("name") == name), {})
        if not is_number(found.get("value")):
            return DASH
        shown = ratio(found["value"])
        return f"{shown} {interval(found.get('low'), found.get('high'))}" if is_number(found.get("low")) else shown

    def same_answers(row: object) -> str:
        same, asked = at(row, "figures", "answers_same"), at(row, "figures", "answers")
        return f"{count(same)} of {count(asked)}" if is_number(same) else DASH

    def kept(name: object) -> str:
        answers = rows(told.get(name), "answers")
        silent = [row for row in answers if row.get("error")]
        known = [row for row in answers if is_number(row.get("same")) and is_number(row.get("of"))]
        said = f"{count(sum(row['same'] for row in known))} of {count(sum(row['of'] for row in known))}"
        return f"{said}, {count(len(silent))} silent" if silent else said if known else DASH

    shown: tuple[tuple[str, Callable[[object], str]], ...] = (
        ("verdict", lambda row: verdict(at(row, "verdict"))),
        ("median error against float64", lambda row: scientific(at(row, "figures", "error", "median"))),
        ("median error, to the control's", lambda row: finding(row, "error")),
        ("p99 error, to the control's", lambda row: finding(row, "tail error")),
        ("largest error, to the control's", lambda row: finding(row, "worst error")),
        ("mean KL from float64", lambda row: scientific(at(row, "figures", "divergence", "mean"))),
        ("mean KL, to the control's", lambda row: finding(row, "divergence")),
        ("tokens that float64 would not take", lambda row: count(at(row, "figures", "flips"))),
        ("of them beyond noise", lambda row: count(at(row, "figures", "flips_unexplained"))),
        ("greedy answers as the control's", same_answers),
    )
    figures = [
        Figure(group="Measured before the traffic", name=name, values=tuple(show(row) for row in measured))
        for name, show in shown
        if any(measured)
    ]
    served = Figure(
        group="Asked after the traffic", name="greedy answers as the control's", values=tuple(map(kept, names))
    )
    return [*figures, served] if any(value != DASH for value in served.values) else figures


@dataclass(frozen=True, slots=True, kw_only=True)
class External:
    """An arm that tailgate did not start, and what is not known of it."""

    arm: object
    what: str
    notes: tuple[str, ...]


def externals(summary: Row) -> list[External]:
    """The external arms, in the order of `arms_of`; empty when tailgate started them all."""
    found = []
    for arm in arms_of(summary):
        if not isinstance(at(arm, "external"), Mapping):
            continue
        address, notes = at(arm, "external", "address"), at(arm, "external", "notes")
        where = ", ".join(text(item) for item in address) if isinstance(address, list) else text(address)
        what = f"{text(at(arm, 'external', 'kind'))} at {where}, model {text(at(arm, 'external', 'model_name'))}"
        said = tuple(text(note) for note in notes) if isinstance(notes, list) else ()
        found.append(External(arm=arm.get("name"), what=what, notes=said))
    return found


# A step's size as events and start-up items word it.
STEP_SHAPE = re.compile(r"(\w+) batch (\d+) × length (\d+), context (\d+)")
MOST_FACTS = 8
MEMORY_NAMES = {
    "weights": "weights",
    "kv_cache": "KV cache",
    "graph_pools": "CUDA graphs",
    "device_peak": "device, peak",
    "device_reserved": "device, reserved",
    "process_peak": "host process, peak",
}


def startup_costs(summary: Row) -> list[Figure]:
    """What each arm cost before its first request: time to serving by part, compiling, slowest shapes, memory.

    A part that no arm has is left out.
    """
    starts = [at(arm, "startup") for arm in arms_of(summary)]
    shown = [
        Figure(group=group, name=name, values=tuple(show(at(start, key)) for start in starts), key=is_key)
        for group, name, show, key, is_key in (
            ("Time", "to serving", _duration, "serving_s", True),
            ("Time", "process and imports", _duration, "process_s", False),
            ("Time", "load", _duration, "load_s", True),
            ("Time", "warm-up", _duration, "warmup_s", True),
            ("Time", "of which prefill shapes", _duration, "prefill_s", False),
            ("Time", "of which later chunks of prompts", _duration, "extend_s", False),
            ("Time", "of which decode shapes", _duration, "decode_s", False),
            ("Time", "of which CUDA-graph capture", _duration, "capture_s", False),
            ("Compiling in the warm-up", "compiles", count, "compiles", False),
            ("Compiling in the warm-up", "compile time", _duration, "compile_s", True),
            ("Compiling in the warm-up", "of which the backend", _duration, "backend_s", False),
            ("Compiling in the warm-up", "of which tuning kernels", _duration, "autotune_s", False),
            ("Compiling in the warm-up", "tuning kernels at their first run", _duration, "tuning_s", False),
            ("Compiling in the warm-up", "recording CUDA graphs", _duration, "recording_s", False),
            ("Compiling in the warm-up", "disk cache", _cache_state, "cache", True),
        )
    ]
    deepest = max((len(rows(start, "slowest")) for start in starts), default=0)
    shown += [
        Figure(
            group="Slowest shapes to warm",
            name=str(place + 1),
            values=tuple(_shape_cost(rows(start, "slowest")[place : place + 1]) for start in starts),
        )
        for place in range(deepest)
    ]
    memory = [at(start, "memory_bytes") for start in starts]
    told = [str(key) for table in memory if isinstance(table, Mapping) for key in table]
    shown += [
        Figure(
            group="Memory",
            name=MEMORY_NAMES.get(kind, text(kind).replace("_", " ")),
            values=tuple(byte_size(at(start, "memory_bytes", kind)) for start in starts),
            key=kind in ("weights", "kv_cache"),
        )
        for kind in sorted(dict.fromkeys(told), key=lambda kind: [*MEMORY_NAMES, kind].index(kind))
    ]
    nothing = (DASH, _duration(0), count(0))
    return [
        row for row in shown if row.name in ("load", "warm-up") or not all(value in nothing for value in row.values)
    ]


def _duration(value: object) -> str:
    return milliseconds(value * 1e3) if is_number(value) and value else seconds(value)


def _cache_state(counts: object) -> str:
    """ "cold" when nothing was found, "warm" when everything was, else how much of each."""
    known = {name: at(counts, name) or 0 for name in ("hit", "miss", "bypass")}
    if not all(is_number(value) for value in known.values()) or not any(known.values()):
        return DASH
    if not known["hit"]:
        return "cold" if known["miss"] else "bypassed"
    if not known["miss"] and not known["bypass"]:
        return "warm"
    return f"{count(known['hit'])} of {count(sum(known.values()))} found"


def _shape_cost(found: Sequence[Row]) -> str:
    if not found or not is_number(found[0].get("s")):
        return DASH
    return f"{brief_shape(found[0].get('item'))}: {_duration(found[0]['s'])}"


def brief_shape(item: object) -> str:
    """ "decode 4@256" for four rows that decode up to position 256, "prefill 1x32"; other text as it is."""

    def shorten(match: re.Match[str]) -> str:
        kind, batch, length, context = match.groups()
        sizes = {"prefill": f"{batch}x{length}", "decode": f"{batch}@{context}"}
        return f"{kind} {sizes.get(kind, f'{batch}x{length}@{context}')}"

    return STEP_SHAPE.sub(shorten, text(item))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """Something that the compiler could not do, and how often."""

    arm: object
    what: str
    cause: str
    times: int


def shortfalls(summary: Row) -> list[Shortfall]:
    """Graph breaks and CUDA graphs that were not made, the most frequent of each arm."""
    found = []
    for arm in arms_of(summary):
        for key, what in (("graph_breaks", "graph break"), ("cudagraph_skips", "no CUDA graph")):
            counts = at(arm, "compile", key)
            known = [(str(cause), times) for cause, times in counts.items()] if isinstance(counts, Mapping) else []
            numbered = [(cause, int(times)) for cause, times in known if is_number(times)]
            numbered.sort(key=lambda item: -item[1])
            found += [
                Shortfall(arm=arm.get("name"), what=what, cause=text(cause), times=times)
                for cause, times in numbered[:MOST_FACTS]
            ]
    return found


def flattened(table: object, prefix: str = "") -> list[tuple[str, str]]:
    """Every leaf of nested tables as ("host.cores", "2"). Numbers named *_bytes read as sizes."""
    if not isinstance(table, Mapping):
        return []
    found: list[tuple[str, str]] = []
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found += flattened(value, f"{name}.")
        elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            for position, item in enumerate(value):
                found += flattened(item, f"{name}.{position}.")
        elif name.endswith("bytes"):
            found.append((name, byte_size(value)))
        else:
            found.append((name, str(value) if is_number(value) else text(value)))
    return found


def ratio_of_limit(gate: Row) -> float | None:
    """A gate's value as a share of its limit; None where less is worse or the limit is 0."""
    value, limit = gate.get("value"), gate.get("limit")
    if gate.get("kind") == "goodput" or not is_number(value) or not is_number(limit) or limit <= 0 or value < 0:
        return None
    return value / limit
