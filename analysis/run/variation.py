"""How much each figure varies from trial to trial: mean, standard deviation and coefficient of variation.

A trial is a fresh start of every arm, so this is what a repetition of the run would show. One trial shows nothing of
it. Nothing is decided here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc

from analysis.arrays import Bools
from analysis.run.references import FIGURES, HOST_FIGURES
from analysis.run.run import Run
from analysis.run.slo import meets_all
from analysis.run.startup import ENCODE, startup_s
from analysis.run.test_bed import TestBed
from analysis.run.trials import Trial
from analysis.statistics.quantiles import quantile

MOST_VARIATION = 0.05  # what varies by more is flagged: the field's limit for a measurement that can be repeated


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """One figure of one arm, device or host over the trials. `sd` (n − 1) and `cv` are None below two trials.

    `cv` is the standard deviation over the mean, None where that is 0.
    """

    of: str  # the arm, device or host
    figure: str  # p99_ttft_ms, goodput_rps, matmul_tflops
    n: int
    mean: float | None
    sd: float | None
    cv: float | None

    @property
    def flagged(self) -> bool:
        """Whether it varies by more than a measurement that can be repeated."""
        return self.cv is not None and self.cv > MOST_VARIATION


def variation_of(of: str, figure: str, values: Sequence[float | None]) -> Variation:
    """The variation of one figure, a value a trial; trials without a value are left out."""
    n, mean, sd, cv = moments_of(values)
    return Variation(of=of, figure=figure, n=n, mean=mean, sd=sd, cv=cv)


def moments_of(values: Sequence[float | None]) -> tuple[int, float | None, float | None, float | None]:
    """(n, mean, sd, cv) of the values that are known, as `Variation` has them."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    mean = sum(known) / len(known) if known else None
    sd = float(np.std(known, ddof=1)) if len(known) > 1 else None
    cv = sd / abs(mean) if sd is not None and mean else None
    return len(known), mean, sd, cv


def variations(run: Run, bed: TestBed) -> list[Variation]:
    """Every figure that any trial has, arms first, in the order of the run."""
    rows = [row for arm in run.arms for row in _of_arm(run, arm)]
    rows += list(_of_references(bed))
    rows += list(_of_devices(bed))
    return [row for row in rows if row.n]


def _of_arm(run: Run, arm: str) -> Iterator[Variation]:
    requests, trials = run.requests, run.trials_of(arm)
    own = [run.of_arm(arm) & run.usable & (requests.trial == trial.number) for trial in trials]
    for metric in run.metrics:
        if metric == "max_itl":
            continue
        for name, q in (("p50", 0.5), ("p99", 0.99)):
            yield variation_of(arm, f"{name}_{metric}_ms", [_quantile_ms(run, metric, mask, q) for mask in own])
    if run.goodput_targets:
        good = meets_all(requests, run.goodput_targets)
        counts = [int((mask & good).sum()) for mask in own]
        yield variation_of(arm, "goodput_rps", [_per_s(n, trial) for n, trial in zip(counts, trials, strict=True)])
    tokens = [int(requests.output_tokens[mask].sum()) for mask in own]
    yield variation_of(arm, "output_tokens_per_s", [_per_s(n, at) for n, at in zip(tokens, trials, strict=True)])
    for kind in ("decode", ENCODE):
        yield variation_of(arm, f"{kind}_step_ms", _steps_ms(run, arm, kind))
    yield variation_of(arm, "startup_s", [startup_s(trial, arm) for trial in trials])


def _quantile_ms(run: Run, metric: str, mask: Bools, q: float) -> float:
    requests = run.requests
    if metric == "itl":
        gaps = np.repeat(mask & (requests.ok | requests.cut), np.diff(requests.gap_offsets))
        return quantile(requests.gaps_ms[gaps], q)
    values = requests.metric_ms(metric)[mask]
    return quantile(values[~np.isnan(values)], q)


def _per_s(count: int, trial: Trial) -> float | None:
    return count / trial.seconds if count and trial.seconds > 0 else None


def _steps_ms(run: Run, arm: str, kind: str) -> list[float | None]:
    """The median step of this kind in each trial."""
    steps = run.steps(arm)
    if steps is None or not steps.num_rows:
        return []
    of_kind = pc.fill_null(pc.equal(steps.column("kind"), kind), False).to_numpy()
    # Taken apart as whole numbers: a moment in ns is more than a float holds.
    took = pc.subtract(steps.column("end_ns"), steps.column("start_ns"))
    trial = np.asarray(steps.column("trial").to_numpy(), dtype=np.float64)
    lengths = np.asarray(took.to_numpy(), dtype=np.float64) / 1e6
    usable = of_kind & np.isfinite(lengths) & (lengths >= 0)
    own = [lengths[usable & (trial == item.number)] for item in run.trials_of(arm)]
    return [float(np.median(values)) if values.size else None for values in own]


def _of_references(bed: TestBed) -> Iterator[Variation]:
    """Each figure of the reference, as the mean of before and after a trial."""
    for device in dict.fromkeys(row.device for row in bed.references):
        for figure in FIGURES:
            speeds = [bed.speed(trial, device, figure) for trial in bed.trials]
            sign = -1.0 if figure in HOST_FIGURES else 1.0
            yield variation_of(device, figure, [None if it is None else math.exp(sign * it) for it in speeds])


def _of_devices(bed: TestBed) -> Iterator[Variation]:
    for name in dict.fromkeys(device.name for device in bed.devices if device.arms):
        own = [device for device in bed.devices if device.name == name and device.arms]
        for figure in ("sm_mhz", "power_w"):
            spreads = [getattr(device, figure) for device in own]
            yield variation_of(name, figure, [spread.median if spread else None for spread in spreads])
