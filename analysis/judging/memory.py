"""What an arm may hold of memory beside the control: a gate where the experiment asks.

The peak of a trial is one observation, of which fresh starts are the replicates.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from analysis.judging.gates import FAIL, INCONCLUSIVE, PASS, Gate
from analysis.run.memory import FIGURES, RunMemory
from analysis.statistics.distributions import t_quantile
from analysis.wording import bytes_text, counted

# The standard deviation of the log ratio of two peaks over fresh starts. It counts as four starts beside the run's own.
_SPREAD = 0.01
_STARTS = 4


def ratio_gate(
    memory: RunMemory, arm: str, control: str, limit: float, alpha: float, *, separate: bool = False
) -> Gate:
    """Whether the arm's highest memory is surely at most `limit` times the control's. In `separate` runs no trial has
    both."""
    figure = memory.shared_figure(arm, control)
    own, base = ({} if figure is None else memory.arms[name][figure] for name in (arm, control))
    both = sorted(set(own) & set(base))
    logs = np.array([math.log(own[trial] / base[trial]) for trial in both if own[trial] > 0 < base[trial]])
    unknown = Gate(
        arm=arm,
        gate="memory ratio",
        kind="memory",
        value=None,
        limit=limit,
        unit="ratio",
        verdict=INCONCLUSIVE,
        reason=f"The memory of {arm} and {control} was not both seen in one trial: watch the machines "
        "([bed] sample_s = 1), with arms that tailgate starts.",
    )
    if figure is None or not (logs.size or separate):
        return unknown
    if separate:
        # Nothing pairs the trials: the limits of both arms, at half the risk each.
        sides = [np.log([value for value in peaks.values() if value > 0]) for peaks in (own, base)]
        if not all(side.size for side in sides):
            return unknown
        (own_low, own_high), (base_low, base_high) = (ratio_limits(side, alpha / 2.0) for side in sides)
        low, high, ratio = own_low / base_high, own_high / base_low, math.exp(float(sides[0].mean() - sides[1].mean()))
        count = min(side.size for side in sides)
    else:
        low, high = ratio_limits(logs, alpha)
        ratio, count = float(np.exp(logs.mean())), logs.size
    verdict = PASS if high <= limit else FAIL if low > limit else INCONCLUSIVE
    most = f"{bytes_text(max(own.values()))} beside {bytes_text(max(base.values()))}"
    starts = counted(count, "trial") if count > 1 else "one trial, in which starts are taken to vary by 1 %"
    reason = (
        f"At its peak a replica holds {ratio:.3f} times what one of {control} does (between {low:.3f} and {high:.3f}; "
        f"{starts}; {most}, {FIGURES[figure].name}), limit {limit:g}."
    )
    return replace(unknown, value=ratio, interval=(low, high), verdict=verdict, reason=reason)


def ratio_limits(logs: np.ndarray[tuple[int], np.dtype[np.float64]], alpha: float) -> tuple[float, float]:
    """One-sided limits at level alpha each of the ratio whose logarithms the trials show, one of them at least.

    Student's t with the trials' own variance pooled with what is taken for granted of starts.
    """
    own = float(((logs - logs.mean()) ** 2).sum())
    freedom = _STARTS + logs.size - 1
    spread = math.sqrt((own + _STARTS * _SPREAD**2) / freedom)
    reach = float(t_quantile(1.0 - alpha, freedom)) * spread / math.sqrt(logs.size)
    return math.exp(float(logs.mean()) - reach), math.exp(float(logs.mean()) + reach)
