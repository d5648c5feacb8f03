"""Two summaries with the shape of real ones: `demo` (90 s: FAIL and INCONCLUSIVE) and `rollout` (40 min: PASS).

Latencies come from a small queue simulation, so that lines, quantiles, spikes and events agree with each other.
Run `python -m tests.golden.synthetic` to write the golden files again after a wanted change.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent
START_NS = 1_763_712_000_000_000_000
QUANTILES = {"p50_ms": 0.5, "p90_ms": 0.9, "p95_ms": 0.95, "p99_ms": 0.99, "p99_9_ms": 0.999}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A compile that stops one arm's device from `start_s` to `end_s`."""

    start_s: float
    end_s: float
    kind: str
    shape: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One simulated request: when it was due, how long it took, what it produced. Latencies in ms."""

    at_s: float
    ttft: float
    e2e: float
    output_tokens: int
    gap: float
    stalled: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What makes one simulated arm: costs in ms, padding shares, and the stalls of every trial."""

    name: str
    preset: str
    control: bool = False
    prefill_ms: float = 18.0
    prefill_token_ms: float = 0.55
    decode_ms: float = 24.0
    prefill_waste: float = 0.0
    decode_waste: float = 0.0
    warmup: tuple[int, float] = (0, 0.0)
    load_s: float = 0.9
    warmed: tuple[tuple[str, float], ...] = ()  # the shapes of the warm-up and their seconds, slowest first
    graph_breaks: dict[str, int] = field(default_factory=dict)
    cudagraph_skips: dict[str, int] = field(default_factory=dict)
    stalls: dict[int, tuple[Stall, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One planned request."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


def _schedule(rng: random.Random, duration_s: float, rate: float) -> list[Planned]:
    planned, now = [], 0.0
    while True:
        now += rng.expovariate(rate)
        if now >= duration_s:
            return planned
        planned.append(
            Planned(
                at_s=now,
                prompt_tokens=max(4, min(192, round(rng.lognormvariate(4.33, 0.9)))),
                output_tokens=max(2, min(48, round(rng.lognormvariate(2.72, 0.8)))),
            )
        )


def _advance(start_s: float, work_s: float, stalls: tuple[Stall, ...]) -> float:
    """When `work_s` of device time that may begin at `start_s` is done: the device does nothing during a stall."""
    now, left = start_s, work_s
    for stall in stalls:
        if now >= stall.end_s:
            continue
        if now + left <= stall.start_s:
            break
        left -= max(0.0, stall.start_s - now)
        now = stall.end_s
    return now + left


def _overlap_s(stall: Stall, start_s: float, end_s: float) -> float:
    return max(0.0, min(end_s, stall.end_s) - max(start_s, stall.start_s))


def _serve(policy: Policy, planned: list[Planned], stalls: tuple[Stall, ...], rng: random.Random) -> list[Served]:
    served, device_free = [], 0.0
    for request in planned:
        prefill_s = (policy.prefill_ms + policy.prefill_token_ms * request.prompt_tokens) / 1e3 * rng.uniform(0.9, 1.2)
        first = _advance(max(request.at_s, device_free), prefill_s, stalls)
        device_free = first
        step_s = policy.decode_ms / 1e3 * rng.lognormvariate(0, 0.15)
        end = _advance(first, step_s * (request.output_tokens - 1), stalls)
        served.append(
            Served(
                at_s=request.at_s,
                ttft=(first - request.at_s) * 1e3,
                e2e=(end - request.at_s) * 1e3,
                output_tokens=request.output_tokens,
                gap=step_s * 1e3 + max((_overlap_s(stall, first, end) * 1e3 for stall in stalls), default=0.0),
                stalled=tuple(i for i, stall in enumerate(stalls) if _overlap_s(stall, request.at_s, end) > 0),
            )
        )
    return served


def _quantile(ordered: list[float], q: float) -> float:
    position = q * (len(ordered) - 1)
    low = math.floor(position)
    return ordered[low] + (ordered[min(low + 1, len(ordered) - 1)] - ordered[low]) * (position - low)


def _metric(values: list[float]) -> dict[str, Any]:
    ordered = sorted(values)
    if not ordered:
        return {"n": 0, **dict.fromkeys(QUANTILES), "max_ms": None, "mean_ms": None}
    figures: dict[str, Any] = {"n": len(ordered)}
    figures |= {key: round(_quantile(ordered, q), 2) for key, q in QUANTILES.items()}
    return figures | {"max_ms": round(ordered[-1], 2), "mean_ms": round(sum(ordered) / len(ordered), 2)}


def _metrics(served: list[Served]) -> dict[str, Any]:
    tpot = [(s.e2e - s.ttft) / (s.output_tokens - 1) for s in served]
    return {
        "ttft": _metric([s.ttft for s in served]),
        "e2e": _metric([s.e2e for s in served]),
        "tpot": _metric(tpot),
        "itl": _metric([value for value, s in zip(tpot, served, strict=True) for _ in range(s.output_tokens - 1)]),
        "max_itl": _metric([s.gap for s in served]),
    }


def _series(trial: int, served: list[Served], duration_s: float, bin_s: float) -> list[dict[str, Any]]:
    rows = []
    for index in range(math.ceil(duration_s / bin_s)):
        inside = [s for s in served if index * bin_s <= s.at_s < (index + 1) * bin_s]
        if not inside:
            continue
        ttft, e2e = sorted(s.ttft for s in inside), sorted(s.e2e for s in inside)
        rows.append(
            {
                "trial": trial,
                "t_s": index * bin_s,
                "n": len(inside),
                "ttft_p50_ms": round(_quantile(ttft, 0.5), 1),
                "ttft_p99_ms": round(_quantile(ttft, 0.99), 1),
                "e2e_p50_ms": round(_quantile(e2e, 0.5), 1),
                "e2e_p99_ms": round(_quantile(e2e, 0.99), 1),
                "e2e_max_ms": round(e2e[-1], 1),
                "failed": 0,
            }
        )
    return rows


def _distribution(values: list[float]) -> dict[str, Any]:
    ordered, n = sorted(values), len(values)
    edges = [round(10 ** (1 + step / 12), 2) for step in range(12 * 4 + 1)]
    ladder = []
    for q in QUANTILES.values():
        spread = 1.96 * math.sqrt(q * (1 - q) / n)
        low = _quantile(ordered, max(0.0, q - spread))
        high = _quantile(ordered, q + spread) if q + spread < 1 else None
        ladder.append([q, round(_quantile(ordered, q), 1), round(low, 1), None if high is None else round(high, 1)])
    counts = [sum(low <= value < high for value in ordered) for low, high in pairwise(edges)]
    return {"edges_ms": edges, "counts": counts, "ecdf": ladder}


def _trial_start_ns(trial: int, duration_s: float) -> int:
    return START_NS + round((trial - 1) * (duration_s + 45) * 1e9)


def _events(policy: Policy, trial: int, served: list[Served], duration_s: float) -> list[dict[str, Any]]:
    zero = _trial_start_ns(trial, duration_s)
    events = []
    for index, stall in enumerate(policy.stalls.get(trial, ())):
        hit = [f"{trial}-{position}-{policy.name}" for position, s in enumerate(served) if index in s.stalled]
        seconds = stall.end_s - stall.start_s
        events.append(
            {
                "event_id": f"{policy.name}-0/{trial}/{index}",
                "trial": trial,
                "arm": policy.name,
                "replica": f"{policy.name}-0",
                "kind": stall.kind,
                "start_ns": zero + round(stall.start_s * 1e9),
                "end_ns": zero + round(stall.end_s * 1e9),
                "compile_id": f"0/{index + 1}",
                "frame": "forward transformers/models/llama/modeling_llama.py:412",
                "reason": stall.reason,
                "shape": stall.shape,
                "dynamic": False,
                "cache": "miss",
                "batch_id": 40 + 31 * index,
                "request_ids": hit[:50],
                "request_count": len(hit),
                "backend_ns": round(seconds * 0.72e9),
                "phase": "serving",
                "seconds": round(seconds, 3),
                "requests_hit": len(hit),
                "offset_s": round(stall.start_s, 3),
            }
        )
    return events


def _spikes(policy: Policy, events: list[dict[str, Any]], trial: int, served: list[Served]) -> list[dict[str, Any]]:
    spikes = []
    for index, event in enumerate(events):
        hit = [s for s in served if index in s.stalled]
        if hit:
            spikes.append(
                {
                    "arm": policy.name,
                    "trial": trial,
                    "start_ns": event["start_ns"] + round((min(s.at_s for s in hit) - event["offset_s"]) * 1e9),
                    "end_ns": event["end_ns"],
                    "metric": "e2e",
                    "peak_ms": round(max(s.e2e for s in hit), 1),
                    "requests": len(hit),
                    "cause": "recompiled" if len(hit) < 14 else "queued behind a compile",
                    "event_ids": [event["event_id"]],
                    "explained_pct": round(min(100.0, 100 * event["seconds"] * 1e3 / max(s.e2e for s in hit)), 1),
                }
            )
    return spikes


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """All arms of one simulated run over the same schedules."""

    policies: tuple[Policy, ...]
    duration_s: float
    trials: int
    rate: float
    bin_s: float
    seed: int


def _without(served: list[Served], stalls: tuple[Stall, ...], key: str) -> list[float]:
    """Latencies with the time that a compile took away given back."""
    rest = []
    for request in served:
        latency = getattr(request, key)
        end_s = request.at_s + latency / 1e3
        rest.append(max(20.0, latency - sum(_overlap_s(stall, request.at_s, end_s) for stall in stalls) * 1e3))
    return rest


def _arm(
    policy: Policy, run: Simulation, trials: dict[int, list[Served]], events: list[dict[str, Any]]
) -> dict[str, Any]:
    served = [s for requests in trials.values() for s in requests]
    cold = [s for s in served if s.at_s < 30]
    steady = [s for s in served if not s.stalled and s.at_s >= 30]
    total_s = run.duration_s * run.trials
    hit = sum(bool(s.stalled) for s in served)
    stall_s = sum(event["seconds"] for event in events)
    tokens = sum(s.output_tokens for s in served) + 92 * len(served)
    metrics = _metrics(served)
    counterfactual = {
        key: round(
            _quantile(
                sorted(v for t, requests in trials.items() for v in _without(requests, policy.stalls.get(t, ()), key)),
                0.99,
            ),
            1,
        )
        for key in ("ttft", "e2e")
    }
    explained = {
        key: round(100 * (1 - counterfactual[key] / metrics[key]["p99_ms"]), 1) if events else None
        for key in ("ttft", "e2e")
    }
    waste = (2 * policy.prefill_waste + policy.decode_waste) / 3
    return {
        "name": policy.name,
        "preset": policy.preset,
        "control": policy.control,
        "requests": len(served),
        "ok": len(served),
        "failed": 0,
        "cancelled": 0,
        "error_pct": 0.0,
        "output_tokens": sum(s.output_tokens for s in served),
        "request_rate": round(len(served) / total_s, 3),
        "output_token_rate": round(sum(s.output_tokens for s in served) / total_s, 2),
        "goodput_rps": round(sum(s.ttft <= 2000 and s.e2e <= 6000 for s in served) / total_s, 3),
        "metrics": metrics,
        "steady": _metrics(steady),
        "cold": _metrics(cold),
        "compile": {
            "warmup_events": policy.warmup[0],
            "warmup_s": policy.warmup[1],
            "serving_events": len(events),
            "recompiles": sum(event["kind"] == "recompile" for event in events),
            "cold": {"recompiles": sum(_is_cold_recompile(event) for event in events)},
            "steady": {
                "recompiles": sum(event["kind"] == "recompile" and not _is_cold_recompile(event) for event in events)
            },
            "graph_captures": sum(event["kind"] == "graph_capture" for event in events),
            "limit_hits": sum(event["kind"] == "limit_hit" for event in events),
            "eager_fallback_pct": 0.0 if policy.preset != "eager" else None,
            "longest_stall_s": max((event["seconds"] for event in events), default=0.0),
            "stall_s": round(stall_s, 3),
            "stall_s_per_min": round(stall_s / total_s * 60, 3),
            "requests_hit": hit,
            "requests_hit_pct": round(100 * hit / len(served), 2),
            "p99_ttft_ms_without": counterfactual["ttft"] if events else None,
            "p99_e2e_ms_without": counterfactual["e2e"] if events else None,
            "p99_e2e_explained_pct": explained["e2e"],
            "p99_ttft_explained_pct": explained["ttft"],
            "graph_breaks": policy.graph_breaks,
            "cudagraph_skips": policy.cudagraph_skips,
        },
        "padding": {
            "tokens": tokens,
            "padded_tokens": round(tokens / (1 - waste)),
            "waste_pct": round(100 * waste, 1),
            "prefill_waste_pct": round(100 * policy.prefill_waste, 1),
            "decode_waste_pct": round(100 * policy.decode_waste, 1),
        },
        "startup": _startup(policy),
        "deaths": 0,
        "verdict": None,
    }


def _is_cold_recompile(event: dict[str, Any]) -> bool:
    return event["kind"] == "recompile" and event["offset_s"] < 30


def _startup(policy: Policy) -> dict[str, Any]:
    compiles, compile_s = policy.warmup
    parts = {part: sum(s for item, s in policy.warmed if item.startswith(part)) for part in ("prefill", "decode")}
    before_s, other_s = 4.12, 0.04
    whole = before_s + policy.load_s + sum(parts.values()) + other_s
    return {
        "serving_s": round(whole, 3),
        "process_s": before_s,
        "load_s": policy.load_s,
        "warmup_s": round(sum(parts.values()), 3),
        **{f"{part}_s": round(spent_s, 3) for part, spent_s in parts.items()},
        "extend_s": None,
        "capture_s": None,
        "other_s": other_s,
        "compiles": compiles,
        "compile_s": compile_s,
        "backend_s": round(0.86 * compile_s, 3),
        "autotune_s": 0.0,
        "recording_s": 0.0,
        "cache": {"hit": 0, "miss": compiles, "bypass": 0},
        "slowest": [{"item": item, "s": spent_s} for item, spent_s in policy.warmed[:5]],
        "memory_bytes": {"weights": 6_815_744, "kv_cache": 3_932_160, "process_peak": 604_110_848},
    }


PARTS = {"steady": "steady", "cold": "cold", "all": "metrics"}
METRICS = ("ttft", "e2e", "tpot", "itl", "max_itl")


def _comparison(
    arm: dict[str, Any], control: dict[str, Any], metric: str, phase: str, **figures: Any
) -> dict[str, Any]:
    ratio = arm[PARTS[phase]][metric]["p99_ms"] / control[PARTS[phase]][metric]["p99_ms"]
    spread = figures.pop("spread")
    gate = phase == "steady"
    judged = {} if gate else {"margin": None, "verdict": None, "needed_s": None}
    return {
        "arm": arm["name"],
        "control": control["name"],
        "metric": metric,
        "quantile": 0.99,
        "gate": gate,
        "ratio": round(ratio, 4),
        "low": round(ratio * math.exp(-1.96 * spread), 4),
        "high": round(ratio * math.exp(1.96 * spread), 4),
        "margin": 0.10,
        "method": "paired block label swap",
        "phase": phase,
        **figures,
        **judged,
    }


def _beside(
    arm: dict[str, Any], control: dict[str, Any], known: list[dict[str, Any]], blocks: int, spread: float
) -> list[dict[str, Any]]:
    """All other ratios of the arm: every phase, metric and quantile that is not in `known`. A cold start is a block."""
    taken = {(row["phase"], row["metric"], row["quantile"]) for row in known if row["arm"] == arm["name"]}
    found = []
    for phase, part in PARTS.items():
        for metric in METRICS:
            for key, quantile in QUANTILES.items():
                above, below = arm[part][metric][key], control[part][metric][key]
                if (phase, metric, quantile) in taken or not above or not below:
                    continue
                ratio = above / below
                wide = spread * (0.5 + quantile**20)
                limits = (ratio * math.exp(-1.96 * wide), ratio * math.exp(1.96 * wide)) if phase != "cold" else None
                found.append(
                    {
                        "arm": arm["name"],
                        "control": control["name"],
                        "metric": metric,
                        "quantile": quantile,
                        "gate": False,
                        "ratio": round(ratio, 4),
                        "low": round(limits[0], 4) if limits else None,
                        "high": round(limits[1], 4) if limits else None,
                        "margin": None,
                        "method": "paired block bootstrap",
                        "phase": phase,
                        "blocks": blocks if phase != "cold" else 1,
                        "verdict": None,
                        "reason": f"{metric} is {ratio:.2f} times that of {control['name']}.",
                    }
                )
    return found


def _rates(arm: dict[str, Any], control: dict[str, Any], spread: float) -> list[dict[str, Any]]:
    found = []
    for rate, key in (("goodput", "goodput_rps"), ("requests", "request_rate"), ("output tokens", "output_token_rate")):
        ratio = arm[key] / control[key]
        shares = [100.0 * row[key] / row["request_rate"] if rate == "goodput" else None for row in (arm, control)]
        found.append(
            {
                "arm": arm["name"],
                "control": control["name"],
                "rate": rate,
                "value": arm[key],
                "control_value": control[key],
                "share_pct": shares[0],
                "control_share_pct": shares[1],
                "ratio": round(ratio, 4),
                "low": round(ratio * math.exp(-1.96 * spread), 4),
                "high": round(ratio * math.exp(1.96 * spread), 4),
                "method": "t over groups of blocks",
                "gate": False,
                "min_ratio": None,
            }
        )
    return found


def _gate(
    arm: str, gate: str, kind: str, value: float | None, limit: float, unit: str, verdict: str, reason: str
) -> dict[str, Any]:
    return {
        "arm": arm,
        "gate": gate,
        "kind": kind,
        "value": value,
        "limit": limit,
        "unit": unit,
        "verdict": verdict,
        "reason": reason,
    }


def _check(name: str, ok: bool, value: float | None, limit: float | None, reason: str, **more: Any) -> dict[str, Any]:
    return {
        "check": name,
        "ok": ok,
        "value": value,
        "limit": limit,
        "reason": reason,
        "affects": [],
        "arm": None,
        "remedy": "",
        **more,
    }


def _design(run: Simulation, planned: int, lag_ms: float) -> dict[str, Any]:
    return {
        "design": "mirrored",
        "duration_s": run.duration_s,
        "trials": run.trials,
        "block_s": 30,
        "blocks": int(run.duration_s / 30) * run.trials,
        "planned": planned,
        "open_loop": True,
        "generator_lag_p99_ms": lag_ms,
    }


def _simulate(run: Simulation) -> dict[str, Any]:
    """Arms, events, spikes, series and distribution of a run, without its judgement."""
    rng = random.Random(run.seed)
    schedules = {trial: _schedule(rng, run.duration_s, run.rate) for trial in range(1, run.trials + 1)}
    arms, events, spikes = [], [], []
    series: dict[str, list[dict[str, Any]]] = {}
    distribution: dict[str, dict[str, Any]] = {"ttft": {}, "e2e": {}}
    for policy in run.policies:
        trials = {t: _serve(policy, plan, policy.stalls.get(t, ()), rng) for t, plan in schedules.items()}
        mine = {t: _events(policy, t, served, run.duration_s) for t, served in trials.items()}
        arms.append(_arm(policy, run, trials, [event for group in mine.values() for event in group]))
        for trial, served in trials.items():
            series.setdefault(policy.name, []).extend(_series(trial, served, run.duration_s, run.bin_s))
            spikes.extend(_spikes(policy, mine[trial], trial, served))
            events.extend(mine[trial])
        everything = [s for served in trials.values() for s in served]
        for metric in ("ttft", "e2e"):
            distribution[metric][policy.name] = _distribution([getattr(s, metric) for s in everything])
    events.sort(key=lambda event: -event["seconds"])
    return {
        "schema": 1,
        "control": run.policies[0].name,
        "arms": arms,
        "spikes": spikes,
        "events": events,
        "series": {"bin_s": run.bin_s, "arms": series},
        "distribution": {"metrics": distribution},
        "planned": sum(len(plan) for plan in schedules.values()) * len(run.policies),
    }


def _environment() -> dict[str, Any]:
    return {
        "python": "3.11.11",
        "platform": "Linux 6.1 x86_64",
        "versions": {"tailgate": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0", "locust": "2.47.0"},
        "git_commit": "4b1f0c6e2a7d5f8091b3c4d5e6f708192a3b4c5d",
        "cpu": {"model": "AMD EPYC 7R13", "count": 2, "usable": 2},
        "memory_bytes": 25_769_803_776,
        "gpus": [],
        "clock": {"source": "CLOCK_MONOTONIC + anchor"},
    }


NAIVE_STALLS = (
    Stall(
        start_s=6.31,
        end_s=15.26,
        kind="recompile",
        shape="prefill [1, 137]",
        reason="0/0: tensor 'input_ids' size mismatch at index 1. expected 52, actual 137",
    ),
    Stall(
        start_s=21.87,
        end_s=25.12,
        kind="recompile",
        shape="prefill [1, 64] (mark_dynamic)",
        reason="0/1: 16 <= L['input_ids'].size()[1]  # attn_mask = prepare_mask(input_ids, cache)\n"
        "0/0: tensor 'input_ids' size mismatch at index 1. expected 52, actual 64",
    ),
    Stall(
        start_s=33.4,
        end_s=38.61,
        kind="recompile",
        shape="decode [3, 1]",
        reason="1/0: tensor 'input_ids' size mismatch at index 0. expected 2, actual 3",
    ),
    Stall(
        start_s=47.02,
        end_s=51.19,
        kind="recompile",
        shape="decode [5, 1]",
        reason="1/1: L['position_ids'].size()[0] <= 4  # rotary = self.rotary_emb(hidden, position_ids)",
    ),
    Stall(
        start_s=61.55,
        end_s=67.98,
        kind="recompile",
        shape="prefill [1, 192]",
        reason="0/2: L['input_ids'].size()[1] <= 160  # self.cache.update(keys, values, rows)",
    ),
    Stall(
        start_s=77.2,
        end_s=80.33,
        kind="recompile",
        shape="decode [8, 1]",
        reason="1/2: Eq(s0, 8): duck-shaped with the number of heads (8); guard added by "
        "`assert hidden.shape[0] != self.num_heads` in attention forward",
    ),
)


EAGER_WARMED = (
    ("prefill batch 1 × length 191, context 191", 0.09),
    ("prefill batch 1 × length 65, context 65", 0.05),
    ("decode batch 4 × length 1, context 239", 0.03),
)


def demo_summary() -> dict[str, Any]:
    """Ninety seconds: `compiled-naive` fails on recompiles, `compiled-padded` stays open for want of blocks."""
    run = Simulation(
        policies=(
            Policy(name="eager", preset="eager", control=True, warmed=EAGER_WARMED),
            Policy(
                name="compiled-padded",
                preset="compiled-padded",
                prefill_ms=62.0,
                prefill_token_ms=0.05,
                decode_ms=18.5,
                prefill_waste=0.583,
                decode_waste=0.412,
                warmup=(2, 14.62),
                warmed=(
                    ("prefill batch 1 × length 192, context 192", 8.64),
                    ("decode batch 4 × length 1, context 240", 6.11),
                ),
                cudagraph_skips={"no CUDA device": 2},
            ),
            Policy(
                name="compiled-naive",
                preset="compiled-naive",
                prefill_token_ms=0.42,
                decode_ms=19.0,
                warmup=(2, 11.3),
                warmed=(
                    ("prefill batch 1 × length 5, context 5", 6.9),
                    ("decode batch 1 × length 1, context 6", 4.52),
                ),
                graph_breaks={
                    "house/modeling_house.py:212 in forward: Failed to trace builtin operator (builtin print)": 9,
                    "house/modeling_house.py:87 in rotate: Unsupported Tensor.item() call": 2,
                },
                stalls={1: NAIVE_STALLS},
            ),
        ),
        duration_s=90,
        trials=1,
        rate=2.0,
        bin_s=1.0,
        seed=20231116,
    )
    found = _simulate(run)
    eager, padded, naive = found["arms"]
    comparisons = [
        _comparison(
            arm,
            eager,
            metric,
            phase,
            spread=spread,
            p_worse=worse,
            p_noninferior=noninferior,
            blocks=3,
            trials=1,
            verdict="INCONCLUSIVE",
            reason="3 blocks; 20 are needed to judge p99",
            needed_s=1260 if phase == "steady" else None,
        )
        for arm, metric, phase, spread, worse, noninferior in (
            (padded, "ttft", "steady", 0.21, 0.75, 0.25),
            (padded, "e2e", "steady", 0.16, 1.0, 0.125),
            (padded, "ttft", "all", 0.19, 0.75, 0.25),
            (padded, "e2e", "all", 0.15, 1.0, 0.125),
            (naive, "ttft", "steady", 0.27, 0.625, 0.25),
            (naive, "e2e", "steady", 0.22, 0.75, 0.25),
            (naive, "ttft", "all", 0.34, 0.125, 1.0),
            (naive, "e2e", "all", 0.31, 0.125, 1.0),
        )
    ]
    for arm in (padded, naive):
        comparisons += _beside(arm, eager, comparisons, 3, 0.2)
    gates = []
    for arm in (padded, naive):
        name, stall, events = arm["name"], arm["compile"], arm["compile"]["serving_events"]
        waited = f"{stall['requests_hit']} of {arm['requests']} requests waited for a compile"
        for comparison in (c for c in comparisons if c["arm"] == name and c["gate"]):
            gates.append(
                _gate(
                    name,
                    f"noninferiority p99_{comparison['metric']}",
                    "noninferiority",
                    comparison["ratio"],
                    1.10,
                    "ratio",
                    "INCONCLUSIVE",
                    comparison["reason"],
                )
            )
        for metric, limit in (("ttft", 2000), ("e2e", 6000)):
            value = arm["metrics"][metric]["p99_ms"]
            verdict = "FAIL" if value > limit * 1.2 else "INCONCLUSIVE"
            reason = (
                f"p99 {value:,.0f} ms is over {limit:,} ms, and so is the whole interval"
                if verdict == "FAIL"
                else f"p99 {value:,.0f} ms is inside {limit:,} ms, but 3 blocks cannot carry a PASS"
            )
            gates.append(_gate(name, f"slo p99_{metric}", "slo", value, limit, "ms", verdict, reason))
        for gate, value, limit, unit, reason in (
            ("recompiles", events, 0, "count", f"{events} compiles while serving"),
            ("longest stall", stall["longest_stall_s"], 1.0, "s", "longest compile that requests waited for"),
            ("stall per minute", stall["stall_s_per_min"], 0.5, "s", "compile stalls a minute of traffic"),
            ("requests hit", stall["requests_hit_pct"], 1.0, "pct", waited),
        ):
            gates.append(
                _gate(name, gate, "recompile", value, limit, unit, "FAIL" if value > limit else "PASS", reason)
            )
        gates.append(_gate(name, "errors", "error", 0.0, 0.5, "pct", "PASS", "no request failed"))
    padded["verdict"], naive["verdict"] = "INCONCLUSIVE", "FAIL"
    stall = naive["compile"]
    planned = found.pop("planned")
    return found | {
        "name": "demo",
        "run_id": "20251121-080000-demo",
        "created": "2025-11-21T08:00:00Z",
        "overall": "FAIL",
        "exit_code": 99,
        "headline": f"compiled-naive must not replace eager: it recompiled {stall['recompiles']} times while serving, "
        f"the longest for {stall['longest_stall_s']:.1f} s, and {stall['requests_hit']} of {naive['requests']} "
        "requests waited for it. "
        "compiled-padded did not recompile, but 90 s cannot carry a verdict on p99.",
        "comparisons": comparisons,
        "rates": [row for arm in (padded, naive) for row in _rates(arm, eager, 0.02)],
        "gates": gates,
        "validity": [
            _check("run length", False, 3, 20, "The run has 3 blocks of 30 s; 20 are needed.", affects=["slo"]),
            *(
                _check(
                    "blocks",
                    False,
                    3,
                    20,
                    f"{name} can be compared over 3 steady blocks of 30 s; 20 are needed.",
                    arm=name,
                    affects=["noninferiority"],
                )
                for name in ("compiled-padded", "compiled-naive")
            ),
            _check("arms present and equal", True, 3, 3, "every arm received every planned request"),
            _check(
                "generator lag",
                True,
                2.4,
                50,
                "1 % of the requests were sent 2.4 ms late or more.",
                affects=["noninferiority", "slo"],
            ),
            _check("open loop", True, None, None, "requests start on schedule"),
            _check("interference", True, 1.08, 1.25, "eager during compiled-naive's compiles, against the rest"),
        ],
        "design": _design(run, planned, 2.4),
        "advice": {
            "needed_s": 1260,
            "text": "Run compiled-padded for 21 minutes or more (42 blocks) to decide p99 TTFT and E2E at a margin of "
            "10 %. compiled-naive needs no longer run: warm its shapes, or pad them.",
        },
        "environment": _environment(),
    }


def rollout_summary() -> dict[str, Any]:
    """Forty minutes in two trials: `compiled-bucketed` passes every gate."""
    run = Simulation(
        policies=(
            Policy(name="eager", preset="eager", control=True, warmed=EAGER_WARMED),
            Policy(
                name="compiled-bucketed",
                preset="compiled-bucketed",
                prefill_ms=20.0,
                prefill_token_ms=0.36,
                decode_ms=18.0,
                prefill_waste=0.171,
                decode_waste=0.122,
                warmup=(12, 71.4),
                warmed=tuple(
                    (f"{step} batch {batch} × length {length}, context {context}", round(9.2 - 0.53 * place, 2))
                    for place, (step, batch, length, context) in enumerate(
                        [("prefill", 1, size, size) for size in (192, 128, 64, 32)]
                        + [("decode", batch, 1, size) for size in (240, 128) for batch in (4, 3, 2, 1)]
                    )
                ),
            ),
        ),
        duration_s=1200,
        trials=2,
        rate=2.0,
        bin_s=20.0,
        seed=7,
    )
    found = _simulate(run)
    eager, bucketed = found["arms"]
    comparisons = [
        _comparison(
            bucketed,
            eager,
            metric,
            phase,
            spread=0.05,
            p_worse=1.0,
            p_noninferior=0.0001,
            blocks=80,
            trials=2,
            verdict="PASS",
            reason="the whole interval is under the margin",
            needed_s=None,
        )
        for phase in ("steady", "all")
        for metric in ("ttft", "e2e")
    ]
    comparisons += _beside(bucketed, eager, comparisons, 80, 0.05)
    name, inside = bucketed["name"], "the whole interval is inside the limit"
    gates = [
        _gate(
            name, f"noninferiority p99_{c['metric']}", "noninferiority", c["ratio"], 1.10, "ratio", "PASS", c["reason"]
        )
        for c in comparisons
        if c["gate"]
    ]
    gates += [
        _gate(name, f"slo p99_{metric}", "slo", bucketed["metrics"][metric]["p99_ms"], limit, "ms", "PASS", inside)
        for metric, limit in (("ttft", 2000), ("e2e", 6000))
    ]
    gates += [
        _gate(name, "recompiles", "recompile", 0, 0, "count", "PASS", "no compile while serving"),
        _gate(name, "longest stall", "recompile", 0.0, 1.0, "s", "PASS", "no request waited for a compile"),
        _gate(name, "errors", "error", 0.0, 0.5, "pct", "PASS", "no request failed"),
    ]
    bucketed["verdict"] = "PASS"
    planned = found.pop("planned")
    return found | {
        "name": "rollout",
        "run_id": "20251121-080000-rollout",
        "created": "2025-11-21T08:00:00Z",
        "overall": "PASS",
        "exit_code": 0,
        "headline": "compiled-bucketed may replace eager: no compile while serving, and p99 TTFT and E2E stay inside "
        "the margin of 10 %.",
        "comparisons": comparisons,
        "rates": _rates(bucketed, eager, 0.004),
        "gates": gates,
        "validity": [
            _check("blocks", True, 80, 20, "80 blocks of 30 s"),
            _check("generator lag", True, 2.1, 50, "p99 of the load generator's own delay, ms"),
        ],
        "design": _design(run, planned, 2.1),
        "advice": {"needed_s": None, "text": "Nothing is open."},
        "environment": _environment(),
    }


SUMMARIES = {"demo": demo_summary, "rollout": rollout_summary}


def encoded(summary: dict[str, Any]) -> str:
    """`summary` as the golden file holds it: indented, but with one line for each innermost list or record."""
    lines = []
    for key in sorted(summary):
        value = summary[key]
        if isinstance(value, list):
            body = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in value)
            lines.append(f'"{key}": [\n{body}\n]' if value else f'"{key}": []')
        else:
            lines.append(f'"{key}": {json.dumps(value, ensure_ascii=False)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    """All golden files are as today's code writes them."""
    from analysis.report.junit import junit_xml
    from analysis.report.markdown import markdown_report

    for name, make in SUMMARIES.items():
        folder = GOLDEN / name
        folder.mkdir(exist_ok=True)
        summary = make()
        (folder / "summary.json").write_text(encoded(summary), encoding="utf-8", newline="\n")
        (folder / "report.md").write_text(markdown_report(summary), encoding="utf-8", newline="\n")
        (folder / "junit.xml").write_text(junit_xml(summary), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
