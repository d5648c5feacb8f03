"""Latency spikes: stretches in which requests took much longer than their length explains, and what caused them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tailgate.analysis.arrays import Bools, Floats, Ints
from tailgate.analysis.records.requests import Requests
from tailgate.analysis.run.attribution import CAUSES, OTHER, Attribution
from tailgate.analysis.run.compile_events import CompileEvent
from tailgate.analysis.statistics.quantiles import quantile, quantiles

_FEWEST_QUIET = 8
_MERGE_NS = 1_000_000_000
_MOST_SPIKES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    """One such stretch, and what share of it compiles explain."""

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
    """Find stretches of E2E excursions on every arm, worst first, at most 200, and attribute each.

    A compile that explains less than half of the excess is no cause.
    """
    spikes: list[Spike] = []
    for arm in requests.arms:
        rows, excess_ms = excursions(requests, attribution, arm=arm, control=control)
        own = [
            (event, np.union1d(hit, behind))
            for event, hit, behind in zip(events, attribution.event_requests, attribution.event_backlog, strict=True)
            if event.arm == arm and hit.size + behind.size
        ]
        for group in _stretches(requests, rows):
            over = excess_ms[np.searchsorted(rows, group)]
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
                    event_ids=tuple(event.event_id for event, affected in own if np.isin(group, affected).any()),
                    explained_pct=explained,
                )
            )
    spikes.sort(key=lambda spike: (-spike.peak_ms, spike.arm, spike.trial, spike.start_ns))
    return spikes[:_MOST_SPIKES]


def _stretches(requests: Requests, rows: Ints) -> Iterator[Ints]:
    """Yield the rows of each trial that were in flight less than a second apart."""
    for trial in np.unique(requests.trial[rows]).tolist():
        own = rows[requests.trial[rows] == trial]
        own = own[np.argsort(requests.start_ns[own], kind="stable")]
        latest = np.maximum.accumulate(requests.end_ns[own])
        yield from np.split(own, np.flatnonzero(requests.start_ns[own][1:] > latest[:-1] + _MERGE_NS) + 1)


def excursions(requests: Requests, attribution: Attribution, *, arm: str, control: str) -> tuple[Ints, Floats]:
    """Return the arm's excursions as ascending rows, and how much longer each took than its length explains.

    The excess of an excursion lies beyond that of quiet requests of the arm in its trial both in ms and as a ratio. An
    arm with fewer than eight quiet ones borrows the control's.
    """
    found = [(np.zeros(0, dtype=np.int64), np.zeros(0))]
    for trial in np.unique(requests.trial).tolist():
        own = requests.sound(arm, trial)
        for name in (arm, control):
            rows = own if name == arm else requests.sound(name, trial)
            quiet = rows[requests.ok[rows] & (attribution.cause[rows] == OTHER)]
            if (usual := usual_ms(requests, quiet)) is not None:
                shortest, ratio = _thresholds(requests.e2e_ms[quiet], expected_ms(requests, usual, quiet))
                took, expected = requests.e2e_ms[own], expected_ms(requests, usual, own)
                excess = took - expected
                beyond = (excess > shortest) & (took > ratio * expected)
                found.append((own[beyond], excess[beyond]))
                break
    rows, over = map(np.concatenate, zip(*found, strict=True))
    order = np.argsort(rows)
    return rows[order], over[order]


def usual_ms(requests: Requests, quiet: Ints | Bools) -> tuple[float, float] | None:
    """Return the quiet requests' time to a first token, and per further one; None for fewer than eight."""
    e2e = requests.e2e_ms[quiet]
    if len(e2e) < _FEWEST_QUIET:
        return None
    ttft, tpot = (quantile(requests.metric_ms(name, quiet), 0.5) for name in ("ttft", "tpot"))
    # An answer without tokens, such as a vector, is there at once: its end is its beginning.
    first = quantile(e2e, 0.5) if math.isnan(ttft) else ttft
    return first, 0.0 if math.isnan(tpot) else tpot


def expected_ms(requests: Requests, usual: tuple[float, float], rows: Ints) -> Floats:
    """Return the expected time of each row by its length."""
    first, each = usual
    return first + each * np.maximum(requests.output_tokens[rows] - 1, 0).astype(np.float64)


def _thresholds(e2e_ms: Floats, expected_ms: Floats) -> tuple[float, float]:
    """Return the excess in ms and the ratio beyond those of quiet requests: the upper quartile plus six interquartile
    ranges, at least half the median, and plus two of the log ratio."""
    known = (expected_ms > 0) & (e2e_ms > 0)
    lower, upper = quantiles(e2e_ms - expected_ms, (0.25, 0.75), in_place=True)
    low, high = quantiles(np.log(e2e_ms[known] / expected_ms[known]), (0.25, 0.75), in_place=True)
    ratio = 1.0 if math.isnan(low) else math.exp(high + 2.0 * (high - low))
    return max(float(upper + 6.0 * (upper - lower)), 0.5 * quantile(e2e_ms, 0.5)), ratio
