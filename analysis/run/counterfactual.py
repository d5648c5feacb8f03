"""What a quantile would have been had nothing compiled, with what the replay and the sample leave open of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from analysis.arrays import Bools, Floats, Ints
from analysis.nouns import counted
from analysis.run.run import Run
from analysis.run.slo import design_effect
from analysis.run.spikes import without_stalls_ms
from analysis.statistics.quantiles import block_histogram, quantile, quantile_interval
from analysis.statistics.resampling import bootstrap_limits, groups_of

_Q = 0.99
_CONFIDENCE = 0.95
_DRAWS = 999
_MOST_UNRECORDED = 0.05  # of the time that compiles held requests up: what no event accounts for
_LEAST_TIMED = 0.99  # share of answers whose queueing time must be known
_MOST_MISFIT = 0.5  # of the time that requests waited: how far the replay may be from what was seen
_RESOLUTION = 0.05  # of the quantile: how far off the replay of a server that is not quite a queue with slots is


@dataclass(frozen=True, slots=True, kw_only=True)
class Counterfactual:
    """A quantile without compiles in ms, and the share of the quantile seen that they explain in percent.

    `least_ms` and `most_ms`: what the replay leaves open of it for the requests of this run. `low_ms` and `high_ms`:
    two-sided limits at 95 % for such traffic, around that. NaN where the data set none. Where `withdrawn` says why the
    quantile cannot be known, all are NaN, but for the limits where only requests that failed behind a compile leave it
    open.
    """

    without_ms: float = math.nan
    least_ms: float = math.nan
    most_ms: float = math.nan
    low_ms: float = math.nan
    high_ms: float = math.nan
    explained_pct: float = math.nan
    explained_low_pct: float = math.nan
    explained_high_pct: float = math.nan
    withdrawn: str | None = None


def counterfactual(run: Run, arm: str, metric: str) -> Counterfactual:
    """p99 of ttft or e2e over the arm's measured requests, less what compiles delayed them by.

    The limits are order statistics on a sample shrunk for bunching in blocks, of the lower bound and the upper bound
    that the replay leaves. The share rests on the ratio of two quantiles of the same requests, whose errors go
    together: Student's t on the standard error of a block bootstrap that draws each block with and without its stalls.
    """
    withdrawn = _withdrawn(run, arm)
    if withdrawn is not None:
        return Counterfactual(withdrawn=withdrawn)
    requests, attribution = run.requests, run.attribution
    values, without = requests.metric_ms(metric), without_stalls_ms(requests, attribution, metric)
    own = np.flatnonzero(run.of_arm(arm) & run.usable & ~np.isnan(values))
    seen, block = values[own], run.block[own]
    left = seen if without is values else without[own]
    top, rest = quantile(seen, _Q), quantile(left, _Q)
    if not attribution.hit[own].any() and not (left < seen).any() and not attribution.unserved[own].any():
        low, high = _limits(left, block)
        return Counterfactual(
            without_ms=rest, least_ms=rest, most_ms=rest, low_ms=low, high_ms=high, explained_pct=0.0 * top
        )
    fast = without_stalls_ms(requests, attribution, metric, delay=attribution.delay_most)[own]
    # What failed behind a compile might have been answered at once.
    fast[attribution.unserved[own]] = 0.0
    slow = without_stalls_ms(requests, attribution, metric, delay=attribution.delay_least)[own]
    slack = _RESOLUTION + attribution.misfit.get(arm, 0.0)
    known = Counterfactual(
        least_ms=quantile(fast, _Q) * (1.0 - slack),
        most_ms=quantile(slow, _Q) * (1.0 + slack),
        low_ms=_limits(fast, block)[0],
        high_ms=_limits(slow, block)[1],
    )
    unserved = int(attribution.unserved[own].sum())
    if unserved > (1.0 - _Q) * len(seen):
        seen_of = f"{counted(unserved, 'request')} failed or {'was' if unserved == 1 else 'were'} cut off"
        reason = f"{seen_of} behind a compile: what they would have taken is not known"
        return replace(known, withdrawn=reason)
    shares = (math.nan, math.nan)
    if (left < seen).any():
        histogram = block_histogram(seen, block, left, block)
        first = np.array([trial.first_block for trial in run.trials])
        trial_of = np.searchsorted(first, np.unique(block), side="right")
        limits = (
            None
            if histogram.blocks < 2
            else bootstrap_limits(
                histogram,
                _Q,
                groups_of(trial_of),
                bound=0.0,
                alpha=(1.0 - _CONFIDENCE) / 2.0,
                draws=_DRAWS,
                rng=run.rng(3, run.arms.index(arm), ("ttft", "e2e").index(metric)),
            )
        )
        if limits is not None and limits.low is not None and limits.high is not None:
            # Stalls only add, so the share is never below 0.
            shares = (100.0 * max(0.0, 1.0 - math.exp(-limits.low)), 100.0 * max(0.0, 1.0 - math.exp(-limits.high)))
    return replace(
        known,
        without_ms=rest,
        explained_pct=100.0 * (1.0 - rest / top) if top > 0 else math.nan,
        explained_low_pct=shares[0],
        explained_high_pct=shares[1],
    )


def _limits(values: Floats, block: Ints) -> tuple[float, float]:
    effect = design_effect(values > quantile(values, _Q), block)
    return quantile_interval(values, _Q, confidence=_CONFIDENCE, design_effect=effect)


def _withdrawn(run: Run, arm: str) -> str | None:
    """Why nothing can be said of the arm without its compiles, in words; None where something can."""
    requests, attribution = run.requests, run.attribution
    own = run.of_arm(arm) & run.usable
    if run.records.events is None and run.account(arm).compiles:
        return "no compile events are recorded"
    lost_s = _unrecorded_s(run, own)
    if lost_s > 0.0:
        return f"requests report {lost_s:.3g} s of compiles that are in no recorded event, and left a backlog unseen"
    if not (own & attribution.hit).any() and not any(event.stalls for event in run.serving_events(arm)):
        return None
    if run.reported_open_loop is False:
        return "the load waited for the server, so without compiles other requests would have come"
    answered = own & requests.ok
    if requests.server_timed[answered].mean() < _LEAST_TIMED if answered.any() else True:
        return "the server does not report how long its requests queued (queue_ns)"
    if run.replicas(arm) > 1 and (requests.replica[answered] < 0).any():
        return "there are several replicas, and requests do not say which one answered (replica)"
    if attribution.misfit.get(arm, 0.0) > _MOST_MISFIT:
        return "its server did not take requests in the order in which they came, so the replay does not hold"
    return None


def _unrecorded_s(run: Run, own: Bools) -> float:
    """Seconds for which compiles held requests up by their servers' account, in no event; 0 below 5 % of all."""
    if not run.attribution.stall_ms.any():
        return 0.0
    stall_ms = np.where(own, run.attribution.stall_ms, 0.0)
    whole = float(stall_ms.sum())
    for rows in run.attribution.event_requests:
        stall_ms[rows] = 0.0
    rest = float(stall_ms.sum())
    return rest / 1e3 if rest > _MOST_UNRECORDED * whole else 0.0
