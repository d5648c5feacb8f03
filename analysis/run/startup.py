"""What one start of an arm cost, part by part, and which steps ran compiled code."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tailgate.analysis.records.plain_values import mapping, number
from tailgate.analysis.run.compile_events import held_s
from tailgate.analysis.run.run import Run

# The first word of an item names its part. Every other item is a shape that was warmed.
_BEFORE = ("process", "import")
_ARTIFACT = "artifact"  # compiled code that was unpacked; its identity stands among the versions
_PARTS = (*_BEFORE, _ARTIFACT, "load", "other")
_WARMUP = "warmup"
_COMPILING = ("compile", "recompile", "limit_hit")


def startup_row(run: Run, arm: str) -> dict[str, Any]:
    """Describe one start of the arm: the mean over trials of the slowest replica. None for what is not recorded."""
    startups = run.account(arm).startups
    starts = [parts for startup in startups if (parts := _parts_s(startup))]
    whole = all(part in parts for parts in starts for part in _BEFORE)
    artifacts = [str(name) for row in startups if (name := mapping(row.get("versions")).get(_ARTIFACT))]
    memories = (mapping(row.get("memory_bytes")) for row in startups)
    return {
        "serving_s": _mean([sum(parts.values()) for parts in starts]) if whole else None,
        "artifact": ", ".join(dict.fromkeys(artifacts)) or None,
        "load_s": _mean([parts["load"] for parts in starts if "load" in parts]),
        "warmup_s": _mean([parts.get(_WARMUP, 0.0) for parts in starts]),
        **_compiling(run, arm),
        "memory_bytes": dict(next(filter(None, memories), {})),
    }


def _parts_s(startup: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of a start by part; those of shapes belong to the warm-up."""
    parts: dict[str, float] = defaultdict(float)
    for item, value in mapping(startup.get("items_ns")).items():
        part = str(item).split(" ", 1)[0]
        if (spent := number(value)) is not None:
            parts[part if part in _PARTS else _WARMUP] += spent / 1e9
    return dict(parts)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _compiling(run: Run, arm: str) -> dict[str, Any]:
    if run.records.events is None or run.account(arm).external or not run.trials_of(arm):
        return {}
    warm = [event for event in run.events if event.arm == arm and not event.serving]
    compiles = [event for event in warm if event.kind in _COMPILING]
    starts = len(run.trials_of(arm)) * run.replicas(arm)
    states = [str(event.row.get("cache") or "") for event in compiles]
    return {
        "compiles": len(compiles) / starts,
        "compile_s": held_s(compiles) / starts,
        "cache": {state: states.count(state) for state in ("hit", "miss", "bypass") if state in states},
    }


def blind_spots(run: Run, arm: str) -> list[str]:
    """Return the distinct sentences in which the arm's replicas report compilers that they cannot see."""
    account = run.account(arm)
    ends = [(mapping(trial.info.get("final")), trial) for trial in run.trials_of(arm)]
    reported = [
        *account.startups,
        *(mapping(end.get(name)) for end, trial in ends for name in account.replica_names(trial)),
    ]
    spots = (own.get("blind_spots") for own in reported)
    return list(dict.fromkeys(text for texts in spots if isinstance(texts, list) for text in map(str, texts)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledSteps:
    """Steps of one kind that are known to have run compiled code or not: of one replica in one trial, or of all."""

    trial: int | None = None
    replica: str | None = None
    kind: str  # prefill | decode | encode
    compiled: int
    steps: int

    @property
    def eager_pct(self) -> float:
        """How many of 100 steps ran as plain Python."""
        return 100.0 * (self.steps - self.compiled) / self.steps


def compiled_steps(run: Run, arm: str) -> list[CompiledSteps]:
    """Count steps by replica, trial and kind after the trial's first request; empty if unknown or not compiling."""
    steps = run.steps(arm) if run.account(arm).compiles else None
    if steps is None:
        return []
    known = steps.filter(pc.is_valid(steps.column("compiled")))
    table = pa.table(
        {
            "trial": pc.fill_null(known.column("trial"), 1),
            "replica": pc.fill_null(known.column("replica"), arm),
            "kind": pc.fill_null(known.column("kind"), ""),
            "compiled": pc.cast(known.column("compiled"), pa.int64()),
        }
    )
    places = ["trial", "replica", "kind"]
    groups = table.group_by(places).aggregate([("compiled", "sum"), ("compiled", "count")])
    return [
        CompiledSteps(**{name: row[name] for name in places}, compiled=row["compiled_sum"], steps=row["compiled_count"])
        for row in sorted(groups.to_pylist(), key=lambda row: [row[name] for name in places])
    ]


def most_eager(counts: Sequence[CompiledSteps]) -> CompiledSteps | None:
    """Return the kind of step with the largest eager share, over replicas and trials; None without steps. By kind,
    since an answer has hundreds of decode steps and one prefill."""
    compiled: dict[str, int] = defaultdict(int)
    steps: dict[str, int] = defaultdict(int)
    for count in counts:
        compiled[count.kind] += count.compiled
        steps[count.kind] += count.steps
    kinds = [CompiledSteps(kind=kind, compiled=compiled[kind], steps=steps[kind]) for kind in steps if steps[kind]]
    return max(kinds, key=lambda item: item.eager_pct, default=None)


# Of torch.compile and inductor: what has many kernels timed and the quickest kept. Which one that is differs from one
# compile to the next.
_SEARCHING_MODES = ("max-autotune", "max-autotune-no-cudagraphs")
_SEARCHING_OPTIONS = ("coordinate_descent_tuning", "max_autotune", "max_autotune_gemm", "max_autotune_pointwise")


def start_spread(run: Run, arm: str) -> float:
    """Return the assumed standard deviation of log latency over starts, as one figure for the arm and the control.

    It is `gates.restart_spread`, plus `gates.tuning_spread` for kernels that were searched for. Trials that found the
    code of one search share its variance: it does not fade with their number.
    """
    variances = []
    for name in (arm, run.control):
        searches = searching_starts(run, name)
        shared = len(run.trials_of(name)) / searches if searches else 0.0
        variances.append(run.limits.restart_spread**2 + shared * run.limits.tuning_spread**2)
    return math.sqrt(sum(variances) / 2)


def searching_starts(run: Run, arm: str) -> int:
    """Count the trials in which the arm searched for kernels before it served: its policy enables it, it tuned, and it
    had no artifact, which contains its kernels."""
    policy = mapping(run.account(arm).config.get("compile"))
    options = mapping(policy.get("options"))
    searches = policy.get("mode") in _SEARCHING_MODES or any(options.get(name) for name in _SEARCHING_OPTIONS)
    if not policy.get("enabled") or not searches or policy.get("artifact"):
        return 0
    own = (event for event in run.events if event.arm == arm and not event.serving)
    return len({event.trial for event in own if event.kind == "autotune"})
