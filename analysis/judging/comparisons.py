"""Every comparison of a run: five latencies at five quantiles and more, of steady traffic of an arm and the control."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tailgate.analysis.arrays import Bools, Ints
from tailgate.analysis.judging.paths import Path, exchange_of, with_evidence
from tailgate.analysis.run.gaps import gaps_of
from tailgate.analysis.run.pairs import drawn, drawn_pairs
from tailgate.analysis.run.run import Run
from tailgate.analysis.run.startup import start_spread
from tailgate.analysis.run.trials import Machines
from tailgate.analysis.settings.metrics import JUDGED_METRICS
from tailgate.analysis.statistics.compare import (
    Comparison,
    Sample,
    compare,
    decide,
    description,
    equal_counts,
)
from tailgate.analysis.statistics.sequential import SEGMENTS
from tailgate.analysis.statistics.unpaired import compare_separate

STEP_QUANTILES = (0.5, 0.9)  # that a step of a ramp is left by: few requests say little of a tail
QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)
_SMALLEST_MS = 1e-3
_UNEVEN = 1.25  # times as many requests as the other arm
MOST_GAPS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparisons:
    """What was compared, arm by arm. `gated` are decided (see `compare.decide`); `secondary` have no verdict, nor
    have `by_machine`: what gates, on each machine where there are several."""

    gated: tuple[Comparison, ...] = ()
    paths: tuple[Path | None, ...] = ()  # of each of those that gate; None where one analysis decides
    by_machine: tuple[Comparison, ...] = ()
    secondary: tuple[Comparison, ...] = ()


def comparisons(run: Run, *, secondary: bool = True) -> Comparisons:
    """Return the comparisons that gate and, if `secondary`, all others. FAILs are adjusted over gating ones alone."""
    gated: list[tuple[Comparison, Path | None]] = []
    others: list[Comparison] = []
    by_machine: list[Comparison] = []
    limits = run.limits
    qs = sorted({*QUANTILES, *limits.quantiles}) if secondary else limits.quantiles
    for arm in run.treatments:
        rows = steady_rows(run, arm)
        for metric in run.metrics if secondary else limits.metrics:
            gates = limits.quantiles if metric in limits.metrics else ()
            samples = samples_of(run, metric, rows)
            items = compared(run, arm, metric, samples, qs)
            others += [item for item in items if item.quantile not in gates]
            gated += _with_evidence(run, rows, [item for item in items if item.quantile in gates])
            if gates and len(run.machines) > 1:
                by_machine += _by_machine(run, arm, metric, samples, gates)
    decided = tuple(item for item, _ in gated)
    return Comparisons(
        gated=decided if limits.sequential else tuple(decide(decided)),
        paths=tuple(path for _, path in gated),
        by_machine=tuple(by_machine),
        secondary=tuple(replace(item, reason=description(item)) for item in others),
    )


def step_comparisons(run: Run, arm: str, margin: float) -> list[Comparison]:
    """Compare the arm at the quantiles of a ramp's step, each with the margin of the steps."""
    rows = steady_rows(run, arm)
    found: list[Comparison] = []
    for metric in run.limits.metrics:
        items = compared(run, arm, metric, samples_of(run, metric, rows), STEP_QUANTILES)
        held = [replace(item, margin=margin) for item in items]
        found += [item for item, _ in _with_evidence(run, rows, held, sooner=False)]
    return found


def _with_evidence(
    run: Run, rows: Rows, items: Sequence[Comparison], *, sooner: bool = True
) -> list[tuple[Comparison, Path | None]]:
    """Decide the comparisons of one metric by interim evidence, with its paths; unchanged if only the whole run
    decides. `sooner`: large effects may decide by segments of blocks."""
    if not run.limits.sequential or not items:
        return [(item, None) for item in items]
    samples = samples_of(run, items[0].metric, rows, segments=SEGMENTS)
    quantiles = {*run.limits.quantiles, *(STEP_QUANTILES if run.records.weights else ())}
    gates = len(run.treatments) * len(run.limits.metrics) * len(quantiles)
    # Arms that take turns within a block share no segment.
    return [with_evidence(run, item, samples, gates=gates, sooner=sooner and not run.in_turn) for item in items]


def _by_machine(
    run: Run, arm: str, metric: str, samples: tuple[Sample, Sample], qs: Sequence[float]
) -> list[Comparison]:
    items: list[Comparison] = []
    for place, machine in enumerate(run.machines.names):
        treatment, control = (sample.only(run.machines.codes(sample.trial) == place) for sample in samples)
        items += [replace(item, machine=machine) for item in compared(run, arm, metric, (treatment, control), qs)]
    return items


def compared(run: Run, arm: str, metric: str, samples: tuple[Sample, Sample], qs: Sequence[float]) -> list[Comparison]:
    """Compare `arm` with the control, undecided, by samples of one metric, at the quantiles `qs`."""
    margin, alpha = run.limits.margin_of(metric), run.limits.alpha
    if run.separate:
        items = compare_separate(
            *samples,
            qs=qs,
            margin=margin,
            alpha=alpha,
            restart_spread=start_spread(run, arm),
            day_spread=run.limits.day_spread,
        )
    else:
        spread, machines, least = start_spread(run, arm), run.machines.of_trial, run.limits.min_blocks
        items = compare(
            *samples, qs=qs, margin=margin, alpha=alpha, restart_spread=spread, machines=machines, min_blocks=least
        )
        if not all(map(len, samples)):
            why = f"none past the cold start of {run.limits.cold_s:g} s that no compile delayed"
            items = [replace(item, obstacle=f"{item.obstacle}, {why}") for item in items]
    fewer = (run.control if len(samples[1]) < len(samples[0]) else arm) if run.separate else ""
    return [replace(item, arm=arm, control=run.control, metric=metric, fewer=fewer) for item in items]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The requests of an arm and of the control. `paired`: each has its copy on the other arm."""

    treatment: Ints
    control: Ints
    paired: bool
    uneven: bool  # one arm has clearly more requests in the same blocks


def steady_rows(run: Run, arm: str) -> Rows:
    """Select steady traffic: without the cold start and the requests in flight while either arm compiled. Both arms
    lose the same stretches, and if requests are copied, a request and its copy go together."""
    own, base = (run.steady(run.of_arm(name) & run.usable, (arm, run.control)) for name in (arm, run.control))
    lonely = run.requests.pair < 0
    paired = run.copied and all(mask.any() and not (mask & lonely).any() for mask in (own, base))
    treatment, control = drawn_pairs(run, own, base) if paired else (drawn(run, mask) for mask in (own, base))
    # Sequential evidence exchanges requests where shares are uneven; other comparisons draw as many of each arm.
    uneven = not (paired or run.limits.sequential or run.separate or run.in_turn) and (
        exchange_of(run, arm) == "requests"
        or max(map(len, (treatment, control))) > _UNEVEN * min(map(len, (treatment, control)))
    )
    return Rows(treatment=treatment, control=control, paired=paired, uneven=uneven)


def samples_of(run: Run, metric: str, rows: Rows, *, segments: int = 1) -> tuple[Sample, Sample]:
    """Return the metric's values where defined for a request and its copy alike, by `segments` of a block."""
    own, base = (_known(run, metric, arm) for arm in (rows.treatment, rows.control))
    if rows.paired and own.any() and base.any():
        own = base = own & base
    selected = rows.treatment[own], rows.control[base]
    treatment, control = leveled(run.machines, *(_sample(run, metric, arm, segments) for arm in selected))
    if rows.uneven:
        return equal_counts(treatment, control, rng=run.rng(5, JUDGED_METRICS.index(metric)))
    return treatment, control


def leveled(machines: Machines, treatment: Sample, control: Sample) -> tuple[Sample, Sample]:
    """Divide the values of both arms by the geometric mean that they have together on each machine.

    Otherwise the tail of trials on several machines is that of the slowest. What both arms have in common on a machine
    does not affect their ratio.
    """
    if len(machines) < 2 or not len(treatment) or not len(control):
        return treatment, control
    place = [machines.codes(sample.trial) for sample in (treatment, control)]
    ms = np.concatenate((treatment.values, control.values))
    logs = np.log(np.maximum(ms, _SMALLEST_MS), dtype=np.float64)
    joined = np.concatenate(place)
    means = np.bincount(joined, logs, len(machines)) / np.maximum(np.bincount(joined, minlength=len(machines)), 1)
    level = np.exp(means - logs.mean())
    return (
        replace(treatment, values=treatment.values / level[place[0]]),
        replace(control, values=control.values / level[place[1]]),
    )


def _known(run: Run, metric: str, rows: Ints) -> Bools:
    requests = run.requests
    if metric == "itl":
        offsets = requests.gap_offsets
        return np.asarray((offsets[rows + 1] > offsets[rows]) | requests.failed[rows])
    return ~np.isnan(requests.metric_ms(metric, rows))


def _sample(run: Run, metric: str, rows: Ints, segments: int) -> Sample:
    """Return the values of the rows. For ITL these are all gaps, each in the block in which it ended."""
    requests = run.requests
    if metric != "itl":
        block = run.block_of(rows, segments=segments)
        return Sample(values=requests.metric_ms(metric, rows), block=block, trial=requests.trial[rows])
    gaps = gaps_of(requests, rows, most=MOST_GAPS)
    block = run.block_of(gaps.row, gaps.end_ns, segments=segments)
    return Sample(values=gaps.ms, block=block, trial=requests.trial[gaps.row])
