"""Latency spikes: stretches in which requests took much longer than their length explains, and what caused them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from analysis.arrays import Bools, Floats, Ints
from analysis.records.requests import Requests
from analysis.run.attribution import CAUSES, OTHER, Attribution
from analysis.run.compile_events import CompileEvent
from analysis.statistics.quantiles import quantile, quantiles

_FEWEST_QUIET = 8
_MERGE_NS = 1_000_000_000
_MOST_SPIKES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    """A stretch in which requests took much longer than their length explains, and what share compiles explain."""

    arm: str
    trial: int
    start_ns: int
    end_ns: int
    peak_ms: float
    requests: int
    cause: str
    event_ids: tuple[str, ...]
    explained_pct: float


def find_spikes(
    requests: Requests, attribution: Attribution, events: Sequence[CompileEvent], *, control: str
) -> list[Spike]:
    """Stretches of excursions of E2E on every arm, worst first, at most 200; each attributed.

    Excursions in flight less than a second apart are one spike. A compile that explains less than half of the excess is
    no cause.
    """
    spikes: list[Spike] = []
    for arm in requests.arms:
        excess = excess_ms(requests, attribution, arm=arm, control=control)
        own = [
            (event, np.union1d(hit, behind))
            for event, hit, behind in zip(events, attribution.event_requests, attribution.event_backlog, strict=True)
            if event.arm == arm and hit.size + behind.size
        ]
        for group in _stretches(requests, np.flatnonzero(excess)):
            over = excess[group]
            explained = 100.0 * float(np.minimum(attribution.most_ms[group], over).sum() / over.sum())
            spikes.append(
                Spike(
                    arm=arm,
                    trial=int(requests.trial[group[0]]),
                    start_ns=int(requests.start_ns[group].min()),
                    end_ns=int(requests.end_ns[group].max()),
                    peak_ms=float(requests.e2e_ms[group].max()),
                    requests=int(group.size),
                    cause=CAUSES[int(attribution.cause[group].max()) if explained >= 50.0 else OTHER],
                    event_ids=tuple(event.event_id for event, met in own if np.isin(group, met).any()),
                    explained_pct=explained,
                )
            )
    spikes.sort(key=lambda spike: (-spike.peak_ms, spike.arm, spike.trial, spike.start_ns))
    return spikes[:_MOST_SPIKES]


def _stretches(requests: Requests, rows: Ints) -> Iterator[Ints]:
    """The rows of each trial that were in flight less than a second apart."""
    for trial in np.unique(requests.trial[rows]).tolist():
        own = rows[requests.trial[rows] == trial]
        own = own[np.argsort(requests.start_ns[own], kind="stable")]
        latest = np.maximum.accumulate(requests.end_ns[own])
        yield from np.split(own, np.flatnonzero(requests.start_ns[own][1:] > latest[:-1] + _MERGE_NS) + 1)


def excess_ms(requests: Requests, attribution: Attribution, *, arm: str, control: str) -> Floats:
    """By how much each excursion of the arm took longer than its length explains, shape (requests,); 0 for the rest.

    What a request should have taken is the arm's own compile-quiet median TTFT in its trial plus its median TPOT for
    each further token. A request is an excursion when the excess over that lies beyond what quiet requests show in both
    senses: in ms (upper quartile plus six interquartile ranges, at least half the quiet median) and as a ratio (upper
    quartile plus two interquartile ranges of its log), so that neither a long answer nor a short one is taken for a
    stall. An arm with fewer than eight quiet requests in a trial borrows the control's.
    """
    excess = np.zeros(len(requests))
    for trial in np.unique(requests.trial).tolist():
        in_trial = requests.trial == trial
        for name in (arm, control):
            quiet = requests.ok & (attribution.cause == OTHER) & in_trial & requests.of_arm(name)
            expected = normal_e2e_ms(requests, quiet)
            if expected is not None:
                over = requests.e2e_ms - expected
                shortest, ratio = _thresholds(requests.e2e_ms[quiet], expected[quiet])
                beyond = (over > shortest) & (requests.e2e_ms > ratio * expected) & in_trial & requests.of_arm(arm)
                excess[beyond] = over[beyond]
                break
    return excess


def normal_e2e_ms(requests: Requests, quiet: Bools) -> Floats | None:
    """What each request should take by its length, from the quiet requests; None when fewer than eight are quiet."""
    if int(quiet.sum()) < _FEWEST_QUIET:
        return None
    ttft, tpot = quantile(requests.ttft_ms[quiet], 0.5), quantile(requests.tpot_ms[quiet], 0.5)
    # An answer without tokens, such as a vector, is there at once: its end is its beginning.
    first = quantile(requests.e2e_ms[quiet], 0.5) if math.isnan(ttft) else ttft
    further = np.maximum(requests.output_tokens - 1, 0).astype(np.float64)
    return np.asarray(first + (0.0 if math.isnan(tpot) else tpot) * further)


def _thresholds(e2e_ms: Floats, expected_ms: Floats) -> tuple[float, float]:
    """The excess in ms, and the ratio, that quiet requests do not show."""
    known = (expected_ms > 0) & (e2e_ms > 0)
    lower, upper = quantiles(e2e_ms - expected_ms, (0.25, 0.75))
    low, high = quantiles(np.log(e2e_ms[known] / expected_ms[known]), (0.25, 0.75))
    ratio = 1.0 if math.isnan(low) else math.exp(high + 2.0 * (high - low))
    return max(float(upper + 6.0 * (upper - lower)), 0.5 * quantile(e2e_ms, 0.5)), ratio
