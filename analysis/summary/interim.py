"""How the verdict of a run formed that was looked at while it went on: the evidence on each gate over time."""

from __future__ import annotations

from typing import Any

import numpy as np

from analysis.judging.judgement import Judgement
from analysis.judging.paths import Path
from analysis.run.run import Run

_MOST_POINTS = 240


def interim_row(run: Run, judgement: Judgement) -> dict[str, Any]:
    """The `sequential` part of the summary; empty for a run that had one look. Times in seconds of judged traffic,
    `harm` and `safety` e-values as decimal logarithms, of which a FAIL needs `needed` and a PASS `needed_safety`."""
    if not run.limits.sequential:
        return {}
    paths = [(gate, gate.path) for gate in judgement.gates if gate.path is not None]
    ended = [str(info["ended"]) for info in run.infos if info.get("ended")]
    return {
        "alpha": run.limits.alpha,
        "judged_s": run.seconds,
        "ended": ended[-1] if ended else None,
        "arms_ended": {
            str(arm): {"offset_s": run.offset_s(trial.number, int(row["at_ns"])), "reason": str(row["why"])}
            for trial in run.trials
            for arm, row in (trial.info.get("ended_arms") or {}).items()
        },
        "paths": [
            {
                "arm": gate.arm,
                "gate": gate.gate,
                "unit": gate.path_unit,
                "limit": gate.path_limit,
                "verdict": gate.verdict,
                "decided_s": path.decided_s,
                "needed": path.needed,
                "needed_safety": path.needed_safety,
                **_columns(path),
            }
            for gate, path in paths
        ],
    }


def _columns(path: Path) -> dict[str, list[float]]:
    step = max(1, -(-len(path.at_s) // _MOST_POINTS))
    # The last point is always there.
    chosen = np.arange(len(path.at_s) - 1, -1, -step)[::-1] if len(path.at_s) else np.zeros(0, dtype=np.int64)
    return {name: getattr(path, name)[chosen].tolist() for name in ("at_s", "value", "low", "high", "harm", "safety")}
