"""Gates, checks and what they are judged by, with defaults for all that a test does not name."""

from __future__ import annotations

from typing import Any

from analysis.judging.gates import Gate
from analysis.judging.validity import ESTIMATES, Check
from analysis.run.slo import ShareResult
from analysis.statistics.compare import Comparison


def gate(kind: str = "noninferiority", verdict: str = "PASS", arm: str = "compiled", **more: Any) -> Gate:
    known = {"gate": kind, "value": 1.0, "limit": 1.1, "unit": "ratio", "reason": "It is so."}
    return Gate(arm=arm, kind=kind, verdict=verdict, **known | more)  # type: ignore[arg-type]


def check(ok: bool = False, affects: tuple[str, ...] = ESTIMATES, name: str = "generator lag", **more: Any) -> Check:
    return Check(check=name, ok=ok, reason="The generator was late.", affects=affects, **more)


def comparison(**more: Any) -> Comparison:
    """A comparison of the p99 of E2E latency in one trial."""
    known = {
        **{"arm": "compiled", "control": "eager", "metric": "e2e", "quantile": 0.99, "margin": 0.1, "alpha": 0.05},
        **{"ratio": 1.0, "method": "made up", "blocks": 20, "groups": 8, "trials": 1, "requests": 1000},
    }
    return Comparison(**known | more)  # type: ignore[arg-type]


def share(missed: int, requests: int, verdict: str = "INCONCLUSIVE", **more: Any) -> ShareResult:
    known = {"allowed": 0.01, "low": 0.004, "high": 0.07, "design_effect": 1.0}
    return ShareResult(missed=missed, requests=requests, verdict=verdict, **known | more)  # type: ignore[arg-type]
