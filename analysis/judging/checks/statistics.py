"""Whether the data can carry the statistics: enough blocks, a tail to speak of, stretches that do not look alike."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.judging.validity import Check
from analysis.settings.gate_limits import GateLimits
from analysis.statistics.compare import Comparison
from analysis.statistics.planning import TAIL_REQUESTS
from analysis.wording import counted

FEWEST_STARTS = 3
# Limits are widened for drift. What lasts so long that neighbours are nearly the same has shown too little of itself.
_MOST_CORRELATION = 0.7


def check_blocks(arm: str, blocks: int, limits: GateLimits, block_s: float) -> Check:
    """The comparison rests on enough time blocks."""
    seen = f"{arm} can be compared over {counted(blocks, 'steady block')} of {block_s:g} s"
    return _enough("blocks", seen, blocks, limits.min_blocks, "noninferiority", arm=arm)


def check_length(blocks: int, limits: GateLimits, block_s: float) -> Check:
    """The whole run, cold start and compiles included, has enough time blocks to judge SLOs by."""
    seen = f"The run has {counted(blocks, 'block')} of {block_s:g} s"
    return _enough("run length", seen, blocks, limits.min_blocks, "slo")


def check_cold_starts(starts: int) -> Check:
    """There were enough cold starts, each in a trial of its own, to say how they differ."""
    seen = f"The run has {counted(starts, 'cold start')}"
    remedy = f"Set trials.count to {FEWEST_STARTS} or more: each trial starts cold."
    return _enough("cold starts", seen, starts, FEWEST_STARTS, "cold", why=" to say how they differ", remedy=remedy)


def check_tail(arm: str, requests: int, quantile: float) -> Check:
    """Enough requests lie beyond the quantile to speak of it."""
    beyond = requests * (1.0 - quantile)
    put = "puts" if requests == 1 else "put"
    seen = f"{counted(requests, 'compared request')} {put} {beyond:.1f} beyond p{100.0 * quantile:.10g}"
    return _enough("tail", seen, beyond, TAIL_REQUESTS, "noninferiority", arm=arm, why=" to speak of it")


def _enough(
    check: str,
    seen: str,
    count: float,
    needed: int,
    kind: str,
    *,
    arm: str | None = None,
    why: str = "",
    remedy: str = "",
) -> Check:
    """There is as much as is needed; `seen` says what there is."""
    ok = count >= needed - 1e-9
    return Check(
        check=check,
        ok=ok,
        value=float(count),
        limit=float(needed),
        arm=arm,
        reason=f"{seen}." if ok else f"{seen}; {needed} are needed{why}.",
        affects=(kind,),
        remedy=remedy,
    )


def check_autocorrelation(arm: str, comparisons: Sequence[Comparison], *, lengths_change: bool = False) -> Check:
    """Neighbouring groups of blocks do not resemble each other, as resampling them assumes. `lengths_change`: those
    of the traffic do meanwhile, as the experiment asked."""
    worst = max(
        (item for item in comparisons if item.autocorrelation is not None),
        key=lambda item: item.autocorrelation or 0.0,
        default=None,
    )
    if worst is None or worst.autocorrelation is None:
        return Check(
            check="block autocorrelation",
            ok=True,
            arm=arm,
            reason="Too few blocks to tell whether neighbouring ones resemble each other.",
            affects=("noninferiority",),
        )
    ok = worst.autocorrelation <= _MOST_CORRELATION
    lasts = "something lasts for longer than a stretch"
    lasts += ", perhaps the lengths that change (traffic.length_scales)" if lengths_change else ""
    return Check(
        check="block autocorrelation",
        ok=ok,
        value=worst.autocorrelation,
        limit=_MOST_CORRELATION,
        arm=arm,
        reason=f"The difference to the control in neighbouring stretches ({worst.groups} in all) correlates by "
        f"{worst.autocorrelation:.2f}" + ("." if ok else f", limit {_MOST_CORRELATION:.2f}: {lasts}."),
        affects=("noninferiority",),
        remedy="Run longer, so that stretches get longer, or run six trials or more.",
    )
