"""How much slower or faster one arm is than the control at a quantile, with limits that the data can carry.

The unit is the time block, not the request: requests of one moment share their fate, so tests that count them as
independent call noise significant. Effects are log ratios, treatment over control.

References
----------
[1] Phipson, B. and Smyth, G. K. (2010). Permutation p-values should never be zero.
[2] Canay, I. A., Romano, J. P. and Shaikh, A. M. (2017). Randomization tests under an approximate symmetry assumption.
[3] Lazarus, E., Lewis, D. J., Stock, J. H. and Watson, M. W. (2018). HAR inference: recommendations for practice.
[4] Ibragimov, R. and Müller, U. K. (2010). t-statistic based correlation and heterogeneity robust inference.
[5] Holm, S. (1979). A simple sequentially rejective multiple test procedure.
[6] Berger, R. L. (1982). Multiparameter hypothesis testing and acceptance sampling.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy import stats

from analysis.quantiles import BlockHistogram, block_histogram, quantile, swapped_log_ratios

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Singles = npt.NDArray[np.float32]

TRIALS_FOR_T_TEST = 6
_EWC_DEGREES = 8
_FEWEST_DISTINCT = 10  # fewer different latencies are a coarse clock or made-up data
_FARTHEST = math.log(1000.0)  # a limit beyond this ratio is no limit
_LIMIT_DRAWS = 1999
_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One metric of one arm: a latency in ms for each request, the block it fell in, and its trial. No NaN."""

    values: Floats
    block: Ints  # unique over trials
    trial: Ints

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One arm against the control at one quantile of one metric.

    `ratio` is the whole-run quantile of the arm over that of the control. `low` and `high` are one-sided limits at
    level alpha each, so together an interval of 1 - 2 alpha; None where the data set no limit.
    """

    arm: str = ""
    control: str = ""
    metric: str = ""
    phase: str = "steady"
    quantile: float
    margin: float
    alpha: float
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    p_worse: float | None = None  # of H0: ratio <= 1
    p_noninferior: float | None = None  # of H0: ratio >= 1 + margin; small speaks for the arm
    p_inferior: float | None = None  # of H0: ratio <= 1 + margin; small speaks against it
    p_inferior_holm: float | None = None
    cross_p_noninferior: float | None = None  # the same two from the exceedance scores
    cross_p_inferior: float | None = None
    autocorrelation: float | None = None  # lag one, of the block scores
    spread: float | None = None  # standard error of the log ratio
    method: str
    blocks: int
    trials: int
    requests: int  # of the smaller sample
    obstacle: str | None = None  # why no test was made
    verdict: str = "INCONCLUSIVE"
    reason: str = ""


def compare(
    treatment: Sample,
    control: Sample,
    *,
    q: float,
    margin: float,
    alpha: float,
    draws: int,
    rng: np.random.Generator,
    paired: bool = True,
) -> Comparison:
    """The comparison of two samples at quantile `q`, undecided (see `decide`).

    Below six trials: labels are swapped within time blocks [1, 2], all 2^blocks ways where they are few, and the
    limits come from inverting that test over shifts in log scale. It assumes that the difference of a block may have
    had either sign were the arms equal, and that blocks are independent; `autocorrelation` is there to doubt it.
    From six trials on: Student's t over the log ratios of the trials [4]. Always: the exceedance score with an
    equal-weighted cosine variance estimate [3] as a second opinion.
    With no data, one block, or all latencies equal there is no test, and `obstacle` says so.
    """
    shared = np.intersect1d(treatment.block, control.block)
    trials = np.intersect1d(treatment.trial, control.trial)
    method = ("paired" if paired else "unpaired") + " block label swap"
    empty = Comparison(
        quantile=q,
        margin=margin,
        alpha=alpha,
        method=method,
        blocks=len(shared),
        trials=len(trials),
        requests=min(len(treatment), len(control)),
        ratio=_ratio(treatment, control, q),
    )
    obstacle = _obstacle(treatment, control, len(shared))
    if obstacle is not None:
        return replace(empty, obstacle=obstacle)
    anchor = math.log1p(margin)
    scores = block_scores(treatment, control, q=q, shift=anchor)
    greater, less = ewc_p_values(scores)
    own = block_scores(treatment, control, q=q, shift=math.log(empty.ratio) if empty.ratio else 0.0)
    base = replace(
        empty, cross_p_noninferior=less, cross_p_inferior=greater, autocorrelation=first_autocorrelation(own)
    )
    if len(trials) >= TRIALS_FOR_T_TEST:
        ratios = np.array(
            [math.log(_ratio(_of_trial(treatment, n), _of_trial(control, n), q) or math.nan) for n in trials]
        )
        if np.isfinite(ratios).all() and np.ptp(ratios) > 0:
            return _by_trials(base, ratios, anchor)
    histogram = block_histogram(treatment.values, treatment.block, control.values, control.block, anchor=anchor)
    return _by_blocks(base, histogram, q, anchor, draws, rng)


def _obstacle(treatment: Sample, control: Sample, blocks: int) -> str | None:
    for name, sample in (("the arm", treatment), ("the control", control)):
        if not len(sample):
            return f"{name} has no request to compare"
    if blocks == 0:
        return "the arms share no time block"
    for name, sample in (("the arm", treatment), ("the control", control)):
        distinct = len(np.unique(sample.values))
        if distinct < _FEWEST_DISTINCT:
            return f"{name} shows only {distinct} different latencies"
    if blocks == 1:
        return "one time block cannot show how much blocks differ"
    return None


def _ratio(treatment: Sample, control: Sample, q: float) -> float | None:
    above, below = quantile(treatment.values, q), quantile(control.values, q)
    return above / below if above > 0 and below > 0 else None


def _of_trial(sample: Sample, number: int) -> Sample:
    own = sample.trial == number
    return Sample(values=sample.values[own], block=sample.block[own], trial=sample.trial[own])


def _by_trials(base: Comparison, ratios: Floats, anchor: float) -> Comparison:
    interval = stats.ttest_1samp(ratios, popmean=0.0).confidence_interval(confidence_level=1.0 - 2.0 * base.alpha)

    def p_of(bound: float, alternative: str) -> float:
        return float(stats.ttest_1samp(ratios, popmean=bound, alternative=alternative).pvalue)

    return replace(
        base,
        method="t-test over trials",
        ratio=math.exp(float(ratios.mean())),
        low=math.exp(float(interval.low)),
        high=math.exp(float(interval.high)),
        p_worse=p_of(0.0, "greater"),
        p_noninferior=p_of(anchor, "less"),
        p_inferior=p_of(anchor, "greater"),
        spread=float(ratios.std(ddof=1) / math.sqrt(len(ratios))),
    )


def label_swaps(blocks: int, draws: int, rng: np.random.Generator) -> Singles:
    """Which blocks swap labels, one row a draw; row 0 swaps none. All 2^blocks rows when they are at most draws + 1."""
    if blocks < 30 and 2**blocks <= draws + 1:
        return ((np.arange(2**blocks)[:, None] >> np.arange(blocks)) & 1).astype(np.float32)
    swaps = rng.integers(0, 2, size=(draws + 1, blocks)).astype(np.float32)
    swaps[0] = 0.0
    return swaps


def _by_blocks(
    base: Comparison, histogram: BlockHistogram, q: float, anchor: float, draws: int, rng: np.random.Generator
) -> Comparison:
    swaps = label_swaps(histogram.blocks, draws, rng)
    limit_swaps = swaps if len(swaps) <= _LIMIT_DRAWS + 1 else swaps[: _LIMIT_DRAWS + 1]

    def tails(shift: int, rows: Singles) -> tuple[float, float, Floats]:
        """P(as low as seen), P(as high as seen) if the true log ratio is shift × width; row 0 was seen [1]."""
        ratios = swapped_log_ratios(histogram, q, rows, shift=shift)
        return (
            float(np.mean(ratios <= ratios[0] + _TOLERANCE)),
            float(np.mean(ratios >= ratios[0] - _TOLERANCE)),
            ratios,
        )

    at_margin = round(anchor / histogram.width)
    low_tail, high_tail, _ = tails(at_margin, swaps)
    worse = tails(0, swaps)[1]
    seen = float(swapped_log_ratios(histogram, q, swaps[:1])[0])
    centre = round(seen / histogram.width)
    spread = float(tails(centre, limit_swaps)[2].std())
    farthest = round(_FARTHEST / histogram.width)

    def limit(direction: int) -> float | None:
        """The first shift from `centre` outwards that the test rejects, by doubling and halving; None without one."""
        tail = 0 if direction > 0 else 1
        if tails(centre + direction * farthest, limit_swaps)[tail] > base.alpha:
            return None
        kept, step = 0, max(1, round(spread / histogram.width))
        while step < farthest and tails(centre + direction * step, limit_swaps)[tail] > base.alpha:
            kept, step = step, step * 2
        rejected = min(step, farthest)
        while rejected - kept > 1:
            middle = (kept + rejected) // 2
            if tails(centre + direction * middle, limit_swaps)[tail] > base.alpha:
                kept = middle
            else:
                rejected = middle
        return (centre + direction * rejected) * histogram.width

    high, low = limit(1), limit(-1)
    # The limits come from fewer draws than the p-values; where the two disagree about the margin, p-values rule.
    if high is not None:
        high = min(high, anchor) if low_tail <= base.alpha else max(high, anchor)
    if low is not None:
        low = max(low, anchor) if high_tail <= base.alpha else min(low, anchor)
    return replace(
        base,
        low=None if low is None else math.exp(low),
        high=None if high is None else math.exp(high),
        p_worse=worse,
        p_noninferior=low_tail,
        p_inferior=high_tail,
        spread=spread,
    )


def block_scores(treatment: Sample, control: Sample, *, q: float, shift: float) -> Floats:
    """By how much the treatment exceeds the pooled `q` quantile more often than the control, block by block.

    The treatment's latencies are first divided by exp(shift). Blocks weigh by their requests; mean weight is 1.
    """
    shared = np.intersect1d(treatment.block, control.block)
    if not shared.size:
        return np.zeros(0)
    moved = treatment.values / math.exp(shift)
    threshold = quantile(np.concatenate((moved, control.values)), q)
    shares, totals = [], []
    for values, block in ((moved, treatment.block), (control.values, control.block)):
        own = np.isin(block, shared)
        index = np.searchsorted(shared, block[own])
        total = np.bincount(index, minlength=shared.size)
        above = np.bincount(index, weights=(values[own] > threshold).astype(np.float64), minlength=shared.size)
        shares.append(above / total)
        totals.append(total)
    weight = totals[0] + totals[1]
    return np.asarray((shares[0] - shares[1]) * weight / weight.mean())


def ewc_p_values(series: Floats) -> tuple[float | None, float | None]:
    """p of H0: mean <= 0 and of H0: mean >= 0, by the t-test with an equal-weighted cosine variance estimate [3].

    Eight cosines, fewer when there are fewer than 16 blocks; None below 8 blocks or when nothing varies.
    """
    size = len(series)
    if size < 8:
        return None, None
    degrees = min(_EWC_DEGREES, size // 2)
    steps = (np.arange(size) + 0.5) / size
    cosines = math.sqrt(2.0 / size) * np.cos(math.pi * np.outer(np.arange(1, degrees + 1), steps))
    variance = float(np.mean((cosines @ series) ** 2))
    if variance <= 0:
        return None, None
    statistic = math.sqrt(size) * float(series.mean()) / math.sqrt(variance)
    return float(stats.t.sf(statistic, degrees)), float(stats.t.cdf(statistic, degrees))


def first_autocorrelation(series: Floats) -> float | None:
    """The correlation of neighbouring blocks; None below 8 blocks or when nothing varies."""
    if len(series) < 8:
        return None
    centred = series - series.mean()
    total = float(centred @ centred)
    return float(centred[1:] @ centred[:-1]) / total if total > 0 else None


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values adjusted by Holm's step-down procedure [5], in the given order."""
    adjusted = [0.0] * len(p_values)
    floor = 0.0
    for position, index in enumerate(sorted(range(len(p_values)), key=lambda number: p_values[number])):
        floor = max(floor, min(1.0, (len(p_values) - position) * p_values[index]))
        adjusted[index] = floor
    return adjusted


def decide(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The comparisons with verdict and reason.

    PASS: the upper limit lies below 1 + margin (H0: ratio >= 1 + margin is rejected at one-sided alpha). No
    adjustment, since every comparison must pass [6]. FAIL: the lower limit lies above 1 + margin (H0: ratio <= 1 +
    margin is rejected after Holm's adjustment over all comparisons given). Else INCONCLUSIVE.
    """
    tested = [index for index, item in enumerate(comparisons) if item.p_inferior is not None]
    adjusted = dict(zip(tested, holm([comparisons[index].p_inferior or 0.0 for index in tested]), strict=True))
    return [_decided(item, adjusted.get(index)) for index, item in enumerate(comparisons)]


def _decided(item: Comparison, adjusted: float | None) -> Comparison:
    label = f"p{item.quantile * 100:g} {METRIC_NAMES.get(item.metric, item.metric)}"
    if item.ratio is None or item.obstacle is not None:
        return replace(item, reason=f"{label} cannot be compared: {item.obstacle or 'a quantile is unknown'}.")
    bound = 1.0 + item.margin
    limits = _limits_text(item.low, item.high)
    seen = f"{label} is {item.ratio:.2f} times that of {item.control or 'the control'} ({limits})"
    if item.p_noninferior is not None and item.p_noninferior <= item.alpha:
        verdict, ending = "PASS", f"below the limit of {bound:.2f}"
    elif adjusted is not None and adjusted <= item.alpha:
        verdict, ending = "FAIL", f"above the limit of {bound:.2f}"
    else:
        verdict, ending = "INCONCLUSIVE", f"which leaves the limit of {bound:.2f} open"
    return replace(item, p_inferior_holm=adjusted, verdict=verdict, reason=f"{seen}, {ending}.")


METRIC_NAMES = {"ttft": "TTFT", "e2e": "E2E", "tpot": "TPOT", "max_itl": "longest token gap", "itl": "token gap"}


def _limits_text(low: float | None, high: float | None) -> str:
    if low is None and high is None:
        return "so few blocks set no limits"
    if low is None:
        return f"at most {high:.2f}"
    return f"at least {low:.2f}" if high is None else f"between {low:.2f} and {high:.2f}"
