"""How much slower or faster one arm is than the control at a quantile, with limits that the data can carry.

The unit is a stretch of time, not the request: requests of one moment share their fate, so tests that count them as
independent call noise significant. Effects are log ratios, treatment over control. The tests themselves are in
`analysis.statistics.resampling`.

References
----------
[1] Phipson, B. and Smyth, G. K. (2010). Permutation p-values should never be zero.
[2] Canay, I. A., Romano, J. P. and Shaikh, A. M. (2017). Randomization tests under an approximate symmetry assumption.
[3] Lazarus, E., Lewis, D. J., Stock, J. H. and Watson, M. W. (2018). HAR inference: recommendations for practice.
[4] Ibragimov, R. and Müller, U. K. (2010). t-statistic based correlation and heterogeneity robust inference.
[5] Holm, S. (1979). A simple sequentially rejective multiple test procedure.
[6] Berger, R. L. (1982). Multiparameter hypothesis testing and acceptance sampling.
[7] Künsch, H. R. (1989). The jackknife and the bootstrap for general stationary observations.
[8] MacKinnon, J. G. and White, H. (1985). Some heteroskedasticity-consistent covariance matrix estimators with improved
    finite sample properties.
[9] Satterthwaite, F. E. (1946). An approximate distribution of estimates of variance components.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from analysis.arrays import Bools, Floats, Ints
from analysis.nouns import counted
from analysis.settings.gate_limits import RESTART_SPREAD, Method, Question
from analysis.settings.metrics import quantile_label
from analysis.statistics.dependence import Dependence, block_differences, dependence_of
from analysis.statistics.machines import lasting_reach, mean_over_trials
from analysis.statistics.quantiles import (
    BlockHistogram,
    block_histogram,
    quantile,
    quantiles,
    shared_blocks,
)
from analysis.statistics.resampling import (
    Limits,
    block_scores,
    bootstrap_limits,
    ewc_p_values,
    grouped,
    groups_of,
    swap_limits,
)
from analysis.statistics.windows import FEWEST_GROUPS, Windows, typical_ratio, window_limits

TRIALS_FOR_T_TEST = 6
TRIALS_METHOD = "t-test over trials"
_FEWEST_DISTINCT = 10  # fewer different latencies are a coarse clock or made-up data


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One metric of one arm: a latency in ms for each request, the block it fell in, and its trial. No NaN."""

    values: Floats
    block: Ints  # counted from 0 or a little above, unique over trials and rising with them
    trial: Ints

    def __len__(self) -> int:
        return len(self.values)

    def only(self, chosen: Bools) -> Sample:
        """The requests that are chosen."""
        return Sample(values=self.values[chosen], block=self.block[chosen], trial=self.trial[chosen])


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One arm against the control at one quantile of one metric.

    With `question` "run", `ratio` is the whole-run quantile of the arm over that of the control; with "block" that of
    the two in a typical block (`analysis.statistics.windows`), and `whole` is the ratio over the run. `low` and `high`
    are one-sided limits at level alpha each, so together an interval of 1 - 2 alpha; None where the data set no limit.
    """

    arm: str = ""
    control: str = ""
    metric: str = ""
    machine: str = ""  # the one that it is of; empty: all
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
    tests: int = 1  # over which that is adjusted
    cross_p_noninferior: float | None = None  # the same two from the exceedance scores
    cross_p_inferior: float | None = None
    autocorrelation: float | None = None  # between neighbouring groups, as far as blocks foretell it
    spread: float | None = None  # standard error of the log ratio, but for the luck of starts
    lasting: tuple[float, float] | None = None  # limits that also hold where a state outlasts a trial; None below six
    restart_spread: float = 0.0  # standard deviation of the log ratio of one start
    machine_spread: float = 0.0  # standard error of the log ratio that the machines of the trials add
    question: Question = "run"
    whole: float | None = None
    p_inferior_whole: float | None = None  # as p_inferior, over the run
    method: str
    blocks: int
    groups: int = 0  # of blocks; what is resampled
    trials: int
    requests: int  # of the smaller sample
    needed_trials: int | None = None  # of each arm, that would decide a ratio as seen, where arms ran separately
    obstacle: str | None = None  # why no test was made
    verdict: str = "INCONCLUSIVE"
    reason: str = ""


def as_many(treatment: Sample, control: Sample, *, rng: np.random.Generator) -> tuple[Sample, Sample]:
    """Return as many values of each sample in each block, drawn at random from the one that has more.

    A sample of 30 values has no 1 % of them: beside one of 300 its slowest value takes the whole tail of both or none
    of it, which makes the smaller sample look quicker: at shares of 1 to 9, half of the arms at the margin passed.
    """
    blocks = 1 + max(int(sample.block.max(initial=-1)) for sample in (treatment, control))
    counts = [np.bincount(sample.block, minlength=blocks) for sample in (treatment, control)]
    least = np.minimum(*counts)
    drawn = []
    for sample, count in zip((treatment, control), counts, strict=True):
        order = rng.permutation(len(sample))
        order = order[np.argsort(sample.block[order], kind="stable")]
        block = sample.block[order]
        rank = np.arange(len(order)) - (np.cumsum(count) - count)[block]
        chosen = np.zeros(len(sample), dtype=np.bool_)
        chosen[order[rank < least[block]]] = True
        drawn.append(sample.only(chosen))
    return drawn[0], drawn[1]


def compare_quantiles(
    treatment: Sample,
    control: Sample,
    *,
    qs: Sequence[float],
    margin: float,
    alpha: float,
    draws: int,
    rng: np.random.Generator,
    paired: bool = True,
    method: Method = "label swap",
    restart_spread: float = RESTART_SPREAD,
    machines: Mapping[int, int] | None = None,
) -> list[Comparison]:
    """One comparison of two samples for each quantile in `qs` over the whole run, undecided (see `decide`).

    The samples must have about as many values in each block: see `as_many`.

    Below six trials: labels are swapped within groups of neighbouring time blocks [1, 2], all 2^groups ways where they
    are at most draws + 1, and the limits come from inverting that test over shifts in log scale. It assumes that the
    difference of a group may have had either sign were the arms equal, and that groups are independent. Limits are
    widened for what blocks tell of drift, for the luck of starts, `restart_spread`, and for what differs between
    `machines`, which are numbered by trial (`analysis.statistics.dependence`). Requests in blocks that one sample lacks
    are left out. With `method` "block bootstrap": Student's t around the ratio, with the standard error of a circular
    block bootstrap [7]. From six trials on: Student's t over the log ratios of the trials [4], and over machines
    (`analysis.statistics.machines`). Always: the exceedance score with an equal-weighted cosine variance estimate [3]
    as a second opinion. With no data, one block, or all latencies equal there is no test, and `obstacle` says so.
    """
    stage = _Stage.of(
        treatment, control, margin=margin, alpha=alpha, restart_spread=restart_spread, machines=machines or {}
    )
    base = replace(
        stage.base,
        method=("paired" if paired else "unpaired")
        + (" block label swap" if method == "label swap" else " block bootstrap"),
    )
    above, below = quantiles(stage.treatment.values, qs), quantiles(stage.control.values, qs)
    items = [
        replace(base, quantile=q, ratio=one / other if one > 0 and other > 0 else None)
        for q, one, other in zip(qs, above, below, strict=True)
    ]
    histogram = stage.histogram
    if histogram is None:
        return items
    by_group = grouped(histogram, stage.group)
    tested = []
    for plain in items:
        q = plain.quantile
        item = _with_scores(plain, block_scores(histogram, q, shift=stage.anchor_bins))
        ratios = _trial_ratios(stage, q) if base.trials >= TRIALS_FOR_T_TEST else None
        if ratios is not None:
            tested.append(_by_trials(item, ratios, stage.machine_of_trial))
            continue
        if method == "label swap":
            limits: Limits | None = swap_limits(
                by_group,
                q,
                bound=stage.anchor,
                alpha=alpha,
                draws=draws,
                rng=rng,
                widening=stage.widening,
                scores=(item.cross_p_noninferior, item.cross_p_inferior),
            )
        else:
            limits = bootstrap_limits(
                histogram,
                q,
                stage.group,
                bound=stage.anchor,
                alpha=alpha,
                draws=draws,
                rng=rng,
                widening=stage.widening,
            )
        tested.append(_with_limits(item, limits, stage.dependence.drift))
    return tested


def compare_typical(
    treatment: Sample,
    control: Sample,
    *,
    whole: Sequence[Comparison],
    restart_spread: float = RESTART_SPREAD,
    machines: Mapping[int, int] | None = None,
) -> list[Comparison]:
    """Comparisons of a typical block, one for each of those over the whole run in `whole`, undecided.

    `whole` are what `compare_quantiles` made of the same samples. Below six trials limits are Student's t over groups
    of blocks (`analysis.statistics.windows`), from six on over the typical ratios of the trials [4]. One whose blocks,
    joined within their group, hold too little of the tail, or that nothing could be made of, stays as it is over the
    run.
    """
    if not whole:
        return []
    stage = _Stage.of(
        treatment,
        control,
        margin=whole[0].margin,
        alpha=whole[0].alpha,
        restart_spread=restart_spread,
        machines=machines or {},
    )
    return [_typical(stage, item) for item in whole]


def _typical(stage: _Stage, whole: Comparison) -> Comparison:
    if stage.histogram is None or whole.ratio is None or whole.obstacle is not None:
        return whole
    by_trial = whole.trials >= TRIALS_FOR_T_TEST
    trial = np.searchsorted(np.unique(stage.trial_of_block), stage.trial_of_block)
    windows = Windows.of(
        stage.histogram,
        trial if by_trial else stage.group,
        whole.quantile,
        fewest=TRIALS_FOR_T_TEST if by_trial else FEWEST_GROUPS,
    )
    if windows is None:
        return whole
    item = replace(
        _with_scores(whole, windows.excess(stage.anchor_bins)),
        question="block",
        method=whole.method.split()[0] + " typical block",
        whole=whole.ratio,
        p_inferior_whole=whole.p_inferior,
        ratio=math.exp(typical_ratio(windows)),
    )
    if by_trial:
        ratios = np.array([typical_ratio(windows.only(windows.group == number)) for number in range(windows.groups)])
        return _by_trials(item, ratios, stage.machine_of_trial) if np.ptp(ratios) > 0 else whole
    limits = window_limits(windows, bound=stage.anchor, alpha=item.alpha, dependence=stage.dependence)
    return whole if limits is None else _with_limits(item, limits, 0.0)


def _with_limits(item: Comparison, limits: Limits | None, drift: float) -> Comparison:
    """The comparison with its limits; `drift` is the variance that their spread lacks."""
    if limits is None:
        return replace(item, obstacle="resampled blocks do not differ")
    # Where the tail is a handful of requests, swapping them may rule out the very ratio that was seen.
    seen = [] if item.ratio is None else [item.ratio]
    return replace(
        item,
        low=None if limits.low is None else min(math.exp(limits.low), *seen, math.inf),
        high=None if limits.high is None else max(math.exp(limits.high), *seen, 0.0),
        p_worse=limits.p_worse,
        p_noninferior=limits.p_noninferior,
        p_inferior=limits.p_inferior,
        spread=math.sqrt(limits.spread**2 + drift),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """Two samples made ready to be compared: in the blocks that both have, by group of blocks."""

    treatment: Sample
    control: Sample
    base: Comparison
    anchor: float  # log of 1 + margin
    group: Ints  # of each block
    trial_of_block: Ints
    machine_of_block: Ints
    histogram: BlockHistogram | None  # None where the base has an obstacle
    dependence: Dependence

    @classmethod
    def of(
        cls,
        treatment: Sample,
        control: Sample,
        *,
        margin: float,
        alpha: float,
        restart_spread: float,
        machines: Mapping[int, int],
    ) -> _Stage:
        treatment, control, trial_of_block, sizes = _in_shared_blocks(treatment, control)
        group, blocks = groups_of(trial_of_block), len(trial_of_block)
        machine = np.array([machines.get(trial, 0) for trial in trial_of_block.tolist()], dtype=np.int64)
        obstacle = _obstacle(treatment, control, sizes, blocks)
        anchor, dependence, histogram = math.log1p(margin), Dependence(), None
        if obstacle is None:
            treatment, control = _inside(treatment), _inside(control)
            histogram = block_histogram(treatment.values, treatment.block, control.values, control.block, anchor=anchor)
            differences = block_differences(treatment.values, treatment.block, control.values, control.block, blocks)
            dependence = dependence_of(
                differences, group, trial_of_block, restart_spread=restart_spread, machine=machine
            )
        return cls(
            treatment=treatment,
            control=control,
            base=Comparison(
                quantile=0.5,
                margin=margin,
                alpha=alpha,
                method="",
                blocks=blocks,
                groups=int(group[-1]) + 1 if blocks else 0,
                trials=len(np.unique(trial_of_block)),
                requests=min(sizes),
                obstacle=obstacle,
                autocorrelation=dependence.correlation,
                restart_spread=dependence.restart,
                machine_spread=math.sqrt(dependence.machine),
            ),
            anchor=anchor,
            group=group,
            trial_of_block=trial_of_block,
            machine_of_block=machine,
            histogram=histogram,
            dependence=dependence,
        )

    @property
    def machine_of_trial(self) -> Ints:
        """The machine of each trial that the samples share, in order."""
        return self.machine_of_block[np.unique(self.trial_of_block, return_index=True)[1]]

    @property
    def anchor_bins(self) -> int:
        return round(self.anchor / self.histogram.width) if self.histogram is not None else 0

    def widening(self, spread: float) -> float:
        return self.dependence.widening(spread, groups=self.base.groups, alpha=self.base.alpha)


def _in_shared_blocks(treatment: Sample, control: Sample) -> tuple[Sample, Sample, Ints, tuple[int, int]]:
    """Both samples with the blocks that hold requests of both numbered from 0 (-1: the others), the trial of each
    such block, and how many requests each sample has."""
    sizes = (len(treatment), len(control))
    if not min(sizes):
        return treatment, control, np.zeros(0, dtype=np.int64), sizes
    number, count = shared_blocks(treatment.block, control.block)
    numbered = [replace(sample, block=number(sample.block)) for sample in (treatment, control)]
    trial = np.zeros(count + 1, dtype=np.int64)  # the last place takes the blocks that are not shared
    trial[numbered[1].block] = control.trial
    return numbered[0], numbered[1], trial[:count], sizes


def _inside(sample: Sample) -> Sample:
    """The requests in blocks that the samples share."""
    inside = sample.block >= 0
    return sample if inside.all() else sample.only(inside)


def _obstacle(treatment: Sample, control: Sample, sizes: tuple[int, int], blocks: int) -> str | None:
    for name, size in zip(("the arm", "the control"), sizes, strict=True):
        if not size:
            return f"{name} has no request to compare"
    if blocks == 0:
        return "the arms share no time block"
    for name, sample in (("the arm", treatment), ("the control", control)):
        distinct = _distinct(sample.values)
        if distinct < _FEWEST_DISTINCT:
            return f"{name} shows only {counted(distinct, 'different latency')}"
    if blocks == 1:
        return "one time block cannot show how much blocks differ"
    return None


def _distinct(values: Floats) -> int:
    """How many different values there are; where they are many, at least how many."""
    head = len(np.unique(values[:1000]))
    return head if head >= _FEWEST_DISTINCT else len(np.unique(values))


def _with_scores(item: Comparison, excess: Floats) -> Comparison:
    """The comparison with the second opinion of `excess`, by block or window, at a ratio of 1 + margin [3]."""
    greater, less = ewc_p_values(excess)
    return replace(item, cross_p_noninferior=less, cross_p_inferior=greater)


def _trial_ratios(stage: _Stage, q: float) -> Floats | None:
    """The log ratio of each trial; None where one is unknown or all are the same."""
    ratios = []
    for number in np.unique(stage.trial_of_block):
        one, other = (quantile(own.values[own.trial == number], q) for own in (stage.treatment, stage.control))
        if not (one > 0 and other > 0):
            return None
        ratios.append(math.log(one / other))
    return np.array(ratios) if np.isfinite(ratios).all() and np.ptp(ratios) > 0 else None


def _by_trials(base: Comparison, ratios: Floats, machine: Ints) -> Comparison:
    """Student's t over the log ratios of trials [4]; where they ran on several machines, as those allow if that is
    less (`analysis.statistics.machines`)."""
    mean, trials = float(ratios.mean()), len(ratios)
    spread, degrees, added = float(ratios.std(ddof=1) / math.sqrt(trials)), float(trials - 1), 0.0
    known = mean_over_trials(ratios, machine)
    reaches = [float(stats.t.ppf(1.0 - base.alpha, own)) * error for own, error in ((degrees, spread), known.reach)]
    if reaches[1] > reaches[0]:
        (degrees, spread), added = known.reach, math.sqrt(known.between)
    reach, anchor = max(reaches), math.log1p(base.margin)

    lasting = max(reach, lasting_reach(ratios, base.alpha))

    def above(bound: float) -> float:
        return float(stats.t.sf((mean - bound) / spread, degrees))

    return replace(
        base,
        method=TRIALS_METHOD,
        autocorrelation=None,  # what happens within a trial does not matter
        restart_spread=0.0,  # trials hold the luck of their starts
        machine_spread=added,
        groups=trials,
        ratio=math.exp(mean),
        low=math.exp(mean - reach),
        high=math.exp(mean + reach),
        lasting=(math.exp(mean - lasting), math.exp(mean + lasting)),
        p_worse=above(0.0),
        p_noninferior=float(stats.t.cdf((mean - anchor) / spread, degrees)),
        p_inferior=above(anchor),
        spread=spread,
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values adjusted by Holm's step-down procedure [5], in the given order."""
    order = np.argsort(p_values, kind="stable")
    raised = np.asarray(p_values, dtype=np.float64)[order] * np.arange(len(order), 0, -1)
    adjusted = np.empty(len(order))
    adjusted[order] = np.maximum.accumulate(np.minimum(raised, 1.0))
    return [float(value) for value in adjusted]


def decide(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The comparisons with verdict and reason.

    PASS: the upper limit lies below 1 + margin (H0: ratio >= 1 + margin is rejected at one-sided alpha), and where a
    typical block was asked for, the ratio seen over the whole run does too. No adjustment, since every comparison must
    pass [6]. FAIL: the lower limit lies above 1 + margin, of a typical block or of the whole run (H0: ratio <= 1 +
    margin is rejected after Holm's adjustment over all comparisons given). Else INCONCLUSIVE.
    """
    tested = [
        (index, key)
        for index, item in enumerate(comparisons)
        for key in ("p_inferior", "p_inferior_whole")
        if getattr(item, key) is not None
    ]
    adjusted = dict(zip(tested, holm([getattr(comparisons[index], key) for index, key in tested]), strict=True))
    return [
        _decided(item, adjusted.get((index, "p_inferior")), adjusted.get((index, "p_inferior_whole")), len(tested))
        for index, item in enumerate(comparisons)
    ]


def _decided(item: Comparison, adjusted: float | None, adjusted_whole: float | None, tests: int) -> Comparison:
    label = quantile_label(item.metric, item.quantile)
    if item.ratio is None or item.obstacle is not None:
        return replace(item, reason=f"{label} cannot be compared: {item.obstacle or 'a quantile is unknown'}.")
    bound = 1.0 + item.margin
    limits = limits_text(item.low, item.high)
    of = " of a typical block" if item.question == "block" else ""
    seen = f"{label}{of} is {item.ratio:.2f} times that of {item.control or 'the control'} ({limits})"
    whole = "" if item.whole is None else f"over the whole run it is {item.whole:.2f} times"
    if adjusted is not None and adjusted <= item.alpha:
        verdict, ending = "FAIL", f", above the limit of {bound:.2f}"
    elif adjusted_whole is not None and adjusted_whole <= item.alpha:
        verdict, ending = "FAIL", f", and {whole}, surely above the limit of {bound:.2f}"
    elif adjusted is not None and item.p_inferior is not None and item.p_inferior <= item.alpha:
        verdict = "INCONCLUSIVE"
        ending = (
            f", above the limit of {bound:.2f}, but one of {tests} tests may be so by chance (Holm: p = {adjusted:.2g})"
        )
    elif item.p_noninferior is None or item.p_noninferior > item.alpha or item.ratio > bound:
        verdict, ending = "INCONCLUSIVE", f", which leaves the limit of {bound:.2f} open"
    elif item.whole is not None and item.whole > bound:
        verdict = "INCONCLUSIVE"
        ending = f", below the limit of {bound:.2f}, but {whole}: its worst stretches are worse than the control's"
    else:
        verdict, ending = "PASS", f", below the limit of {bound:.2f}"
    return replace(item, p_inferior_holm=adjusted, tests=tests, verdict=verdict, reason=f"{seen}{ending}.")


def limits_text(low: float | None, high: float | None, neither: str = "so little of the tail sets no limits") -> str:
    """The limits in words, or `neither` where there is none."""
    if low is None and high is None:
        return neither
    if low is None:
        return f"at most {high:.2f}"
    return f"at least {low:.2f}" if high is None else f"between {low:.2f} and {high:.2f}"
