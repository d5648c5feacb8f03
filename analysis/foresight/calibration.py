"""Whether the tests behind a verdict hold on a run's own data, shown where the truth is known.

The control is split into two halves that are equal by construction: how often do the very tests of the verdict call
one slower, does the interval hold the ratio of 1, and is one half seen once its latencies are multiplied? Halves of one
server's requests share its queue and its start: that tests the statistics, not restarts. Several trials show those.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pyarrow.compute as pc
from scipy import stats

from analysis.arrays import Bools, Floats, Ints
from analysis.judging.checks.statistics import TAIL_REQUESTS
from analysis.judging.comparisons import MOST_GAPS, blocks_at, compared
from analysis.judging.judgement import judge
from analysis.judging.load_steps import is_search
from analysis.judging.planner import Noise
from analysis.judging.validity import Check, faults_to_mend
from analysis.nouns import counted
from analysis.records.tables import RecordError
from analysis.run.gaps import gaps_of
from analysis.run.run import Run
from analysis.run.trials import SECOND
from analysis.settings.metrics import quantile_label
from analysis.statistics.compare import TRIALS_FOR_T_TEST, Comparison, Sample, compare_quantiles, compare_typical
from analysis.statistics.resampling import first_autocorrelation

How = Literal["at random", "in turn"]
Trust = Literal["trustworthy", "too few data to say", "do not trust"]

EXIT_CODES: Mapping[Trust, int] = {"trustworthy": 0, "too few data to say": 3, "do not trust": 99}
SPLITS = 100
EFFECTS = (1.10, 1.20)
BLOCK_LENGTHS = (1, 2, 4, 8)  # in blocks of the run
# What false calls may surely not exceed: .08 at alpha .05, which the method keeps in simulation.
_SLACK = 1.6
# The interval may hold the truth this much less often than it says.
_SHORTFALL = 0.05
_RESTART_ALPHA = 0.05
_SALT = 5  # of this module's random numbers among the run's
_FEWEST_SPLITS = 20
# These doubt whether the arms are the ones to compare, not whether the comparison is right.
_OF_THE_QUESTION = frozenset({"comparable", "equal work", "parity", "answers", "alive", "control errors"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A count of splits with its exact 95 % interval (Clopper and Pearson)."""

    count: int
    of: int
    low: float
    high: float

    @classmethod
    def of_splits(cls, outcomes: Sequence[bool]) -> Share:
        """The share of splits in which something held; (0, 1) of none."""
        if not outcomes:
            return cls(count=0, of=0, low=0.0, high=1.0)
        interval = stats.binomtest(sum(outcomes), len(outcomes)).proportion_ci(confidence_level=0.95, method="exact")
        return cls(count=sum(outcomes), of=len(outcomes), low=float(interval.low), high=float(interval.high))

    @property
    def share(self) -> float | None:
        """The share seen; None of no splits."""
        return self.count / self.of if self.of else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Halves:
    """The results of the tests on halves of the control whose true ratio is `effect`.

    `slower` and `faster`: calls at one-sided alpha against a ratio of 1. `covered`: the interval of level 1 - 2 alpha
    holds the truth. `passed`: non-inferior at the run's margin, which at an effect of 1 + margin is a false PASS.
    """

    metric: str
    quantile: float
    how: How
    effect: float
    requests: int  # of the smaller half, on average
    blocks: int
    slower: Share
    faster: Share
    covered: Share
    passed: Share
    untested: int  # splits of which no test could be made


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCorrelation:
    """How much the difference between an arm and the control resembles itself one block of `block_s` later."""

    arm: str
    metric: str
    quantile: float
    block_s: float
    blocks: int
    value: float | None
    limit: float  # what independent blocks exceed in one of forty


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarts:
    """The variance of log ratios between trials against what blocks within a trial foretell; p of no difference."""

    arm: str
    metric: str
    quantile: float
    trials: int
    between: float  # standard deviation of the trials' log ratios
    within: float  # standard error of one, by its blocks
    p_value: float | None

    @property
    def ratio(self) -> float | None:
        """Variance between over variance within; 1 is what blocks foretell."""
        return (self.between / self.within) ** 2 if self.within > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """How the tests of a run's verdict hold on its own data, and whether its verdicts can be trusted."""

    control: str
    alpha: float
    margin: float
    splits: int
    halves: tuple[Halves, ...]
    correlations: tuple[BlockCorrelation, ...]
    restarts: tuple[Restarts, ...]
    trials: int
    trust: Trust
    reasons: tuple[str, ...]
    notes: tuple[str, ...]


def calibrate(run: Run, *, splits: int = SPLITS) -> Calibration:
    """The tests of the run's verdict, tried on its own control. The same records and seed give an equal one.

    Raises RecordError for a saturation search, whose load rises by design, and where the control sent nothing.
    """
    if is_search(run):
        raise RecordError("the run searched for the load that arms hold: calibrate a run with one steady load")
    control = run.of_arm(run.control) & run.usable
    if not control.any():
        raise RecordError(f"{run.control} has no measured request: calibrate a run whose control answered")
    halves = tuple(
        item for place, metric in enumerate(run.limits.metrics) for item in _halves(run, metric, place, splits)
    )
    judged = judge(run)
    restarts = tuple(_restarts(run))
    comparing = [gate for gate in judged.gates if gate.kind == "noninferiority"]
    faults = faults_to_mend(judged.checks, comparing, len(run.trials))
    trust, reasons = _verdict(run, halves, restarts, faults)
    return Calibration(
        control=run.control,
        alpha=run.limits.alpha,
        margin=run.limits.margin,
        splits=splits,
        halves=halves,
        correlations=tuple(_correlations(run, judged.steady)),
        restarts=restarts,
        trials=len(run.trials),
        trust=trust,
        reasons=tuple(reasons),
        notes=tuple(_notes(run, halves, restarts)),
    )


# --- Halves of the control --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlValues:
    """The control's steady values of one metric, one entry each."""

    sample: Sample
    unit: Ints  # counted from 0; what must stay together: a session, or else a request
    since_s: Floats  # into the trial


def control_values(run: Run, metric: str) -> ControlValues:
    """The control's steady requests that have the metric; of ITL their gaps."""
    requests = run.requests
    rows = run.steady(run.of_arm(run.control) & run.usable, (run.control,))
    if metric == "itl":
        gaps = gaps_of(requests, rows, most=MOST_GAPS)
        rows, values, at_ns = gaps.row, gaps.ms.astype(np.float64), gaps.end_ns
    else:
        rows = rows[~np.isnan(requests.metric_ms(metric)[rows])]
        values, at_ns = requests.metric_ms(metric)[rows], requests.start_ns[rows]
    trial = requests.trial[rows].astype(np.int64)
    place = np.searchsorted([item.number for item in run.trials], trial)
    starts = np.array([item.start_ns for item in run.trials], dtype=np.int64)
    return ControlValues(
        sample=Sample(values=values, block=blocks_at(run, trial, at_ns), trial=trial),
        unit=_units(run, rows, place),
        since_s=(at_ns - starts[place]) / SECOND,
    )


def _units(run: Run, rows: Ints, trial: Ints) -> Ints:
    """For each row the session of its trial, or the request itself where it has none; counted from 0."""
    names = pc.unique(run.requests.session_ids).drop_null()
    session = pc.fill_null(pc.index_in(run.requests.session_ids, names), -1)
    number = np.asarray(session.to_numpy(), dtype=np.int64)[rows]
    # A session of two trials is two: each trial starts its own.
    keys = np.where(number >= 0, number * len(run.trials) + trial, len(names) * len(run.trials) + rows)
    return np.asarray(np.unique(keys, return_inverse=True)[1])


def _halves(run: Run, metric: str, place: int, splits: int) -> Iterator[Halves]:
    """Halves without an effect, both ways to split; then one half of the random ones made slower."""
    material = control_values(run, metric)
    effects = sorted({*EFFECTS, 1.0 + run.limits.margin_of(metric)})
    ways: tuple[How, ...] = ("at random", "in turn")
    for number, how in enumerate(ways):
        rng = run.rng(_SALT, place, number)
        tested = [
            compared_halves(run, metric, material, first_half(run, material, how, rng), rng) for _ in range(splits)
        ]
        for index, q in enumerate(run.limits.quantiles):
            items = [row[index] for row in tested]
            for effect in (1.0, *effects) if how == "at random" else (1.0,):
                yield _summed([made_slower(item, effect) for item in items], metric, q, how, effect)


def made_slower(item: Comparison, effect: float) -> Comparison:
    """The comparison with the first sample's latencies times `effect`, up to the width of a bin.

    The tests divide by a factor before they compare, so that ratio and limits move by the factor and nothing else does.
    """
    if effect == 1.0 or item.ratio is None:
        return item

    low, high = (None if limit is None else limit * effect for limit in (item.low, item.high))
    return replace(item, ratio=item.ratio * effect, low=low, high=high)


def first_half(run: Run, material: ControlValues, how: How, rng: np.random.Generator) -> Bools:
    """Which values are in the first half: of units drawn by the toss of a coin, or of stretches of time in turn.

    A turn lasts a sixth to a half of a block and begins anywhere, so that each block holds turns of both.
    """
    if how == "at random":
        units = int(material.unit.max()) + 1 if len(material.unit) else 0
        return np.asarray((rng.integers(0, 2, size=units) == 1)[material.unit], dtype=np.bool_)
    turn_s = run.block_s / rng.uniform(2.0, 6.0)
    return np.asarray(((material.since_s / turn_s + rng.uniform(0.0, 2.0)) % 2.0) < 1.0, dtype=np.bool_)


def compared_halves(
    run: Run, metric: str, material: ControlValues, chosen: Bools, rng: np.random.Generator
) -> list[Comparison]:
    """What the gates would say of the two halves, which share their start."""
    halves = (material.sample.only(chosen), material.sample.only(~chosen))
    whole = compare_quantiles(
        *halves,
        qs=run.limits.quantiles,
        margin=run.limits.margin_of(metric),
        alpha=run.limits.alpha,
        draws=run.limits.draws,
        rng=rng,
        paired=False,
        restart_spread=0.0,
    )
    return compare_typical(*halves, whole=whole, restart_spread=0.0) if run.limits.question == "block" else whole


def _summed(items: Sequence[Comparison], metric: str, quantile: float, how: How, effect: float) -> Halves:
    tested = [item for item in items if item.obstacle is None and item.p_worse is not None]
    return Halves(
        metric=metric,
        quantile=quantile,
        how=how,
        effect=effect,
        requests=round(sum(item.requests for item in items) / max(1, len(items))),
        blocks=min((item.blocks for item in items), default=0),
        slower=Share.of_splits([item.low is not None and item.low > 1.0 for item in tested]),
        faster=Share.of_splits([item.high is not None and item.high < 1.0 for item in tested]),
        covered=Share.of_splits([(item.low or 0.0) <= effect <= (item.high or math.inf) for item in tested]),
        passed=Share.of_splits([item.high is not None and item.high <= 1.0 + item.margin for item in tested]),
        untested=len(items) - len(tested),
    )


# --- The run itself ---------------------------------------------------------------------------------------------------


def _correlations(run: Run, steady: Iterable[Comparison]) -> Iterator[BlockCorrelation]:
    """Lag one of the difference in exceedances between arm and control, in blocks of rising length."""
    for item in steady:
        treatment, control = compared(run, item.arm, item.metric, "steady")
        for length in BLOCK_LENGTHS:
            scores = _scores(run, treatment, control, q=item.quantile, ratio=item.ratio or 1.0, length=length)
            if len(scores) < 8:
                break
            yield BlockCorrelation(
                arm=item.arm,
                metric=item.metric,
                quantile=item.quantile,
                block_s=run.block_s * length,
                blocks=len(scores),
                value=first_autocorrelation(scores),
                limit=2.0 / math.sqrt(len(scores)),
            )


def _scores(run: Run, treatment: Sample, control: Sample, *, q: float, ratio: float, length: int) -> Floats:
    """By how much more of the treatment, divided by `ratio`, lies beyond the pooled quantile, block by block."""
    moved = treatment.values / ratio
    if not moved.size or not control.values.size:
        return np.zeros(0)
    threshold = float(np.quantile(np.concatenate((moved, control.values)), q))
    of_block = np.empty(run.blocks, dtype=np.int64)
    coarse = 0
    for trial in run.trials:
        of_block[trial.first_block : trial.first_block + trial.blocks] = coarse + np.arange(trial.blocks) // length
        coarse += math.ceil(trial.blocks / length)
    shares, totals = [], []
    for values, block in ((moved, of_block[treatment.block]), (control.values, of_block[control.block])):
        total = np.bincount(block, minlength=coarse)
        above = np.bincount(block, weights=(values > threshold).astype(np.float64), minlength=coarse)
        shares.append(above / np.maximum(total, 1))
        totals.append(total)
    both = (totals[0] > 0) & (totals[1] > 0)
    weight = (totals[0] + totals[1])[both]
    return np.asarray((shares[0] - shares[1])[both] * weight / weight.mean()) if both.any() else np.zeros(0)


def _restarts(run: Run) -> Iterator[Restarts]:
    """Trials against blocks for every gated comparison; nothing where fewer than two trials can be compared."""
    for number, arm in enumerate(run.treatments):
        for place, metric in enumerate(run.limits.metrics):
            samples = compared(run, arm, metric, "steady")
            for q in run.limits.quantiles:
                logs = []
                for trial in run.trials:
                    own = [sample.only(sample.trial == trial.number) for sample in samples]
                    (item,) = compare_quantiles(
                        *own,
                        qs=(q,),
                        margin=run.limits.margin_of(metric),
                        alpha=run.limits.alpha,
                        draws=run.limits.draws,
                        rng=run.rng(_SALT, 2, number, place, trial.number),
                    )
                    noise = Noise.of(item)
                    if noise is not None and item.ratio is not None:
                        within = noise.per_unit / math.sqrt(item.blocks)
                        logs.append((math.log(item.ratio), within**2, noise.degrees or 1.0))
                if len(logs) >= 2:
                    yield restarts_of(arm, metric, q, logs)


def restarts_of(arm: str, metric: str, quantile: float, logs: Sequence[tuple[float, float, float]]) -> Restarts:
    """The comparison of variances, from (log ratio, its variance by blocks, degrees of freedom) of each trial."""
    ratios, variances, degrees = (np.array(column) for column in zip(*logs, strict=True))
    between, within = float(ratios.var(ddof=1)), float(variances.mean())
    p_value = float(stats.f.sf(between / within, len(logs) - 1, degrees.sum())) if within > 0 else None
    return Restarts(
        arm=arm,
        metric=metric,
        quantile=quantile,
        trials=len(logs),
        between=math.sqrt(between),
        within=math.sqrt(within),
        p_value=p_value,
    )


# --- In words ---------------------------------------------------------------------------------------------------------


def _verdict(
    run: Run, halves: Sequence[Halves], restarts: Sequence[Restarts], faults: Sequence[Check]
) -> tuple[Trust, list[str]]:
    """Doubts weigh more than want of data; without either the verdicts can be trusted."""
    if doubts := list(_doubts(run, halves, restarts, faults)):
        return "do not trust", doubts
    wants = list(dict.fromkeys(_wants(run, halves)))
    return ("too few data to say", wants) if wants else ("trustworthy", [])


def _doubts(run: Run, halves: Sequence[Halves], restarts: Sequence[Restarts], faults: Sequence[Check]) -> Iterator[str]:
    alpha = run.limits.alpha
    for item in halves:
        label = quantile_label(item.metric, item.quantile)
        for call, share in (("slower", item.slower), ("faster", item.faster)):
            if item.effect == 1.0 and share.low > _SLACK * alpha:
                yield f"{share.count} of {share.of} equal halves ({item.how}) are called {call} on {label}."
        if item.covered.of and item.covered.high < 1.0 - 2.0 * alpha - _SHORTFALL:
            yield (
                f"The interval of {label} holds the true {item.effect:g} in {item.covered.count} of "
                f"{item.covered.of} splits ({item.how}), {100 * (1 - 2 * alpha):g} % are wanted."
            )
    for row in restarts:
        if row.p_value is not None and row.p_value <= _RESTART_ALPHA and len(run.trials) < TRIALS_FOR_T_TEST:
            yield (
                f"{row.arm}: {quantile_label(row.metric, row.quantile)} differs between {row.trials} starts "
                f"{row.ratio:.1f} times as much in variance as blocks foretell: run {TRIALS_FOR_T_TEST} trials or more."
            )
    for check in faults:
        if "noninferiority" in check.affects and check.check not in _OF_THE_QUESTION:
            yield check.reason


def _wants(run: Run, halves: Sequence[Halves]) -> Iterator[str]:
    alpha, limits = run.limits.alpha, run.limits
    for item in halves:
        label = quantile_label(item.metric, item.quantile)
        if item.blocks < limits.min_blocks:
            yield f"Halves share {counted(item.blocks, 'steady block')}; {limits.min_blocks} are needed."
        if item.requests * (1.0 - item.quantile) < TAIL_REQUESTS - 1e-9:
            needed = math.ceil(TAIL_REQUESTS / (1.0 - item.quantile) - 1e-9)
            yield f"A half has {item.requests} values; {label} needs {needed}."
        if item.slower.of < max(_FEWEST_SPLITS, item.untested):
            yield f"Only {item.slower.of} of {item.slower.of + item.untested} splits could be tested on {label}."
        worst = max(item.slower.share or 0.0, item.faster.share or 0.0)
        if item.effect == 1.0 and worst > 2.0 * alpha:
            called = f"{100 * worst:.0f} % of equal halves ({item.how}) are called different on {label}"
            yield f"{called}: more splits will tell."


def _notes(run: Run, halves: Sequence[Halves], restarts: Sequence[Restarts]) -> Iterator[str]:
    yield (
        "Halves of one server share its queue and its start: this tests the statistics, not restarts. They are compared"
        " unpaired and have half the requests, so that real arms of a mirrored run are told apart better."
    )
    if len(run.trials) < 2:
        yield "One trial says nothing of how starts differ: run two or more to know, six or more to allow for it."
    elif not restarts:
        yield "No two trials could be compared, so that nothing is known of how starts differ."
    for item in halves:
        if item.effect != max(EFFECTS) or (item.slower.share or 0.0) >= 0.5:
            continue
        yield (
            f"A half that is {item.effect:g} times as slow is seen in {item.slower.count} of {item.slower.of} splits "
            f"on {quantile_label(item.metric, item.quantile)}: a run of this length decides only large differences."
        )
