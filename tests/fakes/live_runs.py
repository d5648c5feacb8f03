"""A run directory in the middle of a run: what the page reads, written step by step."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tailgate.analysis.records.documents import write_document, write_json
from tailgate.analysis.records.schemas import COMPILE_EVENTS, MACHINES
from tailgate.analysis.records.tables import RecordWriter
from tailgate.analysis.settings.metrics import gate_label

SECOND = 1_000_000_000
GIB = 1 << 30
DURATION_S = 900.0
START_NS = 1_700_000_000 * SECOND
REASON = "tensor 'input_ids' size mismatch at index 1. expected 64, actual 81"


@dataclass(kw_only=True)
class WatchedRun:
    """A run of a control and two treatments on two devices, of which the second recompiles; `text` is what arms, shapes
    and reasons are called besides."""

    folder: Path
    naive: str = "compiled-naive"
    text: str = ""
    notes: list[str] = field(default_factory=list)
    compiling: float | None = None  # for how many seconds the last arm has been
    dead: tuple[str, ...] = ()  # arms

    def __post_init__(self) -> None:
        self.trial = self.folder / "trial-01"
        self.trial.mkdir(parents=True)
        self.arms = ["eager", "compiled-padded", self.naive]
        tables = "".join(
            f"[[arms]]\nname = {json.dumps(arm)}\npreset = {json.dumps(arm)}\n"
            f"control = {str(not index).lower()}\ncompile = {{}}\n"
            for index, arm in enumerate(self.arms)
        )
        head = f"name = {json.dumps(self.text or 'canary')}\n"
        head += f'[traffic]\ndesign = "mirrored"\nduration_s = {DURATION_S}\n'
        head += "[gates]\nsequential = true\nmax_generator_lag_ms = 50.0\n"
        (self.folder / "experiment.toml").write_text(head + tables)
        self.writers = {
            name: RecordWriter(self.trial / f"{name}.arrow", schema)
            for name, schema in (("compile_events", COMPILE_EVENTS), ("machines", MACHINES))
        }
        self.at_s = 0

    def now_ns(self) -> int:
        return START_NS + self.at_s * SECOND

    def status(self, phase: str = "traffic", detail: str = "", ended: Mapping[str, Any] | None = None) -> None:
        states: dict[str, dict[str, Any]] = {
            f"{arm}-0": {"stage": "serving", "text": "ready", "compiling": None} for arm in self.arms
        }
        if self.compiling is not None:
            start_ns = self.now_ns() - int(self.compiling * SECOND)
            under_way = {"arm": self.naive, "shape": self.text or "prefill 4×50", "start_ns": start_ns}
            states[f"{self.naive}-0"] |= {"text": f"compiling for {self.compiling:.0f} s", "compiling": under_way}
        for arm in self.dead:
            states[f"{arm}-0"] |= {"stage": "dead", "text": "dead"}
        traffic = f"{self.at_s} of {DURATION_S:g} s" if phase == "traffic" else ""
        content = {
            **{"at_ns": self.now_ns(), "began_ns": START_NS - 60 * SECOND, "phase": phase, "detail": detail or traffic},
            **{"trial": 1, "trials": 1, "planned": int(DURATION_S * 12), "duration_s": DURATION_S},
            "replicas": states,
            "load": {"finished": self.at_s * 12, "failed": self.at_s // 40, "t_s": float(self.at_s), "lag_ms": 3.1},
            **{"notes": self.notes, "ended": ended},
        }
        write_document(self.folder / "status.json", content)

    def second(self) -> None:
        self.at_s += 1
        at = self.at_s
        arms = {}
        for index, arm in enumerate(self.arms):
            base = (180, 150, 155)[index] * (14.0 if index == 2 and at > 30 and at % 95 < 12 else 1.0)
            arms[arm] = {
                **{"finished": at * 4, "failed": at // 120 if index == 2 else 0, "inflight": 6},
                **{"ttft_p50_ms": base, "ttft_p99_ms": base * 2.4, "e2e_p50_ms": base * 5, "e2e_p99_ms": base * 9},
            }
        self._append("load", {"at_ns": self.now_ns(), "trial": 1, "arms": arms})
        shared = {"trial": 1, "host": "run", "at_ns": self.now_ns(), "memory_bytes": 61 * GIB}
        shared |= {"memory_limit_bytes": 80 * GIB}
        host = {"kind": "host", "name": "run", "cpus": 16, "cpu_s": at * 5.0, "steal_s": at * 0.01}
        device = {"kind": "device", "sm_mhz": 1980, "power_w": 540.0, "power_limit_w": 700.0, "throttle": []}
        device |= {"temperature_c": 61, "utilisation_pct": 78, "foreign_processes": 0}
        for row in (host, {**device, "name": "cuda:0"}, {**device, "name": "cuda:1"}):
            self.writers["machines"].append({**shared, **row})
        if at > 30 and at % 95 == 0:
            self.compiled(4.2 + at / 400)
        for writer in self.writers.values():
            writer.flush()

    def compiled(self, seconds: float, *, phase: str = "serving", arm: str = "") -> None:
        """Write that the third arm, or `arm`, compiled something until now."""
        row = {
            **{"event_id": f"1-{self.at_s}", "trial": 1, "arm": arm or self.naive, "replica": f"{arm or self.naive}-0"},
            **{"kind": "recompile" if phase == "serving" else "compile", "phase": phase, "cache": "miss"},
            **{"start_ns": self.now_ns() - int(seconds * SECOND), "end_ns": self.now_ns()},
            **{"shape": self.text or f"prefill 4×{self.at_s}", "reason": self.text or REASON},
            "request_ids": [f"r{number}" for number in range(int(seconds * 3))],
        }
        self.writers["compile_events"].append(row)
        self.writers["compile_events"].flush()

    def analyse(self, number: int, *, decided: bool = False) -> None:
        """Write an interim analysis: of the gates by ratio the second candidate fails, if `decided`."""
        grown, width = 1 - math.exp(-number / 6), 0.55 / math.sqrt(number)
        verdicts = ("PASS", "FAIL") if decided else ("INCONCLUSIVE",) * 2
        decision = {"decided_s": number * 60.0 if decided else None}
        decision["outlook_s"] = None if decided else 3030.0 - 10 * number
        gates: list[dict[str, Any]] = []
        for index, arm in enumerate(self.arms[1:]):
            for metric in ("ttft", "e2e"):
                value = (0.86, 1.0 + 1.4 * grown)[index]
                row = {"arm": arm, "gate": f"noninferiority p99_{metric}", "kind": "noninferiority", "unit": "ratio"}
                row |= {"limit": 1.1, "value": value, "low": value * math.exp(-width), "high": value * math.exp(width)}
                row |= {"harm": (0.2, 30.0)[index] * grown, "safety": (24.0, 0.01)[index] * grown, **decision}
                row |= {"verdict": verdicts[index]}
                gates.append(row | {"reason": self.text or "Its interval and the margin of 10 %."})
            stall = 0.0 if index == 0 else 0.4 + number * 0.5
            for gate, unit, limit, value in (
                ("recompiles", "count", 0, 0 if index == 0 else number // 2),
                ("longest compile stall", "s", 1.0, stall),
                ("requests hit", "pct", 1.0, min(9.0, stall)),
                ("error_pct", "pct", 0.5, 0.02 * number),
            ):
                row = {"arm": arm, "gate": gate, "kind": "limit", "unit": unit, "limit": limit, "value": value}
                row |= dict.fromkeys(("low", "high", "decided_s", "harm", "safety", "outlook_s"))
                row |= {"verdict": "PASS" if value <= limit else "FAIL"}
                gates.append(row | {"reason": self.text or f"{value:g} of at most {limit:g}."})
        for row in gates:
            row["label"] = gate_label(row["gate"])
        arms = {
            arm: {"decision": verdicts[index] if decided else None, "reason": "", **decision}
            for index, arm in enumerate(self.arms[1:])
        }
        blocks = {"check": "blocks", "arm": None, "ok": number > 9, "reason": f"{number * 2} blocks of 18."}
        blocks["remedy"] = "Let it run on: `gates.min_blocks` asks."
        errors = {"check": "error rate", "arm": self.naive, "ok": True, "reason": self.text or "0.1 % failed."}
        checks = [blocks, errors | {"remedy": ""}]
        line = {
            **{"number": number, "at_ns": self.now_ns(), "trial": 1, "seconds": number * 60.0},
            **{"arms": arms, "gates": gates, "checks": checks, "latency": {}},
        }
        self._append("interim", line)

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        with (self.folder / f"{name}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def minutes(self, number: int, *, decided: bool = False) -> None:
        """Write minutes of traffic with an interim analysis after each; the last one decides, if `decided`."""
        for _ in range(number):
            for _ in range(60):
                self.second()
            self.analyse(self.at_s // 60, decided=decided and self.at_s == number * 60)
        self.status()

    def end(self) -> None:
        write_json(self.folder / "summary.json", {"overall": "FAIL", "headline": "compiled-naive may not ship."})
        (self.folder / "report.html").write_text("<!doctype html><title>FAIL</title><h1>The report</h1>")
        self.status("judging", ended={"complete": True})
