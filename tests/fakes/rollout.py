"""The directory of a run of one candidate, as it grows while somebody moves traffic to it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from analysis.looks.journal import append
from analysis.records.documents import write_document
from analysis.records.schemas import COMPILE_EVENTS, REQUESTS
from analysis.records.tables import RecordWriter
from analysis.records.weight_journal import WeightChange
from analysis.records.weight_journal import append as append_weights

SECOND = 1_000_000_000
START_NS = 1_700_000_000 * SECOND


@dataclass(kw_only=True)
class Rollout:
    """A run that writes interim analyses, requests and events when it is called, at `at_s` after the start."""

    folder: Path
    candidate: str = "new"
    others: tuple[str, ...] = ()
    settings: str = ""
    at_s: float = 0.0
    looks: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.trial = self.folder / "trial-01"
        self.trial.mkdir(parents=True)
        arms = "".join(
            f"[[arms]]\nname = {json.dumps(name)}\ncontrol = {str(name == 'old').lower()}\n"
            for name in ("old", self.candidate, *self.others)
        )
        (self.folder / "experiment.toml").write_text(f'name = "canary"\n{arms}{self.settings}')
        self.requests = RecordWriter(self.trial / "requests-0.arrow", REQUESTS)
        self.events = RecordWriter(self.trial / "compile_events.arrow", COMPILE_EVENTS)
        self.facts: dict[str, Any] = {"trial": 1, "deaths": []}
        self.alive()

    def now_ns(self) -> int:
        return START_NS + int(self.at_s * SECOND)

    def alive(self, ended: dict[str, Any] | None = None) -> None:
        """Write that the run goes on, or how it ended."""
        write_document(self.folder / "status.json", {"at_ns": self.now_ns(), "phase": "traffic", "ended": ended})

    def answer(self, number: int = 40, *, status: str = "OK", arm: str = "") -> None:
        for index in range(number):
            row = {"request_id": f"{self.at_s}-{index}", "trial": 1, "arm": arm or self.candidate, "status": status}
            self.requests.append({**row, "sent_ns": self.now_ns() - SECOND, "end_ns": self.now_ns()})
        self.requests.flush()

    def compiled(self, seconds: float, *, phase: str = "serving") -> None:
        start_ns = self.now_ns() - int(seconds * SECOND)
        row = {"event_id": f"e{self.at_s}", "trial": 1, "arm": self.candidate, "kind": "recompile", "phase": phase}
        self.events.append({**row, "start_ns": start_ns, "end_ns": self.now_ns(), "shape": "prefill 1×81"})
        self.events.flush()

    def died(self) -> None:
        self.facts["deaths"].append({"arm": self.candidate, "replica": "new-0", "at_ns": self.now_ns()})
        write_document(self.trial / "trial.json", self.facts)

    def look(
        self, decision: str | None = None, *, safe: bool = False, failed: str | None = None, reason: str = "It is open."
    ) -> None:
        self.looks += 1
        gate = {"gate": "noninferiority p99_ttft", "verdict": decision or "INCONCLUSIVE", "reason": reason}
        errors = {"gate": "errors", "verdict": "PASS", "reason": "None failed."}
        step = {"safe": safe, "failed": failed, "requests": 40, "uneven": None}
        arms = {self.candidate: {"decision": decision, "reason": reason}}
        gates = [{"arm": self.candidate, **row} for row in (gate, errors)]
        line = {"look": self.looks, "at_ns": self.now_ns(), "arms": arms, "step": step, "gates": gates}
        append(self.folder, line)

    def rolled_back(self, why: str) -> None:
        """Write that the run itself took the candidate back."""
        weights = {"old": 10_000, self.candidate: 0}
        append_weights(self.folder, WeightChange(at_ns=self.now_ns(), weights=weights, why=why, action="rollback"))

    def end(self) -> None:
        self.alive({"complete": True})
