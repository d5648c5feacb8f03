"""Tables with a column for each arm: figures side by side, start-up, parity, and what the compiler could not do."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from analysis.report.resources import resources
from analysis.report.tables import Figure, Shown, Table, figures_of
from analysis.report.values import (
    DASH,
    Row,
    at,
    byte_size,
    count,
    fine_ratio,
    interval,
    is_number,
    milliseconds,
    percent,
    rate,
    rows,
    seconds,
    text,
    verdict,
)
from analysis.settings.metrics import EMBED, EMBED_METRICS, METRIC_NAMES

MOST_SHORTFALLS = 8
# A step's size as events and start-up items word it.
_STEP = re.compile(r"(\w+) batch (\d+) × length (\d+), context (\d+)")
_MEMORY_NAMES = {
    "weights": "weights",
    "quantised_weights": "of which quantised",
    "kv_cache": "KV cache",
    "graph_pools": "CUDA graphs",
    "device_peak": "device, peak",
    "process_peak": "host process, peak",
}


def arms_of(summary: Row) -> list[Row]:
    """The arms' tables, the control first."""
    return sorted(rows(summary, "arms"), key=lambda arm: not at(arm, "control"))


def arm_names(summary: Row) -> list[str]:
    """Names of all arms, the control first, then those that only gates or comparisons name."""
    named = [arm.get("name") for arm in arms_of(summary)]
    named += [gate.get("arm") for gate in (*rows(summary, "gates"), *rows(summary, "comparisons"))]
    return list(dict.fromkeys(name for name in named if isinstance(name, str)))


def embeds(summary: Row) -> bool:
    """Whether the arms were asked for vectors: such requests have an end and no tokens."""
    return bool(at(summary, "task") == EMBED)


def metric_names(summary: Row) -> dict[str, str]:
    """What a reader calls each metric that the run's requests have, in order."""
    return {key: name for key, name in METRIC_NAMES.items() if key in EMBED_METRICS or not embeds(summary)}


def side_by_side(summary: Row) -> list[Figure]:
    """Figures of traffic, compiles, padding and resources, a value for every arm in the order of `arms_of`."""
    shown: tuple[Shown, ...] = (
        ("Traffic", "requests", count, ("requests",)),
        ("Traffic", "failed", count, ("failed",)),
        ("Traffic", "error rate", percent, ("error_pct",)),
        ("Traffic", "sentences" if embeds(summary) else "request rate", rate, ("request_rate",)),
        ("Traffic", "output tokens", rate, ("output_token_rate",)),
        ("Traffic", "goodput", rate, ("goodput_rps",)),
        ("Compiles while serving", "events", count, ("compile", "serving_events")),
        ("Compiles while serving", "recompiles", count, ("compile", "recompiles")),
        ("Compiles while serving", "of which in the cold start", count, ("compile", "cold", "recompiles")),
        ("Compiles while serving", "JIT compiles of kernels", count, ("compile", "jit_compiles")),
        ("Compiles while serving", "graph captures", count, ("compile", "graph_captures")),
        ("Compiles while serving", "limit hits", count, ("compile", "limit_hits")),
        ("Compiles while serving", "ran eager after the limit", percent, ("compile", "eager_fallback_pct")),
        ("Compiles while serving", "longest stall", seconds, ("compile", "longest_stall_s")),
        ("Compiles while serving", "stall time per minute", seconds, ("compile", "stall_s_per_min")),
        ("Compiles while serving", "requests hit", count, ("compile", "requests_hit")),
        ("Compiles while serving", "share of requests hit", percent, ("compile", "requests_hit_pct")),
        ("Compiles while serving", "in the background", seconds, ("compile", "background_s")),
        ("Padding", "of all positions", percent, ("padding", "waste_pct")),
        ("Padding", "of prefill", percent, ("padding", "prefill_waste_pct")),
        ("Padding", "of decode", percent, ("padding", "decode_waste_pct")),
    )
    arms = arms_of(summary)
    rare = {"JIT compiles of kernels", "in the background", "limit hits", "graph captures", "failed"}
    nothing = (DASH, count(0), seconds(0))
    return [
        row
        for row in figures_of(arms, shown)
        if row.known and not (row.name in rare and all(value in nothing for value in row.values))
    ] + resources(arms)


def parity(summary: Row) -> list[Figure]:
    """What is known of the arms' numerics, a row each; empty when nothing was measured and no replica was asked."""
    parities = {row.get("name"): row for row in rows(summary, "parity", "arms")}
    arms = [parities.get(arm.get("name"), {}) for arm in arms_of(summary)]
    before, after = "Measured before the traffic", "Asked after the traffic"
    findings = dict.fromkeys(str(finding.get("name")) for arm in arms for finding in rows(arm, "measured", "findings"))
    shown: list[Shown] = [
        (before, "verdict", verdict, ("measured", "verdict")),
        *((before, name, partial(_finding, name=name), ("measured", "findings")) for name in findings),
        (after, "as the control’s", _same_as_control, ("answers",)),
    ]
    for when in ("before", "after"):
        group, asked = f"Greedy answers {when} the load", partial(_asked, when=when)
        shown += [
            (group, "verdict", partial(asked, show=lambda row: verdict(row.get("verdict"))), ("asked",)),
            (group, "as the control’s", partial(asked, show=_of_answered("same")), ("asked",)),
            (group, "the control’s own, asked twice", partial(asked, show=_of_answered("control_same")), ("asked",)),
        ]
    return [row for row in figures_of(arms, shown) if row.known]


def _finding(findings: object, *, name: str) -> str:
    """The finding's value with its interval where it has one."""
    finding = next((row for row in rows(findings) if row.get("name") == name), {})
    show = text if name == "kl" else fine_ratio
    shown, limits = show(finding.get("value")), interval(finding.get("low"), finding.get("high"), show)
    return shown if DASH in (shown, limits) else f"{shown} {limits}"


def _same_as_control(answers: object) -> str:
    """How many answers of all replicas are the control's, or the lowest cosine of their vectors with it."""
    cosines = [row["cosine"] for row in rows(answers) if is_number(row.get("cosine"))]
    if cosines:
        return f"cosine {min(cosines):.6f}"
    known = [row for row in rows(answers) if is_number(row.get("same")) and is_number(row.get("of"))]
    silent = sum(bool(row.get("error")) for row in rows(answers))
    shown = f"{count(sum(row['same'] for row in known))} of {count(sum(row['of'] for row in known))}"
    return f"{shown}, {count(silent)} silent" if silent else shown if known else DASH


def _asked(asked: object, *, when: str, show: Callable[[Row], str]) -> str:
    row = next((row for row in rows(asked) if row.get("when") == when), None)
    return DASH if row is None else show(row)


def _of_answered(key: str) -> Callable[[Row], str]:
    def shown(row: Row) -> str:
        same, answered = row.get(key), row.get("answered")
        return f"{count(same)} of {count(answered)}" if is_number(same) and answered else DASH

    return shown


@dataclass(frozen=True, slots=True, kw_only=True)
class External:
    """An arm that tailgate did not start, and what is not known of it."""

    arm: object
    what: str
    notes: tuple[str, ...]


def externals(summary: Row) -> list[External]:
    """The external arms, in the order of `arms_of`; empty when tailgate started them all."""
    return [
        External(
            arm=arm.get("name"),
            what="{} at {}, model {}".format(*(text(external.get(key)) for key in ("kind", "address", "model_name"))),
            notes=tuple(map(text, external.get("notes") or ())),
        )
        for arm in arms_of(summary)
        if isinstance(external := arm.get("external"), Mapping)
    ]


def startup_costs(summary: Row) -> list[Figure]:
    """What each arm cost before its first request: time, compiling, the slowest shape, memory."""
    starts = [at(arm, "startup") for arm in arms_of(summary)]
    parts: tuple[Shown, ...] = (
        ("Time", "to serving", _duration, ("serving_s",)),
        ("Time", "load", _duration, ("load_s",)),
        ("Time", "warm-up", _duration, ("warmup_s",)),
        ("Time", "slowest shape to warm", _shape_cost, ("slowest",)),
        ("Compiling in the warm-up", "compiles", count, ("compiles",)),
        ("Compiling in the warm-up", "compile time", _duration, ("compile_s",)),
        ("Compiling in the warm-up", "disk cache", _cache_state, ("cache",)),
        ("Compiling in the warm-up", "artifact", text, ("artifact",)),
    )
    memory: list[Shown] = [("Memory", name, byte_size, ("memory_bytes", kind)) for kind, name in _MEMORY_NAMES.items()]
    nothing = (DASH, _duration(0), count(0), byte_size(0))
    return [row for row in figures_of(starts, (*parts, *memory)) if not all(value in nothing for value in row.values)]


def _duration(value: object) -> str:
    return milliseconds(value * 1e3) if is_number(value) and value else seconds(value)


def _cache_state(counts: object) -> str:
    """ "cold" when nothing was found, "warm" when everything was, else how much of each."""
    known = {name: at(counts, name) or 0 for name in ("hit", "miss", "bypass")}
    if not any(known.values()):
        return DASH
    if not known["hit"]:
        return "cold" if known["miss"] else "bypassed"
    if not known["miss"] and not known["bypass"]:
        return "warm"
    return f"{count(known['hit'])} of {count(sum(known.values()))} found"


def _shape_cost(slowest: object) -> str:
    first = next(iter(rows(slowest)), {})
    return f"{brief_shape(first.get('item'))}: {_duration(first['s'])}" if is_number(first.get("s")) else DASH


def brief_shape(item: object) -> str:
    """ "decode 4@256" for four rows that decode up to position 256, "prefill 1x32", "encode 4x32"; other text as it
    is."""

    def shorten(match: re.Match[str]) -> str:
        kind, batch, length, context = match.groups()
        sizes = {**dict.fromkeys(("prefill", "encode"), f"{batch}x{length}"), "decode": f"{batch}@{context}"}
        return f"{kind} {sizes.get(kind, f'{batch}x{length}@{context}')}"

    return _STEP.sub(shorten, text(item))


def shortfalls(summary: Row) -> Table:
    """Graph breaks and CUDA graphs that were not made, the most frequent of each arm, as the summary sorts them."""
    shown = []
    for arm in arms_of(summary):
        for key, what in (("graph_breaks", "graph break"), ("cudagraph_skips", "no CUDA graph")):
            counts = at(arm, "compile", key) or {}
            shown += [
                {"Arm": text(arm.get("name")), "What": what, "Times": count(times), "Where and why": text(cause)}
                for cause, times in list(counts.items())[:MOST_SHORTFALLS]
            ]
    return Table(rows=shown, kinds={"Arm": "arm", "What": "words", "Where and why": "code"})
