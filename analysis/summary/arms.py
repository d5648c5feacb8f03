"""What one arm did: requests, latencies, compiles, padding and start-up, as a row of the summary."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailgate.analysis.arrays import Bools
from tailgate.analysis.judging.gates.compiles import CompileFacts
from tailgate.analysis.judging.judgement import Judgement
from tailgate.analysis.records.requests import METRICS
from tailgate.analysis.run.client_stalls import HOST, PART, UNKNOWN, WORK, ArmStalls, is_explained
from tailgate.analysis.run.compile_events import BACKGROUND, JIT, held_s
from tailgate.analysis.run.run import Run
from tailgate.analysis.run.slo import meets_all
from tailgate.analysis.run.startup import compiled_steps, most_eager, startup_row
from tailgate.analysis.statistics.quantiles import quantiles


def arm_row(run: Run, arm: str, judgement: Judgement) -> dict[str, Any]:
    """Return the arm's row of the summary."""
    requests = run.requests
    usable = run.of_arm(arm)
    count, completed, failed = (int((usable & mask).sum()) for mask in (True, requests.ok, requests.failed))
    usable &= run.usable  # in place: a mask of a long run takes much memory
    metrics = _metrics(run, usable)
    steady = run.steady(usable, (arm,))
    tokens = int(requests.output_tokens[usable].sum())

    def rate(count: int) -> float | None:
        return run.rate(count, arm) if run.trials_of(arm) else None  # a search may never have started it

    return {
        "name": arm,
        "control": arm == run.control,
        "requests": count,
        "failed": failed,
        "error_pct": 100.0 * failed / (completed + failed) if completed + failed else None,
        "request_rate": rate(int(usable.sum())),
        "output_token_rate": rate(tokens) if run.seconds > 0 and not run.embeds else None,
        "goodput_rps": rate(int((meets_all(requests, run.targets) & usable).sum())) if run.targets else None,
        "metrics": metrics,
        "steady": metrics if np.array_equal(steady, usable) else _metrics(run, steady),
        "cold": _metrics(run, usable & run.cold),
        "external": _external_row(run, arm),
        "compile": _compile_row(run, arm, judgement.facts[arm]),
        "client_stalls": _stalls_row(run, judgement.stalls[arm], reports=judgement.facts[arm].known),
        "padding": _padding(run, arm),
        "startup": startup_row(run, arm),
        "memory_bytes": {name: max(peaks.values()) for name, peaks in judgement.memory[arm].items()},
        "verdict": judgement.verdicts.get(arm),
    }


def _metrics(run: Run, mask: Bools) -> dict[str, Any]:
    requests = run.requests
    # Failed requests stand in these figures with their deadline.
    table = {name: _described(requests.metric_ms(name, mask)) for name in METRICS if name in run.metrics}
    if "itl" in run.metrics:
        gaps_ms = requests.gaps_ms
        if len(gaps_ms):
            gaps_ms = gaps_ms[np.repeat(mask & (requests.ok | requests.cut), np.diff(requests.gap_offsets))]
        table["itl"] = _described(gaps_ms)
    return table


_QUANTILES = {"p50_ms": 0.5, "p90_ms": 0.9, "p95_ms": 0.95, "p99_ms": 0.99, "p99_9_ms": 0.999, "max_ms": 1.0}


def _described(values: npt.NDArray[Any]) -> dict[str, Any]:
    """Describe the values. It changes their order."""
    known = ~np.isnan(values)
    if not known.all():
        values = values[known]
    del known  # the values of a long run take much memory
    mean = float(values.mean(dtype=np.float64)) if values.size else None  # before the order changes, and its rounding
    found = quantiles(values, list(_QUANTILES.values()), in_place=True)
    return {"n": int(values.size), **dict(zip(_QUANTILES, found, strict=True)), "mean_ms": mean}


def _external_row(run: Run, arm: str) -> dict[str, Any] | None:
    """Return where an external arm is and, in sentences, what is unknown; None for managed arms."""
    account = run.account(arm)
    external = account.external
    if not external:
        return None
    checked = ", its greedy answers were" if account.greedy_trials else ", nor were its answers"
    compiles = "; ".join(["Its compiles are those that its log reports", *account.log_spots])
    notes = {
        "Tailgate did not start it: its start-up is unknown, and nothing resets it between trials.": True,
        f"{compiles}.": account.reports_compiles,
        "Its compiles are unknown.": not account.reports_compiles,
        f"Its weights, precision, limits and batching were not checked{checked}.": True,
        "It does not count its tokens: TPOT, ITL and token rates are per piece of text.": not account.counts_tokens,
    }
    return {
        "kind": external["kind"],
        "address": external.get("address"),
        "model_name": external.get("model_name"),
        "notes": [note for note, holds in notes.items() if holds],
    }


def _compile_row(run: Run, arm: str, facts: CompileFacts) -> dict[str, Any]:
    """Return what compiles did to the arm, without what is unknown."""
    serving = [event for event in run.events if event.arm == arm and event.serving]
    row: dict[str, Any] = {}
    if facts.known:
        row |= {
            "serving_events": len(serving),
            "recompiles": facts.recompiles,
            "stall_s_per_min": facts.stall_s_per_min,
            "graph_captures": sum(event.kind == "graph_capture" for event in serving),
            "limit_hits": sum(event.kind == "limit_hit" for event in serving),
            "jit_compiles": sum(event.kind == JIT for event in serving),
            "background_s": held_s(event for event in serving if event.kind == BACKGROUND),
        }
    # Without events a server's own count still shows waits, but a count of none does not prove that there were none.
    if facts.known or facts.requests_hit > 0:
        row["longest_stall_s"], row["requests_hit"] = facts.longest_stall_s, facts.requests_hit
        row["requests_hit_pct"] = facts.hit_pct if facts.requests else None
    most = most_eager(compiled_steps(run, arm))
    row["eager_fallback_pct"] = None if most is None else most.eager_pct
    return row


_MOST_STALLS = 100


def _stalls_row(run: Run, seen: ArmStalls, *, reports: bool) -> dict[str, Any]:
    """Count the client-side stalls of the arm by cause, a compile where it `reports` them, and list the longest."""
    stalls = [
        replace(stall, cause="compile")
        if reports and stall.cause in (UNKNOWN, PART) and is_explained(stall, run.events)
        else stall
        for stall in seen.stalls
    ]
    causes = Counter(stall.cause for stall in stalls)
    longest = sorted(stalls, key=lambda stall: (-stall.seconds, stall.trial, stall.start_ns))[:_MOST_STALLS]
    return {
        **{cause: causes[cause] for cause in (UNKNOWN, HOST, WORK, PART)},
        "compile": causes["compile"] if reports else None,
        "detectable_s": seen.detectable_s,
        "stalls": [
            {
                **{name: getattr(stall, name) for name in ("trial", "seconds", "cause")},
                "offset_s": run.offset_s(stall.trial, stall.start_ns),
                "requests": int(stall.requests.size),
            }
            for stall in longest
        ],
    }


def _padding(run: Run, arm: str) -> dict[str, float | None]:
    """Return the shares of computed positions that held no token, in percent; one for arms that embed."""
    steps = None if run.account(arm).external else run.steps(arm)
    if steps is None:
        return {}
    return {"waste_pct": _waste_pct(steps)} | {
        f"{kind}_waste_pct": _waste_pct(steps.filter(pc.equal(steps.column("kind"), kind)))
        for kind in ("prefill", "decode")
    }


def _waste_pct(steps: pa.Table) -> float | None:
    tokens = int(pc.sum(steps.column("tokens")).as_py() or 0)
    padded = int(pc.sum(steps.column("padded_tokens")).as_py() or 0)
    return 100.0 * (1.0 - tokens / padded) if padded else None
