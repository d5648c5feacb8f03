"""What one start of an arm cost, part by part, what its compiler could not do, and which steps ran compiled code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from analysis.records.documents import content_of
from analysis.records.plain_values import mapping, number
from analysis.records.run_records import trial_folders
from analysis.run.compile_events import held_s
from analysis.run.run import Run

# The first word of an item names its part. What is in neither group is a shape that was warmed.
BEFORE = ("process", "import")
ARTIFACT = "artifact"  # compiled code that was unpacked; its identity stands among the versions
AROUND = (*BEFORE, ARTIFACT, "load", "other")
MOST_SHAPES = 5

_COMPILING = ("compile", "recompile", "limit_hit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What one start of one replica costs; None where it is not recorded. `memory_bytes` is the peak on the device."""

    serving_s: float | None = None
    memory_bytes: float | None = None


def start_of(run: Run, arm: str) -> Start:
    """What a start of the arm cost in this run."""
    row = startup_row(run, arm)
    memory = mapping(row["memory_bytes"])
    peak = number(memory.get("device_peak")) or number(memory.get("device_reserved"))
    # That of all replicas together.
    return Start(serving_s=row["serving_s"], memory_bytes=None if peak is None else peak / run.replicas(arm))


def startup_row(run: Run, arm: str) -> dict[str, Any]:
    """One start of the arm: the mean over trials, the slowest replica of each. None where nothing was recorded."""
    starts = [_items(startup) for startup in run.account(arm).startups]
    starts = [items for items in starts if items]
    shapes = [{item: ns for item, ns in items.items() if _part(item) not in AROUND} for items in starts]
    whole = bool(starts) and all(set(BEFORE) <= {_part(item) for item in items} for items in starts)
    versions = [mapping(row.get("versions")) for row in run.account(arm).startups]
    artifacts = [str(known[ARTIFACT]) for known in versions if known.get(ARTIFACT)]
    memories = (mapping(row.get("memory_bytes")) for row in run.account(arm).startups)
    return {
        "serving_s": _mean_s(sum(items.values()) for items in starts) if whole else None,
        "artifact": ", ".join(dict.fromkeys(artifacts)) or None,
        "load_s": _part_s(starts, "load") if starts else None,
        "warmup_s": _mean_s(sum(items.values()) for items in shapes),
        **_compiling(run, arm),
        "slowest": _slowest(shapes),
        "memory_bytes": dict(next(filter(None, memories), {})),
    }


def _items(startup: Mapping[str, Any]) -> dict[str, float]:
    known = {str(key): number(value) for key, value in mapping(startup.get("items_ns")).items()}
    return {key: value for key, value in known.items() if value is not None}


def _part(item: str) -> str:
    return item.split(" ", 1)[0]


def _part_s(starts: list[dict[str, float]], *parts: str) -> float | None:
    """The mean time in `parts`; None where no start has one."""
    if not any(_part(item) in parts for items in starts for item in items):
        return None
    return _mean_s(sum(ns for item, ns in items.items() if _part(item) in parts) for items in starts)


def _mean_s(totals_ns: Iterable[float]) -> float | None:
    known = list(totals_ns)
    return sum(known) / len(known) / 1e9 if known else None


def _slowest(shapes: list[dict[str, float]]) -> list[dict[str, Any]]:
    """The shapes whose warm-up took longest on average, slowest first."""
    names = dict.fromkeys(item for items in shapes for item in items)
    means = {name: sum(items.get(name, 0.0) for items in shapes) / len(shapes) / 1e9 for name in names}
    ordered = sorted(means.items(), key=lambda item: (-item[1], item[0]))
    return [{"item": name, "s": seconds} for name, seconds in ordered[:MOST_SHAPES]]


def _compiling(run: Run, arm: str) -> dict[str, Any]:
    """What the compiler did in one start."""
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


def compiler_facts(directories: Iterable[Path], arm: str) -> dict[str, dict[str, int] | None]:
    """Graph breaks and CUDA-graph skips of the arm over all replicas and trials of the runs, the most frequent first.

    None where no replica reported them; empty where they reported none.
    """
    folders = [folder for directory in directories for folder in trial_folders(directory)]
    contents = [content_of(folder / "compiler.json") for folder in folders]
    reports = [mapping(row) for content in contents for row in content.values() if mapping(row).get("arm") == arm]
    return {name: _summed(reports, name) if reports else None for name in ("graph_breaks", "cudagraph_skips")}


def blind_spots(run: Run, arm: str) -> list[str]:
    """What the arm's replicas could not see of their compilers, in sentences, each once."""
    spots = (start.get("blind_spots") for start in run.account(arm).startups)
    return list(dict.fromkeys(text for texts in spots if isinstance(texts, list) for text in map(str, texts)))


def _summed(rows: list[Mapping[str, Any]], name: str) -> dict[str, int]:
    totals: dict[str, int] = {}
    for row in rows:
        for text, count in mapping(row.get(name)).items():
            totals[str(text)] = totals.get(str(text), 0) + int(number(count) or 0)
    return dict(sorted(totals.items(), key=lambda item: (-item[1], item[0])))


# --- Steps that ran compiled code ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledSteps:
    """The steps of one kind, of one replica in one trial, of which it is known whether they ran compiled code."""

    trial: int
    replica: str
    kind: str  # prefill | decode | encode
    compiled: int
    steps: int


def compiled_steps(run: Run, arm: str) -> list[CompiledSteps]:
    """Of each replica, trial and kind, after the trial's first request; empty where nothing is known, or the arm asks
    for no compiling."""
    steps = run.steps(arm) if run.account(arm).compiles else None
    if steps is None:
        return []
    known = steps.filter(pc.is_valid(steps.column("compiled")))
    counted = pa.table(
        {
            "trial": pc.fill_null(known.column("trial"), 1),
            "replica": pc.fill_null(known.column("replica"), arm),
            "kind": pc.fill_null(known.column("kind"), ""),
            "compiled": pc.cast(known.column("compiled"), pa.int64()),
        }
    )
    places = ["trial", "replica", "kind"]
    groups = counted.group_by(places).aggregate([("compiled", "sum"), ("compiled", "count")])
    return [
        CompiledSteps(**{name: row[name] for name in places}, compiled=row["compiled_sum"], steps=row["compiled_count"])
        for row in sorted(groups.to_pylist(), key=lambda row: [row[name] for name in places])
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerSteps:
    """How many of an arm's steps of one kind ran as plain Python."""

    kind: str
    eager: int
    steps: int

    @property
    def pct(self) -> float:
        """Of 100 steps."""
        return 100.0 * self.eager / self.steps


def most_eager(counts: Sequence[CompiledSteps]) -> EagerSteps | None:
    """The kind of step with the largest share that ran eagerly; None without steps.

    By kind, since an answer has hundreds of decode steps and one prefill: if every prefill ran eagerly, that would be
    less than a per cent of all.
    """
    kinds = dict.fromkeys(count.kind for count in counts if count.steps)
    own = [[count for count in counts if count.kind == kind] for kind in kinds]
    found = [
        EagerSteps(
            kind=rows[0].kind,
            eager=sum(row.steps - row.compiled for row in rows),
            steps=sum(row.steps for row in rows),
        )
        for rows in own
    ]
    return max(found, key=lambda item: item.pct, default=None)
