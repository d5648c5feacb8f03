"""Latency spikes: stretches in which requests took much longer than their length explains, and what caused them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from analysis.arrays import Bools, Floats, Ints
from analysis.records.requests import Requests
from analysis.run.attribution import CAUSES, NO_REQUESTS, OTHER, Attribution
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
    requests: Requests,
    attribution: Attribution,
    events: Sequence[CompileEvent],
    *,
    control: str,
    machine: Ints | None = None,
) -> list[Spike]:
    """Excursions of E2E on every arm, worst first, at most 200; each attributed.

    What a request should have taken is the arm's own compile-quiet median TTFT plus its median TPOT for each further
    token. A request is an excursion when the excess over that lies beyond what quiet requests show in both senses:
    in ms (upper quartile plus six interquartile ranges, at least half the quiet median) and as a ratio (upper quartile
    plus two interquartile ranges of its log), so that neither a long answer nor a short one is taken for a stall.
    Excursions in flight less than a second apart are one spike. An arm with fewer than eight quiet requests borrows
    the control's baseline. With `machine`, the number of each request's, each machine has baselines of its own.
    """
    spikes: list[Spike] = []
    for name in requests.arms:
        beyond = excursions(requests, attribution, arm=name, control=control, machine=machine)
        for trial in np.unique(requests.trial[beyond.rows]).tolist():
            of_trial = requests.trial[beyond.rows] == trial
            rows, excess = beyond.rows[of_trial], beyond.excess_ms[of_trial]
            spikes.extend(_merged(requests, attribution, events, name, trial, rows, excess))
    spikes.sort(key=lambda spike: (-spike.peak_ms, spike.arm, spike.trial, spike.start_ns))
    return spikes[:_MOST_SPIKES]


@dataclass(frozen=True, slots=True, kw_only=True)
class Excursions:
    """Requests that took much longer than their length explains, and by how much; both of shape (n,)."""

    rows: Ints
    excess_ms: Floats


def excursions(
    requests: Requests, attribution: Attribution, *, arm: str, control: str, machine: Ints | None = None
) -> Excursions:
    """The arm's excursions of E2E as `find_spikes` defines them, request by request."""
    if machine is None:
        return _excursions(requests, attribution, np.ones(len(requests), dtype=np.bool_), arm, control)
    found = [_excursions(requests, attribution, machine == place, arm, control) for place in np.unique(machine)]
    rows = np.concatenate([part.rows for part in found] or [NO_REQUESTS])
    order = np.argsort(rows, kind="stable")
    excess = np.concatenate([part.excess_ms for part in found] or [np.zeros(0)])
    return Excursions(rows=rows[order], excess_ms=excess[order])


def _excursions(requests: Requests, attribution: Attribution, among: Bools, arm: str, control: str) -> Excursions:
    quiet = requests.ok & (attribution.cause == OTHER) & among
    baselines = (_baseline(requests, quiet & requests.of_arm(name)) for name in (arm, control))
    baseline = next((known for known in baselines if known is not None), None)
    own = np.flatnonzero(requests.of_arm(arm) & ~np.isnan(requests.e2e_ms) & among)
    if baseline is None:
        return Excursions(rows=own[:0], excess_ms=np.zeros(0))
    expected, took = baseline.expected_ms(requests.output_tokens[own]), requests.e2e_ms[own]
    excess = took - expected
    beyond = (excess > baseline.threshold_ms) & (took > baseline.threshold_ratio * expected)
    return Excursions(rows=own[beyond], excess_ms=excess[beyond])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Baseline:
    ttft_ms: float
    tpot_ms: float
    threshold_ms: float = 0.0
    threshold_ratio: float = 1.0

    def expected_ms(self, output_tokens: Ints) -> Floats:
        return self.ttft_ms + self.tpot_ms * np.maximum(output_tokens - 1, 0).astype(np.float64)


def normal_e2e_ms(requests: Requests, quiet: Bools) -> Floats | None:
    """What each request should take by its length, from the quiet requests; None when fewer than eight are quiet."""
    baseline = _baseline(requests, quiet)
    return None if baseline is None else baseline.expected_ms(requests.output_tokens)


def _baseline(requests: Requests, quiet: Bools) -> _Baseline | None:
    if int(quiet.sum()) < _FEWEST_QUIET:
        return None
    rows = np.flatnonzero(quiet)
    ttft = quantile(requests.ttft_ms[rows], 0.5)
    tpot = quantile(requests.tpot_ms[rows], 0.5)
    e2e = requests.e2e_ms[rows]
    # An answer without tokens, such as a vector, is there at once: its end is its beginning.
    first = quantile(e2e, 0.5) if math.isnan(ttft) else ttft
    shape = _Baseline(ttft_ms=first, tpot_ms=0.0 if math.isnan(tpot) else tpot)
    expected = shape.expected_ms(requests.output_tokens[rows])
    known = (expected > 0) & (e2e > 0)
    lower, upper = quantiles(e2e - expected, (0.25, 0.75))
    low, high = quantiles(np.log(e2e[known] / expected[known]), (0.25, 0.75))
    ratio = 1.0 if math.isnan(low) else math.exp(high + 2.0 * (high - low))
    threshold = max(float(upper + 6.0 * (upper - lower)), 0.5 * quantile(e2e, 0.5))
    return replace(shape, threshold_ms=threshold, threshold_ratio=ratio)


def _merged(
    requests: Requests,
    attribution: Attribution,
    events: Sequence[CompileEvent],
    arm: str,
    trial: int,
    rows: Ints,
    excess: Floats,
) -> list[Spike]:
    order = np.argsort(requests.start_ns[rows], kind="stable")
    rows, excess = rows[order], excess[order]
    latest = np.maximum.accumulate(requests.end_ns[rows])
    breaks = np.flatnonzero(requests.start_ns[rows][1:] > latest[:-1] + _MERGE_NS) + 1
    spikes = []
    own_events = [
        (event, np.union1d(hit, behind))
        for event, hit, behind in zip(events, attribution.event_requests, attribution.event_backlog, strict=True)
        if event.arm == arm and event.trial == trial and hit.size + behind.size
    ]
    for group, over in zip(np.split(rows, breaks), np.split(excess, breaks), strict=True):
        explained = 100.0 * float(np.minimum(attribution.most_ms[group], over).sum() / over.sum())
        members = [event.event_id for event, hit in own_events if np.isin(group, hit, assume_unique=True).any()]
        # A compile that explains less than half of the excess is a bystander, not the cause.
        cause = int(attribution.cause[group].max()) if explained >= 50.0 else OTHER
        spikes.append(
            Spike(
                arm=arm,
                trial=trial,
                start_ns=int(requests.start_ns[group].min()),
                end_ns=int(requests.end_ns[group].max()),
                peak_ms=float(requests.e2e_ms[group].max()),
                requests=int(group.size),
                cause=CAUSES[cause],
                event_ids=tuple(members),
                explained_pct=explained,
            )
        )
    return spikes
