"""Tables with a column for each arm: figures side by side, start-up, parity, and what the compiler could not do."""

from __future__ import annotations

from functools import partial

from analysis.report.tables import Figure, Shown, Table, figures_of
from analysis.report.values import (
    DASH,
    byte_size,
    count,
    milliseconds,
    percent,
    rate,
    seconds,
    text,
)
from analysis.settings.metrics import EMBED, EMBED_METRICS, METRIC_NAMES
from analysis.summary.model import Arm, Startup, Summary

MOST_SHORTFALLS = 8
# A step's size as events and start-up items word it.
_START_MEMORY = {
    "weights": "weights",
    "quantised_weights": "of which quantised",
    "kv_cache": "KV cache",
    "graph_pools": "CUDA graphs",
    "device_peak": "device, peak",
    "process_peak": "host process, peak",
}
_PEAK_MEMORY = {
    "device": "process on its card",
    "card": "all of its card",
    "reserved": "kept by the allocator",
    "process": "process on the host",
    "engine": "engine on the host",
}


def arms_of(summary: Summary) -> list[Arm]:
    """The arms, the control first."""
    return sorted(summary.arms, key=lambda arm: not arm.control)


def arm_names(summary: Summary) -> list[str]:
    """Names of all arms, the control first, then those that only gates or comparisons name."""
    named = [arm.name for arm in arms_of(summary)]
    named += [gate.arm for gate in summary.gates] + [item.arm for item in summary.comparisons]
    return list(dict.fromkeys(named))


def metric_names(summary: Summary) -> dict[str, str]:
    """What a reader calls each metric that the run's requests have, in order."""
    return {key: name for key, name in METRIC_NAMES.items() if key in EMBED_METRICS or summary.task != EMBED}


def side_by_side(summary: Summary) -> list[Figure]:
    """Figures of traffic, compiles, padding and memory, a value for every arm in the order of `arms_of`."""
    compiles = "Compiles while serving"
    unit = "sentences" if summary.task == EMBED else "request rate"
    shown: list[Shown] = [
        ("Traffic", "requests", count, lambda arm: arm.requests),
        ("Traffic", "failed", count, lambda arm: arm.failed or None),
        ("Traffic", "error rate", percent, lambda arm: arm.error_pct),
        ("Traffic", unit, rate, lambda arm: arm.request_rate),
        ("Traffic", "output tokens", rate, lambda arm: arm.output_token_rate),
        ("Traffic", "goodput", rate, lambda arm: arm.goodput_rps),
        (compiles, "events", count, lambda arm: arm.compile.serving_events),
        (compiles, "recompiles", count, lambda arm: arm.compile.recompiles),
        (compiles, "JIT compiles of kernels", count, lambda arm: arm.compile.jit_compiles or None),
        (compiles, "graph captures", count, lambda arm: arm.compile.graph_captures or None),
        (compiles, "limit hits", count, lambda arm: arm.compile.limit_hits or None),
        (compiles, "ran eager after the limit", percent, lambda arm: arm.compile.eager_fallback_pct),
        (compiles, "longest stall", seconds, lambda arm: arm.compile.longest_stall_s),
        (compiles, "stall time per minute", seconds, lambda arm: arm.compile.stall_s_per_min),
        (compiles, "requests hit", count, lambda arm: arm.compile.requests_hit),
        (compiles, "share of requests hit", percent, lambda arm: arm.compile.requests_hit_pct),
        (compiles, "in the background", seconds, lambda arm: arm.compile.background_s or None),
        ("Padding", "of all positions", percent, lambda arm: arm.padding.waste_pct),
        ("Padding", "of prefill", percent, lambda arm: arm.padding.prefill_waste_pct),
        ("Padding", "of decode", percent, lambda arm: arm.padding.decode_waste_pct),
        *(("Memory, peak", name, byte_size, partial(_memory, key=key)) for key, name in _PEAK_MEMORY.items()),
    ]
    return [row for row in figures_of(arms_of(summary), shown) if row.known]


# --- Start-up ---------------------------------------------------------------------------------------------------------


def startup_costs(summary: Summary) -> list[Figure]:
    """What each arm cost before its first request: time, compiling, memory."""
    compiling = "Compiling in the warm-up"
    shown: list[Shown] = [
        ("Time", "to serving", _duration, lambda start: start.serving_s),
        ("Time", "load", _duration, lambda start: start.load_s),
        ("Time", "warm-up", _duration, lambda start: start.warmup_s),
        (compiling, "compiles", count, lambda start: start.compiles),
        (compiling, "compile time", _duration, lambda start: start.compile_s),
        (compiling, "disk cache", str, lambda start: _cache_state(start.cache or {})),
        (compiling, "artifact", text, lambda start: start.artifact),
        *(("Memory", name, byte_size, partial(_memory, key=key)) for key, name in _START_MEMORY.items()),
    ]
    nothing = (DASH, _duration(0), count(0), byte_size(0))
    figures = figures_of([arm.startup for arm in arms_of(summary)], shown)
    return [row for row in figures if not all(value in nothing for value in row.values)]


def _memory(row: Arm | Startup, key: str) -> object:
    return row.memory_bytes.get(key)


def _duration(value: object) -> str:
    return milliseconds(value * 1e3) if isinstance(value, int | float) and value else seconds(value)


def _cache_state(counts: dict[str, int]) -> str:
    """ "cold" when nothing was found, "warm" when everything was, else how much of each."""
    if not any(counts.values()):
        return DASH
    hit, miss = counts.get("hit", 0), counts.get("miss", 0)
    if not hit:
        return "cold" if miss else "bypassed"
    total = sum(counts.values())
    return "warm" if hit == total else f"{count(hit)} of {count(total)} found"


def shortfalls(summary: Summary) -> Table:
    """Graph breaks and CUDA graphs that were not made, the most frequent of each arm, as the summary sorts them."""
    shown = []
    for arm in arms_of(summary):
        parts = {"graph break": arm.compile.graph_breaks, "no CUDA graph": arm.compile.cudagraph_skips}
        for what, counts in parts.items():
            shown += [
                {"Arm": text(arm.name), "What": what, "Times": count(times), "Where and why": text(cause)}
                for cause, times in list((counts or {}).items())[:MOST_SHORTFALLS]
            ]
    return Table(rows=shown, kinds={"Arm": "arm", "What": "words", "Where and why": "code"})
