"""How much slower or faster one arm is than the control at a quantile, with limits that the data can carry.

The ratio is that of the tails of a typical block (`tailgate.analysis.statistics.windows`). Below six trials its limits
come from groups of neighbouring blocks; from six trials on, from the trials.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tailgate.analysis.arrays import Bools, Floats, Ints
from tailgate.analysis.settings.gate_limits import RESTART_SPREAD
from tailgate.analysis.settings.metrics import quantile_label
from tailgate.analysis.statistics.dependence import FEWEST_GROUPS, Dependence, dependence_of, groups_of
from tailgate.analysis.statistics.distributions import t_quantile
from tailgate.analysis.statistics.machines import Part, error_over_trials, lasting_reach
from tailgate.analysis.statistics.quantiles import quantiles
from tailgate.analysis.statistics.slow_counts import SortedGroups
from tailgate.analysis.statistics.windows import (
    Limits,
    Windows,
    balanced_ratios,
    student_limits,
    tail_of_group,
    window_limits,
)
from tailgate.analysis.wording import counted, enough, fixed

TRIALS_FOR_T_TEST = 6
TAIL_REQUESTS = 5  # beyond a quantile, to speak of it
_ALIKE = "no block differs from the others"
_FEWEST_DISTINCT = 10  # fewer different latencies mean a coarse clock or synthetic data


def tail_requests(q: float) -> int:
    """Return how many requests have `TAIL_REQUESTS` beyond the quantile."""
    return math.ceil(round(TAIL_REQUESTS / (1.0 - q), 6))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One metric of one arm: a latency in ms for each request, the block it fell in, and its trial. No NaN."""

    values: Floats
    block: Ints  # counted from 0 or a little above, unique over trials and rising with them
    trial: Ints

    def __len__(self) -> int:
        return len(self.values)

    def only(self, chosen: Bools) -> Sample:
        """Select the chosen requests."""
        return Sample(values=self.values[chosen], block=self.block[chosen], trial=self.trial[chosen])


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One arm against the control at one quantile of one metric.

    `ratio` is that of the tails of a typical block, arm over control; `whole` is the ratio of the quantiles over the
    run. `low` and `high` are one-sided limits of `ratio` at level alpha each, so together an interval of 1 - 2 alpha;
    None where the data set no limit.
    """

    arm: str = ""
    control: str = ""
    metric: str = ""
    machine: str = ""  # the one that it is of; empty: all
    quantile: float
    margin: float
    alpha: float
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    p_noninferior: float | None = None  # of H0: ratio >= 1 + margin; a small value favours the arm
    p_inferior: float | None = None  # of H0: ratio <= 1 + margin; small speaks against it
    tests: int = 1  # over which it is adjusted (Holm)
    autocorrelation: float | None = None  # between neighbouring groups, as predicted from blocks
    spread: float | None = None  # standard error of the log ratio, without the variance of starts
    lasting: tuple[float, float] | None = None  # limits that also hold where a state outlasts a trial; None below six
    restart_spread: float = 0.0  # standard deviation of the log ratio of one start
    machine_spread: float = 0.0  # standard error of the log ratio that the machines of the trials add
    whole: float | None = None
    blocks: int
    groups: int = 0  # of blocks, or trials: the units of the test
    trials: int
    requests: int  # of the smaller sample
    fewer: str = ""  # the arm that it is of, where both ran separately
    obstacle: str | None = None  # why no test was made
    needed_blocks: int | None = None  # that a test needs, where only they are missing
    verdict: str = "INCONCLUSIVE"
    reason: str = ""

    @property
    def seen(self) -> float | None:
        """The ratio; None of fewer blocks than limits need."""
        return self.ratio if self.blocks >= FEWEST_GROUPS or self.low or self.high else None

    @property
    def lacks(self) -> str:
        """Why there are no limits, in a few words: "120 of 500 steady requests"; empty where there are."""
        needed = tail_requests(self.quantile)
        few = f"{self.requests} of {needed} steady requests" if self.requests < needed else "too few slow requests"
        why = self.obstacle or (few if self.ratio is not None else "a quantile is unknown")
        why = f"{self.fewer} has {why}" if self.fewer and why[0].isdigit() else why
        return "" if self.ratio and (self.low or self.high) else why


def with_limits(item: Comparison, limits: Limits) -> Comparison:
    """Add the ratio, its limits and its p-values to the comparison."""
    return replace(
        item,
        ratio=math.exp(limits.ratio),
        low=None if limits.low is None else math.exp(limits.low),
        high=None if limits.high is None else math.exp(limits.high),
        p_noninferior=limits.p_noninferior,
        p_inferior=limits.p_inferior,
        spread=limits.spread,
    )


def equal_counts(treatment: Sample, control: Sample, *, rng: np.random.Generator) -> tuple[Sample, Sample]:
    """Return as many values of each sample in each block, drawn at random from the one that has more.

    The slowest of a few values takes the whole tail or none of it, which makes the smaller sample look quicker: at
    shares of 1 to 9, half of the arms at the margin passed.
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


def compare(
    treatment: Sample,
    control: Sample,
    *,
    qs: Sequence[float],
    margin: float,
    alpha: float,
    restart_spread: float = RESTART_SPREAD,
    machines: Mapping[int, int] | None = None,
    min_blocks: int = FEWEST_GROUPS,
) -> list[Comparison]:
    """Return one comparison of two samples for each quantile in `qs`, undecided (see `decide`).

    The samples must have about as many values in each block: see `equal_counts`. Requests in blocks that one sample
    lacks are left out. Limits are Student's t [1], below six trials widened for drift within a start, for the variance
    of starts, `restart_spread`, and for what differs between `machines`, which are numbered by trial. With no data,
    fewer than eight blocks, hardly a request beyond the quantile in each group, or latencies that are all equal there
    is no test, and `obstacle` says so (a verdict takes `min_blocks`). Where the tail is too thin for that of blocks,
    `ratio` is that of the run.
    """
    own, other, _, trial = in_shared_blocks(treatment, control)
    blocks, trials = len(trial), np.unique(trial)
    by_trial, group = len(trials) >= TRIALS_FOR_T_TEST, groups_of(trial)
    base = Comparison(
        quantile=0.5,
        margin=margin,
        alpha=alpha,
        blocks=blocks,
        groups=len(trials) if by_trial else int(group[-1]) + 1 if blocks else 0,
        trials=len(trials),
        requests=min(len(treatment), len(control)),
        obstacle=_obstacle(treatment, control, blocks),
    )
    if base.obstacle is not None:
        return _wholes(base, treatment, control, qs)
    arms = tuple(SortedGroups.of(sample.values, sample.block, blocks) for sample in (own, other))
    machine = np.array([(machines or {}).get(number, 0) for number in trial.tolist()], dtype=np.int64)
    differences = arms[0].means() - arms[1].means()
    dependence = dependence_of(differences, group, trial, restart_spread=restart_spread, machine=machine)
    first = np.searchsorted(trial, trials)
    if by_trial:  # trials are apart in time, and the variance of their starts is in what they differ by
        group = np.searchsorted(trials, trial)
    else:
        base = replace(
            base,
            autocorrelation=dependence.correlation,
            restart_spread=dependence.restart,
            machine_spread=math.sqrt(dependence.machine),
        )
    return [
        item if item.ratio is None else _tested(item, arms[0], arms[1], group, dependence, machine[first], min_blocks)
        for item in _wholes(base, own, other, qs)
    ]


def _wholes(base: Comparison, treatment: Sample, control: Sample, qs: Sequence[float]) -> list[Comparison]:
    items = []
    for q, above, below in zip(qs, quantiles(treatment.values, qs), quantiles(control.values, qs), strict=True):
        whole = above / below if above > 0 and below > 0 else None
        why = base.obstacle or ("the control's is 0" if below == 0 else "the arm's is 0" if above == 0 else None)
        items.append(replace(base, quantile=q, ratio=whole, whole=whole, obstacle=why))
    return items


def _tested(
    item: Comparison,
    treatment: SortedGroups,
    control: SortedGroups,
    unit: Ints,
    dependence: Dependence,
    machine: Ints,
    min_blocks: int,
) -> Comparison:
    """Add limits to the item; `unit` numbers the group or trial of each block, `machine` that of each trial."""
    by_trial, bound = item.trials >= TRIALS_FOR_T_TEST, math.log1p(item.margin)
    windows = Windows.of(treatment, control, unit, q=item.quantile, bound=bound)
    if windows is None:
        beyond = tail_of_group(treatment, control, unit, item.quantile)
        least = max(tail_requests(item.quantile), math.ceil(item.requests / beyond))
        why = f"{item.requests} of {least} steady requests"
        return replace(item, obstacle=why, needed_blocks=math.ceil(item.blocks / beyond))
    if by_trial:
        ratios = balanced_ratios(windows, windows.group)
        return _by_trials(item, ratios, machine) if np.ptp(ratios) > 0 else replace(item, obstacle=_ALIKE)
    if windows.groups < FEWEST_GROUPS:
        needed = max(FEWEST_GROUPS, min_blocks)
        item = replace(item, obstacle=f"{item.blocks} of {needed} usable blocks", needed_blocks=needed)
    elif limits := window_limits(windows, bound=bound, alpha=item.alpha, dependence=dependence):
        return with_limits(item, limits)
    else:
        item = replace(item, obstacle=_ALIKE)
    return replace(item, ratio=math.exp(balanced_ratios(windows, np.zeros_like(windows.group))[0]))


def in_shared_blocks(treatment: Sample, control: Sample) -> tuple[Sample, Sample, Ints, Ints]:
    """Select the requests in blocks that both samples have, numbered from 0; with each block's old number and trial."""
    samples = (treatment, control)
    if not len(treatment) or not len(control):
        none = np.zeros(0, dtype=np.int64)
        nothing = Sample(values=np.zeros(0), block=none, trial=none)
        return nothing, nothing, none, none
    lowest = min(int(sample.block.min()) for sample in samples)
    # Blocks are counters, so a table of all between the lowest and the highest is small.
    span = max(int(sample.block.max()) for sample in samples) - lowest + 1
    held = [np.bincount(sample.block - lowest, minlength=span) > 0 for sample in samples]
    both = held[0] & held[1]
    number = (np.cumsum(both) - 1).astype(np.int32)
    own, base = samples
    if lowest or not both.all():
        own, base = (sample.only(both[sample.block - lowest]) for sample in samples)
        own, base = (replace(sample, block=number[sample.block - lowest]) for sample in (own, base))
    trial = np.zeros(int(both.sum()), dtype=np.int64)
    trial[base.block] = base.trial
    return own, base, np.flatnonzero(both) + lowest, trial


def _obstacle(treatment: Sample, control: Sample, blocks: int) -> str | None:
    named = (("the arm", treatment), ("the control", control))
    for name, sample in named:
        if not len(sample):
            return f"{name} has no request to compare"
    if blocks == 0:
        return "the arms share no time block"
    for name, sample in named:
        if len(np.unique(sample.values[:1000])) < _FEWEST_DISTINCT:
            distinct = len(np.unique(sample.values))
            if distinct < _FEWEST_DISTINCT:
                return f"{name} shows only {counted(distinct, 'different latency')}"
    return None


def _by_trials(item: Comparison, ratios: Floats, machine: Ints) -> Comparison:
    """Return the comparison with Student's t over the log ratios of trials [1]; where they ran on several machines, the
    wider of that and what machines allow (`tailgate.analysis.statistics.machines`)."""
    mean, trials, alpha = float(ratios.mean()), len(ratios), item.alpha
    over_machines, between = error_over_trials(ratios, machine)
    parts = [Part(variance=float(ratios.var(ddof=1)) / trials, degrees=trials - 1.0), over_machines]
    reaches = [float(t_quantile(1.0 - alpha, part.degrees)) * math.sqrt(part.variance) for part in parts]
    wider = int(reaches[1] > reaches[0])
    lasting = max(*reaches, lasting_reach(ratios, alpha))
    return replace(
        with_limits(item, student_limits(mean, parts[wider], bound=math.log1p(item.margin), alpha=alpha)),
        machine_spread=math.sqrt(between) if wider else 0.0,
        lasting=(math.exp(mean - lasting), math.exp(mean + lasting)),
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values adjusted by Holm's step-down procedure [2], in the given order."""
    order = np.argsort(p_values, kind="stable")
    raised = np.asarray(p_values, dtype=np.float64)[order] * np.arange(len(order), 0, -1)
    adjusted = np.empty(len(order))
    adjusted[order] = np.maximum.accumulate(np.minimum(raised, 1.0))
    return [float(value) for value in adjusted]


def decide(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return the comparisons with verdict and reason.

    PASS: H0 ratio >= 1 + margin is rejected at one-sided alpha, and the ratio over the whole run is below. It is not
    adjusted, since all must pass [3]. FAIL: H0 ratio <= 1 + margin is rejected after Holm's adjustment [2].
    """
    tested = [index for index, item in enumerate(comparisons) if item.p_inferior is not None]
    adjusted = dict(zip(tested, holm([comparisons[index].p_inferior or 0.0 for index in tested]), strict=True))
    return [_decided(item, adjusted.get(index), len(tested)) for index, item in enumerate(comparisons)]


def _decided(item: Comparison, adjusted: float | None, tests: int) -> Comparison:
    if item.obstacle is not None or (item.low is None and item.high is None):
        return replace(item, reason=description(item))
    assert item.ratio is not None  # that has limits
    bound = 1.0 + item.margin
    whole = max(bound, item.whole or 0.0)  # over the run, where that is above
    places = enough(bound, (item.ratio, item.low, item.high, whole), fixed, 2)
    seen, limit = f"{seen_text(item, places)} ({limits_text(item.low, item.high, places)})", fixed(bound, places)
    if adjusted is not None and adjusted <= item.alpha:
        verdict, ending = "FAIL", f", above the limit of {limit}"
    elif adjusted is not None and item.p_inferior is not None and item.p_inferior <= item.alpha:
        verdict = "INCONCLUSIVE"
        ending = (
            f", above the limit of {limit}, but one of {tests} tests may be so by chance (Holm: p = {adjusted:.2g})"
        )
    elif item.p_noninferior is None or item.p_noninferior > item.alpha or item.ratio > bound:
        verdict, ending = "INCONCLUSIVE", f", which leaves the limit of {limit} open"
    elif whole > bound:
        verdict = "INCONCLUSIVE"
        ending = (
            f", below the limit of {limit}, but over the whole run it is {fixed(whole, places)} times: its worst "
            "stretches are worse than the control's"
        )
    else:
        verdict, ending = "PASS", f", below the limit of {limit}"
    return replace(item, tests=tests, verdict=verdict, reason=f"{seen}{ending}.")


def seen_text(item: Comparison, places: int = 2) -> str:
    """Return the ratio in words without an end."""
    of = "" if item.whole in (None, item.ratio) else " of a typical block"
    ratio = f"{fixed(item.ratio or 0.0, places)} times that of {item.control or 'the control'}"
    return f"{quantile_label(item.metric, item.quantile)}{of} is {ratio}"


def description(item: Comparison) -> str:
    """Say what was seen, with its limits or why there are none, in a sentence that decides nothing."""
    if not item.lacks:
        return f"{seen_text(item)} ({limits_text(item.low, item.high)})."
    seen = "" if item.seen is None else f" Seen: ×{fixed(item.seen, 3)}."
    return f"{quantile_label(item.metric, item.quantile)} has no error bars: {item.lacks}.{seen}"


def limits_text(low: float | None, high: float | None, places: int = 2) -> str:
    """Return the limits in words, of which there is one at least."""
    least, most = ("" if end is None else fixed(end, places) for end in (low, high))
    return f"between {least} and {most}" if least and most else f"at most {most}" if most else f"at least {least}"
