"""What an arm may hold of memory beside the control, and how fast that may grow: gates where the experiment asks.

The peak of a trial is one observation, of which fresh starts are the replicates. Growth is judged past the cold start,
where it lasts: what grows ever less is a warm-up, which a longer trial tells from a leak.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import stats

from analysis.judging.gates import FAIL, INCONCLUSIVE, PASS, Gate
from analysis.judging.wording import bytes_text, digits, sentence
from analysis.nouns import counted
from analysis.run.memory import DEVICE_FIGURES, FIGURES, HeldMemory, RunMemory
from analysis.settings.gate_limits import GateLimits

# The standard deviation of the log ratio of two peaks over fresh starts. It counts as four starts beside the run's own.
_SPREAD = 0.01
_STARTS = 4

_UNKNOWN = "watch the machines ([bed] sample_s = 1), with arms that tailgate starts"


def memory_gates(memory: RunMemory, arm: str, control: str, limits: GateLimits) -> list[Gate]:
    """The gates that the experiment sets on the arm's memory."""
    gates = []
    if limits.max_memory_ratio is not None:
        gates.append(ratio_gate(memory, arm, control, limits.max_memory_ratio, limits.alpha))
    if limits.max_memory_growth_pct_per_hour is not None:
        gates.append(growth_gate(memory, arm, limits.max_memory_growth_pct_per_hour))
    return gates


def ratio_gate(memory: RunMemory, arm: str, control: str, limit: float, alpha: float) -> Gate:
    """Whether the arm's highest memory is surely at most `limit` times the control's."""
    figure = memory.shared_figure(arm, control)
    own, base = ({} if figure is None else memory.arms[name][figure].peaks for name in (arm, control))
    logs = np.array(
        [math.log(own[trial] / base[trial]) for trial in sorted(set(own) & set(base)) if own[trial] > 0 < base[trial]]
    )
    if figure is None or not logs.size:
        reason = f"The memory of {arm} and {control} was not both seen in one trial: {_UNKNOWN}."
        return _gate(arm, "memory ratio", None, limit, "ratio", INCONCLUSIVE, reason)
    low, high = ratio_limits(logs, alpha)
    verdict = PASS if high <= limit else FAIL if low > limit else INCONCLUSIVE
    ratio = float(np.exp(logs.mean()))
    most = f"{bytes_text(max(own.values()))} beside {bytes_text(max(base.values()))}"
    starts = counted(logs.size, "trial") if logs.size > 1 else "one trial, in which starts are taken to vary by 1 %"
    reason = (
        f"At its peak a replica holds {ratio:.3f} times what one of {control} does (between {low:.3f} and {high:.3f}; "
        f"{starts}; {most}, {FIGURES[figure].name}), limit {limit:g}."
    )
    return _gate(arm, "memory ratio", ratio, limit, "ratio", verdict, reason)


def ratio_limits(logs: np.ndarray[tuple[int], np.dtype[np.float64]], alpha: float) -> tuple[float, float]:
    """One-sided limits at level alpha each of the ratio whose logarithms the trials show, one of them at least.

    Student's t with the trials' own variance pooled with what is taken for granted of starts.
    """
    own = float(((logs - logs.mean()) ** 2).sum())
    freedom = _STARTS + logs.size - 1
    spread = math.sqrt((own + _STARTS * _SPREAD**2) / freedom)
    reach = float(stats.t.ppf(1.0 - alpha, freedom)) * spread / math.sqrt(logs.size)
    return math.exp(float(logs.mean()) - reach), math.exp(float(logs.mean()) + reach)


def growth_gate(memory: RunMemory, arm: str, limit: float) -> Gate:
    """Whether no figure of the arm's memory surely grows faster than `limit` percent of its peak in an hour.

    FAIL for a figure whose growth is surely faster and does not slow down.
    """
    figures = memory.arms[arm]
    # The process retains telemetry for who asks for it, up to a limit, which is no matter of the arm's. Of an arm on a
    # card it is also many compile workers, whose pages are counted once for each.
    left_out = {"process"} if "engine" in figures or arm in memory.on_card else set()
    judged = [item for name, item in figures.items() if name not in left_out]
    held = [item for item in judged if item.growth is not None]
    if not held:
        known = "its trials are too short past the cold start to tell" if judged else f"it was not seen: {_UNKNOWN}"
        return _gate(
            arm,
            "memory growth",
            None,
            limit,
            "pct",
            INCONCLUSIVE,
            f"Whether memory of {arm} grows is not known: {known}.",
        )
    order = (FAIL, INCONCLUSIVE, PASS)
    worst = min(held, key=lambda item: (order.index(growth_verdict(item, limit)), -growth_pct(item)[0]))
    verdict = growth_verdict(worst, limit)
    seen, low, high = growth_pct(worst)
    unseen = arm in memory.on_card and not any(item.figure in DEVICE_FIGURES for item in held)
    if unseen and verdict == PASS:
        reason = f"Memory of {arm} on its card was not seen long enough to tell whether it grows: {_UNKNOWN}."
        return _gate(arm, "memory growth", None, limit, "pct", INCONCLUSIVE, reason)
    slowing = verdict == INCONCLUSIVE and worst.slowing and low > limit
    why = ", less at the end than at the beginning, so that the warm-up may not be over" if slowing else ""
    reason = (
        f"{sentence([FIGURES[worst.figure].name])} grows by {_pct(seen)} of its peak in an hour "
        f"(between {_pct(low)} and {_pct(high)}; {counted(len(worst.peaks), 'trial')}){why}, limit {limit:g} %."
    )
    return _gate(arm, "memory growth", seen, limit, "pct", verdict, reason)


def growth_pct(held: HeldMemory) -> tuple[float, float, float]:
    """(slope, lower limit, upper limit) in percent of the peak an hour, of a figure whose growth is known."""
    assert held.growth is not None
    whole = 100.0 / max(held.peak, 1.0)
    return held.growth.slope * whole, held.growth.low * whole, held.growth.high * whole


def growth_verdict(held: HeldMemory, limit: float) -> str:
    """What one figure says."""
    _, low, high = growth_pct(held)
    if high <= limit:
        return PASS
    return FAIL if low > limit and not held.slowing else INCONCLUSIVE


def _pct(value: float) -> str:
    return f"{digits(value)} %" if math.isfinite(value) else "anything"


def _gate(arm: str, gate: str, value: float | None, limit: float, unit: str, verdict: str, reason: str) -> Gate:
    return Gate(arm=arm, gate=gate, kind="memory", value=value, limit=limit, unit=unit, verdict=verdict, reason=reason)
