"""Latency spikes: stretches in which requests took much longer than their length explains, and what caused them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

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
    requests: Requests,
    attribution: Attribution,
    events: Sequence[CompileEvent],
    *,
    control: str,
    machine: Ints | None = None,
) -> list[Spike]:
    """Stretches of excursions of E2E on every arm, worst first, at most 200; each attributed.

    Excursions in flight less than a second apart are one spike. A compile that explains less than half of the excess is
    no cause.
    """
    spikes: list[Spike] = []
    for arm in requests.arms:
        beyond = excursions(requests, attribution, arm=arm, control=control, machine=machine)
        own = [
            (event, np.union1d(hit, behind))
            for event, hit, behind in zip(events, attribution.event_requests, attribution.event_backlog, strict=True)
            if event.arm == arm and hit.size + behind.size
        ]
        excess = dict(zip(beyond.rows.tolist(), beyond.excess_ms.tolist(), strict=True))
        for group in _stretches(requests, beyond.rows):
            over = np.array([excess[row] for row in group.tolist()])
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Excursions:
    """Requests that took much longer than their length explains, and by how much; both of shape (n,)."""

    rows: Ints
    excess_ms: Floats


def excursions(
    requests: Requests, attribution: Attribution, *, arm: str, control: str, machine: Ints | None = None
) -> Excursions:
    """The arm's excursions of E2E, request by request.

    What a request should have taken is the arm's own compile-quiet median TTFT plus its median TPOT for each further
    token. A request is an excursion when the excess over that lies beyond what quiet requests show in both senses:
    in ms (upper quartile plus six interquartile ranges, at least half the quiet median) and as a ratio (upper quartile
    plus two interquartile ranges of its log), so that neither a long answer nor a short one is taken for a stall. An
    arm with fewer than eight quiet requests borrows the control's baseline. With `machine`, the number of each
    request's, each machine has baselines of its own.
    """
    excess = np.zeros(len(requests))
    quiet = requests.ok & (attribution.cause == OTHER)
    own = requests.of_arm(arm) & ~np.isnan(requests.e2e_ms)
    for place in (None,) if machine is None else np.unique(machine).tolist():
        on_it = np.ones(len(requests), dtype=np.bool_) if place is None else machine == place
        baselines = (_baseline(requests, quiet & on_it & requests.of_arm(name)) for name in (arm, control))
        if (baseline := next(filter(None, baselines), None)) is not None:
            rows = np.flatnonzero(own & on_it)
            expected, took = baseline.expected_ms(requests.output_tokens[rows]), requests.e2e_ms[rows]
            beyond = (took - expected > baseline.threshold_ms) & (took > baseline.threshold_ratio * expected)
            excess[rows[beyond]] = (took - expected)[beyond]
    rows = np.flatnonzero(excess > 0)
    return Excursions(rows=rows, excess_ms=excess[rows])


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
