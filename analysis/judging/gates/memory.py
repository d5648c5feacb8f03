"""Memory: the peak of a replica is at most so many times that of the control's (`gates.max_memory_ratio`).

The peak of a trial is one observation, of which fresh starts are the replicates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from analysis.arrays import Floats
from analysis.judging.gates import INCONCLUSIVE, Gate, status
from analysis.run.memory import FIGURES, Peaks, shared_figure
from analysis.run.run import Run
from analysis.statistics.distributions import t_quantile
from analysis.wording import bytes_text, counted

# The standard deviation of the log ratio of two peaks over fresh starts, which counts as four starts.
_SPREAD = 0.01
_STARTS = 4


def memory_gates(run: Run, arm: str, memory: Mapping[str, Peaks]) -> list[Gate]:
    """One gate where the experiment sets a limit."""
    limit = run.limits.max_memory_ratio
    if limit is None:
        return []
    gate = Gate(
        arm=arm,
        gate="memory ratio",
        kind="memory",
        value=None,
        limit=limit,
        unit="ratio",
        verdict=INCONCLUSIVE,
        reason=f"The memory of {arm} and {run.control} was not both seen in one trial: watch the machines "
        "([machines] sample_s = 1), with arms that tailgate starts.",
    )
    figure = shared_figure(memory[arm], memory[run.control])
    if figure is None:
        return [gate]
    own, base = memory[arm][figure], memory[run.control][figure]
    found = _separate(own, base, run.limits.alpha) if run.separate else _paired(own, base, run.limits.alpha)
    if found is None:
        return [gate]
    value, low, high = found
    most = f"{bytes_text(max(own.values()))} against {bytes_text(max(base.values()))} of {FIGURES[figure].name}"
    reason = (
        f"At its peak a replica holds {value:.3f} times what one of {run.control} does (between {low:.3f} and "
        f"{high:.3f}; {counted(len(own), 'trial')}; {most}), limit {limit:g}."
    )
    return [replace(gate, value=value, verdict=status(low, high, limit), reason=reason, interval=(low, high))]


def _paired(own: Mapping[int, float], base: Mapping[int, float], alpha: float) -> tuple[float, float, float] | None:
    """The ratio and its limits over trials that have both; None without one."""
    logs = np.log([own[trial] / base[trial] for trial in sorted(own.keys() & base.keys())])
    return (math.exp(float(logs.mean())), *ratio_limits(logs, alpha)) if logs.size else None


def _separate(own: Mapping[int, float], base: Mapping[int, float], alpha: float) -> tuple[float, float, float]:
    """The ratio where no trial has both, with the limits of each arm at half the risk."""
    logs, others = np.log(list(own.values())), np.log(list(base.values()))
    (own_low, own_high), (base_low, base_high) = (ratio_limits(side, alpha / 2.0) for side in (logs, others))
    return math.exp(float(logs.mean() - others.mean())), own_low / base_high, own_high / base_low


def ratio_limits(logs: Floats, alpha: float) -> tuple[float, float]:
    """One-sided limits at level alpha each of the ratio whose logarithms the trials show, one of them at least.

    Student's t with the trials' own variance pooled with what is taken for granted of starts.
    """
    own = float(((logs - logs.mean()) ** 2).sum())
    freedom = _STARTS + logs.size - 1
    spread = math.sqrt((own + _STARTS * _SPREAD**2) / freedom)
    reach = float(t_quantile(1.0 - alpha, freedom)) * spread / math.sqrt(logs.size)
    return math.exp(float(logs.mean()) - reach), math.exp(float(logs.mean()) + reach)
