"""Releases made up of numbers alone: what is kept of a run, without the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from analysis.releases.release import Release, ReleaseArm
from analysis.releases.run_figures import ArmFigures
from analysis.statistics.unpaired import Luck

DAY_NS = 86_400_000_000_000
LEVELS = {"p99_ttft_ms": 300.0, "p50_tpot_ms": 20.0, "p99_e2e_ms": 4000.0, "process_peak_bytes": 6e8, "startup_s": 30.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """The figures of a build, and how its trials, starts and days scatter, in log scale."""

    levels: Mapping[str, float] = field(default_factory=lambda: dict(LEVELS))
    counts: Mapping[str, Sequence[float]] = field(default_factory=dict)  # by trial
    trials: int = 4
    day_spread: float = 0.01
    start_spread: float = 0.01
    luck: float | None = 0.01  # of the traffic, by trial; None: so few requests that blocks do not tell
    blocks: int = 20
    references: Mapping[str, float] = field(default_factory=lambda: {"python_ms": 10.0, "read_gb_per_s": 20.0})
    cache: Mapping[str, float] = field(default_factory=dict)
    doubts: tuple[str, ...] = ()
    compile_doubts: tuple[str, ...] = ()
    unknown_kinds: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    conditions: Mapping[str, Any] = field(default_factory=lambda: {"traffic": {"rate": 4.0}, "slo": []})
    config: Mapping[str, Any] = field(default_factory=lambda: {"model": {"id": "random:tiny", "dtype": "float32"}})
    environment: Mapping[str, Any] = field(default_factory=lambda: {"machine": "0123456789ab"})


def release(build: Build, *, day: int, seed: int, arm: str = "compiled", slower: float = 1.0) -> Release:
    """Return a run of the build on a day: memory does not vary, all else shares the day's variation."""
    rng = np.random.default_rng([seed, day])
    today = build.day_spread * rng.standard_normal() + np.log(slower)
    values: dict[str, dict[int, tuple[float, Luck]]] = {}
    starts = build.start_spread * rng.standard_normal(build.trials)
    for key, level in build.levels.items():
        traffic = key.endswith("_ms")
        noise = (build.luck or 0.01) * rng.standard_normal(build.trials) if traffic else np.zeros(build.trials)
        moved = np.zeros(build.trials) if key.endswith("bytes") else today + starts + noise
        luck = Luck(spread=build.luck, degrees=build.blocks - 1.0) if traffic else Luck()
        values[key] = {trial + 1: (float(level * np.exp(by)), luck) for trial, by in enumerate(moved)}
    for key, counts in build.counts.items():
        values[key] = {trial + 1: (count, Luck()) for trial, count in enumerate(counts)}
    references = {
        key: value / slower if "_per_" in key or "flops" in key else value * slower
        for key, value in build.references.items()
    }
    doubts = {"doubts": build.doubts, "compile_doubts": build.compile_doubts, "unknown_kinds": build.unknown_kinds}
    figures = ArmFigures(values=values, sources=build.sources)
    measured = ReleaseArm(figures=figures, config=build.config, references=references, cache=build.cache, **doubts)
    return Release(
        **{"name": "made up", "run_id": f"run-{seed}-{day}", "created_ns": day * DAY_NS, "trials": build.trials},
        **{"conditions": build.conditions, "environment": build.environment, "arms": {arm: measured}, "seed": seed},
        starts_ns=tuple(day * DAY_NS + trial * 3_600_000_000_001 for trial in range(build.trials)),
    )
