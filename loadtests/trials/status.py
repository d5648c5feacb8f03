"""What a run is doing right now: plain values that the orchestrator writes, and its displays read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tailgate.analysis.judging.alarms import ServedCompile
from tailgate.servers.clock import now_ns


@dataclass(slots=True)
class ReplicaState:
    """Where one server process stands: waiting | starting | load | warmup | ready | dead."""

    stage: str = "waiting"
    done: int = 0
    total: int = 0
    detail: str = ""
    compiles: int | None = 0  # None where nothing reports them
    compiling: ServedCompile | None = None

    def text(self) -> str:
        """Return such as "warm-up 2/5 4x64" or "compiling for 12 s (prefill 2x64)"."""
        if (compiling := self.compiling) is not None:
            shape = f" ({compiling.shape})" if compiling.shape else ""
            return f"compiling for {compiling.seconds(now_ns()):.0f} s{shape}"
        if self.stage == "warmup":
            counted = f" {self.done}/{self.total}" if self.total else ""
            return f"warm-up{counted} {self.detail}".rstrip()
        names = {"load": "loading", "serving": "ready"}
        return names.get(self.stage, self.stage)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmLoad:
    """Live numbers of one arm; quantiles over the last seconds, None while there is no answer."""

    finished: int = 0
    failed: int = 0
    inflight: int = 0
    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = None
    e2e_p50_ms: float | None = None
    e2e_p99_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Live numbers of the load generator, all its processes together. `accounts` has what each reports.

    `lag_ms` is the p99 of the schedule lag of the worst process; None before any has one.
    """

    finished: int = 0
    failed: int = 0
    t_s: float = 0.0
    lag_ms: float | None = None
    arms: Mapping[str, ArmLoad] = field(default_factory=dict)
    accounts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(slots=True)
class Status:
    """What the orchestrator and its threads write and the display reads. Plain attributes, each set in one go.

    `pages` are the metrics of the trial's processes, by name: an address and a path. Replicas have some where the run
    is `exported` to Prometheus.
    """

    phase: str = "preparing"
    detail: str = ""  # of the phase; its change alone starts no new line
    trial: int = 1
    trials: int = 1
    planned: int = 0
    duration_s: float = 0.0
    replicas: dict[str, ReplicaState] = field(default_factory=dict)
    load: Load = field(default_factory=Load)
    notes: list[str] = field(default_factory=list)
    run_dir: Path | None = None
    exported: bool = False
    pages: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def note(self, text: str) -> None:
        """Keep a line for the user on the screen, such as an arm's death."""
        self.notes.append(text)


def read_load(folder: Path) -> Load:
    """Return the live numbers of the load processes that write their accounts, generator-<worker>.json, in `folder`.

    Quantiles are those of the worst process. A file that is broken, or of a process that never reported, is left out.
    """
    accounts: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("generator-[0-9]*.json")):
        with suppress(OSError, ValueError):
            if "arms" in (account := json.loads(path.read_text(encoding="utf-8"))):
                accounts[path.stem.removeprefix("generator-")] = account
    reports = accounts.values()
    names = sorted({name for report in reports for name in report["arms"]})
    return Load(
        finished=sum(report["finished"] for report in reports),
        failed=sum(report["failed"] for report in reports),
        t_s=max((report["t_s"] for report in reports), default=0.0),
        lag_ms=max((report["lag_ms"]["p99"] for report in reports if "lag_ms" in report), default=None),
        arms={name: _merged([report["arms"][name] for report in reports if name in report["arms"]]) for name in names},
        accounts=accounts,
    )


def _merged(parts: Sequence[Mapping[str, Any]]) -> ArmLoad:
    def worst(key: str) -> float | None:
        return max((part[key] for part in parts if part[key] is not None), default=None)

    return ArmLoad(
        finished=sum(part["n"] for part in parts),
        failed=sum(part["failed"] for part in parts),
        inflight=sum(part["inflight"] for part in parts),
        **{key: worst(key) for key in ("ttft_p50_ms", "ttft_p99_ms", "e2e_p50_ms", "e2e_p99_ms")},
    )
