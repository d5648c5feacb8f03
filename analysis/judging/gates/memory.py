"""Memory: the peak of a replica is at most so many times that of the control's (`gates.max_memory_ratio`).

The peak of a trial is one observation, of which fresh starts are the replicates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from analysis.arrays import Floats
from analysis.judging.gates import FAIL, INCONCLUSIVE, PASS, Gate
from analysis.run.memory import FIGURES, RunMemory
from analysis.run.run import Run
from analysis.statistics.distributions import t_quantile
from analysis.wording import bytes_text, counted

# The standard deviation of the log ratio of two peaks over fresh starts, which counts as four starts.
_SPREAD = 0.01
_STARTS = 4


def memory_gates(run: Run, arm: str, memory: RunMemory) -> list[Gate]:
    """One gate where the experiment sets a limit."""
    limit = run.limits.max_memory_ratio
    if limit is None:
        return []
    control, alpha = run.control, run.limits.alpha
    figure = memory.shared_figure(arm, control)
    own, base = ({} if figure is None else memory.arms[name][figure] for name in (arm, control))
    value: float | None = None
    interval: tuple[float | None, float | None] = (None, None)
    verdict = INCONCLUSIVE
    reason = (
        f"The memory of {arm} and {control} was not both seen in one trial: watch the machines ([bed] sample_s = 1), "
        "with arms that tailgate starts."
    )
    found = _separate_limits(own, base, alpha) if run.separate else _paired_limits(own, base, alpha)
    if figure is not None and found is not None:
        value, low, high, trials = found
        interval = (low, high)
        verdict = PASS if high <= limit else FAIL if low > limit else INCONCLUSIVE
        starts = counted(trials, "trial") if trials > 1 else "one trial, in which starts are taken to vary by 1 %"
        most = f"{bytes_text(max(own.values()))} against {bytes_text(max(base.values()))}, {FIGURES[figure].name}"
        reason = (
            f"At its peak a replica holds {value:.3f} times what one of {control} does (between {low:.3f} and "
            f"{high:.3f}; {starts}; {most}), limit {limit:g}."
        )
    return [
        Gate(
            arm=arm,
            gate="memory ratio",
            kind="memory",
            value=value,
            limit=limit,
            unit="ratio",
            verdict=verdict,
            reason=reason,
            interval=interval,
        )
    ]


_Found = tuple[float, float, float, int]
"""The ratio, its limits, and the trials that they rest on."""


def _paired_limits(own: Mapping[int, float], base: Mapping[int, float], alpha: float) -> _Found | None:
    both = [trial for trial in sorted(set(own) & set(base)) if own[trial] > 0 < base[trial]]
    if not both:
        return None
    logs = np.log([own[trial] / base[trial] for trial in both])
    return (math.exp(float(logs.mean())), *ratio_limits(logs, alpha), len(both))


def _separate_limits(own: Mapping[int, float], base: Mapping[int, float], alpha: float) -> _Found | None:
    """Where no trial has both: the limits of each arm, at half the risk."""
    sides = [np.log([value for value in peaks.values() if value > 0]) for peaks in (own, base)]
    if not all(side.size for side in sides):
        return None
    (own_low, own_high), (base_low, base_high) = (ratio_limits(side, alpha / 2.0) for side in sides)
    ratio = math.exp(float(sides[0].mean() - sides[1].mean()))
    return ratio, own_low / base_high, own_high / base_low, min(side.size for side in sides)


def ratio_limits(logs: Floats, alpha: float) -> tuple[float, float]:
    """One-sided limits at level alpha each of the ratio whose logarithms the trials show, one of them at least.

    Student's t with the trials' own variance pooled with what is taken for granted of starts.
    """
    own = float(((logs - logs.mean()) ** 2).sum())
    freedom = _STARTS + logs.size - 1
    spread = math.sqrt((own + _STARTS * _SPREAD**2) / freedom)
    reach = float(t_quantile(1.0 - alpha, freedom)) * spread / math.sqrt(logs.size)
    return math.exp(float(logs.mean()) - reach), math.exp(float(logs.mean()) + reach)
