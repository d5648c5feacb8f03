"""How the verdict of a run with interim analyses formed: where the evidence on each gate ended."""

from __future__ import annotations

from typing import Any

from analysis.judging.judgement import Judgement
from analysis.run.run import Run


def interim_row(run: Run, judgement: Judgement) -> dict[str, Any] | None:
    """The `sequential` part of the summary; None for a run with one analysis. Times in seconds of judged traffic."""
    if not run.limits.sequential:
        return None
    ended = [str(info["ended"]) for info in run.infos if info.get("ended")]
    return {
        "alpha": run.limits.alpha,
        "ended": ended[-1] if ended else None,
        "paths": [
            {
                "arm": gate.arm,
                "gate": gate.gate,
                "unit": gate.path_unit,
                "limit": gate.path_limit,
                "verdict": gate.verdict,
                "decided_s": path.decided_s,
                **{name: float(column[-1]) if len(column := getattr(path, name)) else None for name in _ENDS},
            }
            for gate in judgement.gates
            if (path := gate.path) is not None
        ],
    }


_ENDS = ("value", "low", "high")
