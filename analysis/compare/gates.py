"""The figures of one arm in two runs, each judged by itself: PASS, FAIL or INCONCLUSIVE with a reason.

PASS: surely not worse than the limit. FAIL: surely worse than the baseline, and as far as seen by more than the limit.
All else is open. FAILs are adjusted by Holm's procedure over all gates, so that equal runs fail in at most one of
1 / alpha comparisons; PASSes need no adjustment, since every gate must pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from analysis.compare.compared_run import ComparedArm, ComparedRun
from analysis.compare.machine import MachineSpeeds
from analysis.judging.gates import FAIL, INCONCLUSIVE, PASS
from analysis.run.work import answers_apart
from analysis.settings.compare_limits import FIGURES, CompareLimits, Figure, bound_of, ratio_of
from analysis.statistics.compare import holm
from analysis.statistics.unpaired import Difference, Level, day_part, difference, level_of, trials_needed
from analysis.wording import counted

_COMPILE_FIGURES = frozenset({"warmup_compiles", "compile_s", "recompiles", "serving_compile_s"})
_CACHE_SHARE = 0.1  # by how much the share of compiles that the cache had may differ


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureRow:
    """One figure of one arm in both runs. With a limit it is a gate, and has a verdict."""

    arm: str
    figure: Figure
    baseline: float | None  # the typical trial: a geometric mean, of counts the mean
    candidate: float | None
    ratio: float | None = None  # candidate over baseline, with one-sided limits
    low: float | None = None
    high: float | None = None
    spread: float | None = None  # standard error of the log ratio
    degrees: float | None = None
    trials: tuple[int, int] = (0, 0)
    limit: float | None = None
    p_worse: float | None = None  # of H0: not worse; adjusted where it is a gate
    needed_trials: int | None = None  # in each run, that would let a ratio as seen pass
    verdict: str | None = None
    reason: str = ""
    doubt: str = ""  # why the verdict that the figures would have cannot be believed

    @property
    def seen(self) -> str:
        """The ratio in words, with its limits."""
        if self.ratio is None:
            return f"{self.figure.label} cannot be compared"
        limits = "so few requests and trials set no limits"
        if self.low is not None and self.high is not None:
            limits = f"between {self.low:.3f} and {self.high:.3f}"
        base = "baseline's" if self.baseline else f"{self.figure.least:g} that the baseline's 0 is taken for"
        return f"{self.figure.label} is {self.ratio:.3f} times the {base} ({limits})"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Estimate:
    """A row with the numbers that decide it."""

    row: FigureRow
    difference: Difference  # positive is worse
    bound: float
    levels: tuple[Level, Level]


def arm_rows(
    arms: Mapping[str, str],
    *,
    baseline: ComparedRun,
    candidate: ComparedRun,
    machines: Mapping[str, MachineSpeeds],
    limits: CompareLimits,
) -> list[FigureRow]:
    """All figures that both runs have, or that one of them lacks, of each of `arms` (the baseline's name to the
    candidate's), judged where they have a limit. `machines` by the candidate's name of the arm.
    """
    rows: list[FigureRow] = []
    estimates: list[_Estimate] = []
    for name, other in arms.items():
        pair = baseline.arms[name], candidate.arms[other]
        for figure in FIGURES:
            row = _base(figure, other, *pair, limits)
            if row is None:
                continue
            if row.verdict is None and not row.reason and not figure.counted:
                estimate = _estimate(row, *pair, limits)
                if estimate is not None and row.limit is not None:
                    estimates.append(estimate)
                row = estimate.row if estimate is not None else _unknown(row, pair[1])
            elif figure.counted and row.limit is not None and not row.reason:
                row = _count(row, *pair, limits)
            rows.append(row)
    judged = {id(item.row): row for item, row in zip(estimates, _decided(estimates, machines, limits), strict=True)}
    rows = [judged.get(id(row), row) for row in rows]
    pairs = {other: (baseline.arms[name], candidate.arms[other]) for name, other in arms.items()}
    return [_believed(row, *pairs[row.arm], machines[row.arm], limits) for row in rows]


# --- What is compared -------------------------------------------------------------------------------------------------


def _base(
    figure: Figure, arm: str, baseline: ComparedArm, candidate: ComparedArm, limits: CompareLimits
) -> FigureRow | None:
    """The row without a judgement; with a reason where there can be none. None where neither run has the figure."""
    one, two = (side.figures.values.get(figure.key) for side in (baseline, candidate))
    if not one and not two:
        return None
    row = FigureRow(
        arm=arm,
        figure=figure,
        baseline=_typical(figure, one),
        candidate=_typical(figure, two),
        trials=(len(one or ()), len(two or ())),
        limit=limits.limit_of(figure),
    )
    if not one:
        return replace(row, limit=None, reason=f"{figure.label} was not recorded in the baseline")
    if not two:
        reason = f"{figure.label} was recorded in the baseline and not in the candidate: record it again"
        return replace(row, verdict=INCONCLUSIVE if row.limit is not None else None, reason=reason)
    return row


def _values(figure: Figure, trials: Mapping[int, tuple[float, object]]) -> list[float]:
    return [max(value, figure.least) for value, _ in trials.values()]


def _typical(figure: Figure, trials: Mapping[int, tuple[float, object]] | None) -> float | None:
    values = [value for value, _ in (trials or {}).values()]
    if not values:
        return None
    if figure.counted or min(values) <= 0:
        return sum(values) / len(values)
    return math.exp(sum(math.log(value) for value in values) / len(values))


def _level(figure: Figure, arm: ComparedArm, limits: CompareLimits) -> Level | None:
    trials = arm.figures.values.get(figure.key) or {}
    values = _values(figure, trials)
    if not values or min(values) <= 0:
        return None
    sign = 1.0 if figure.less_is_better else -1.0
    return level_of(
        sign * np.log(values),
        [luck for _, luck in trials.values()],
        restart_spread=figure.luck * arm.start_spread(limits),
    )


def _estimate(row: FigureRow, baseline: ComparedArm, candidate: ComparedArm, limits: CompareLimits) -> _Estimate | None:
    figure = row.figure
    one, two = (_level(figure, arm, limits) for arm in (baseline, candidate))
    nothing = figure.less_is_better and _is_nothing(figure, candidate)
    if one is None or two is None or nothing or (row.limit is None and not (row.baseline and row.candidate)):
        return None
    apart = difference(one, two, day_part(figure.luck * limits.day_spread))
    low, high = apart.limits(limits.alpha)
    ends = sorted(ratio_of(figure, end) for end in (low, high) if end is not None)
    return _Estimate(
        row=replace(
            row,
            ratio=ratio_of(figure, apart.effect),
            low=ends[0] if ends else None,
            high=ends[1] if ends else None,
            spread=apart.spread,
            degrees=apart.part.degrees if apart.part is not None else None,
            p_worse=apart.p_above(0.0),
        ),
        difference=apart,
        bound=math.inf if row.limit is None else bound_of(figure, row.limit),
        levels=(one, two),
    )


def _is_nothing(figure: Figure, arm: ComparedArm) -> bool:
    return not any(value for value, _ in (arm.figures.values.get(figure.key) or {}).values())


def _unknown(row: FigureRow, candidate: ComparedArm) -> FigureRow:
    """Nothing has a ratio to nothing. None of what had better be little is as good as can be."""
    if row.limit is None:
        return row
    label = row.figure.label
    if row.figure.less_is_better and _is_nothing(row.figure, candidate):
        return replace(row, verdict=PASS, reason=f"{label}: none in any trial.")
    return replace(row, verdict=INCONCLUSIVE, reason=f"{label} is 0 in a trial, so that there is no ratio.")


# --- What follows -----------------------------------------------------------------------------------------------------


def _decided(
    estimates: Sequence[_Estimate], machines: Mapping[str, MachineSpeeds], limits: CompareLimits
) -> list[FigureRow]:
    """The rows with their verdicts, which hold whatever part of the difference the machine explains."""
    none = [(0.0, 0.0)] * len(estimates)
    measured = _verdicts(estimates, none, limits)
    explained = [_machine_range(item, machines) for item in estimates]
    rows = []
    for item, (verdict, adjusted), (held, _) in zip(
        estimates, measured, _verdicts(estimates, explained, limits), strict=True
    ):
        row = replace(item.row, p_worse=adjusted, verdict=verdict)
        if held == verdict:
            rows.append(_worded(row, item, limits))
            continue
        doubt = f"{machines[row.arm].text}, which may be why"
        reason = f"{row.seen}; that would be a {verdict}, but {doubt}: run the baseline again on this machine."
        rows.append(replace(row, verdict=INCONCLUSIVE, reason=reason, doubt=doubt))
    return rows


def _machine_range(item: _Estimate, machines: Mapping[str, MachineSpeeds]) -> tuple[float, float]:
    if item.row.figure.machine != "proportional":
        return 0.0, 0.0
    return machines[item.row.arm].range


def _verdicts(
    estimates: Sequence[_Estimate], explained: Sequence[tuple[float, float]], limits: CompareLimits
) -> list[tuple[str, float | None]]:
    """The verdict of each, and its p-value of no worsening, adjusted over all. `explained`: the least and the most of
    each log ratio that is the machine's; a PASS holds with the least taken off, a FAIL with the most.
    """
    passing, failing = (
        [item.difference.moved(ends[side]) for item, ends in zip(estimates, explained, strict=True)] for side in (0, 1)
    )
    known = [place for place, item in enumerate(failing) if item.part is not None]
    raw = [failing[place].p_above(0.0) for place in known]
    adjusted = dict(zip(known, holm([p for p in raw if p is not None]), strict=True))
    verdicts = []
    for place, item in enumerate(estimates):
        p_within, p_worse = passing[place].p_below(item.bound), adjusted.get(place)
        verdict = INCONCLUSIVE
        if p_within is not None and p_within <= limits.alpha:
            verdict = PASS
        elif p_worse is not None and p_worse <= limits.alpha and failing[place].effect > item.bound:
            verdict = FAIL
        verdicts.append((verdict, p_worse))
    return verdicts


def _worded(row: FigureRow, item: _Estimate, limits: CompareLimits) -> FigureRow:
    limit = ratio_of(row.figure, item.bound)
    side = ("below", "above") if row.figure.less_is_better else ("above", "below")
    if row.verdict == PASS:
        return replace(row, reason=f"{row.seen}, {side[0]} the limit of {limit:.3g}.")
    if row.verdict == FAIL:
        return replace(row, reason=f"{row.seen}: surely worse, and {side[1]} the limit of {limit:.3g}.")
    day = day_part(row.figure.luck * limits.day_spread)
    needed = trials_needed(*item.levels, day, bound=item.bound, alpha=limits.alpha)
    if row.low is None:
        advice = "more traffic or more trials would set some"
    elif needed is not None:
        advice = f"with {counted(needed, 'trial')} in each run such a ratio would pass"
    elif item.difference.effect > item.bound:
        advice = "more trials would tell whether it is really worse"
    else:
        advice = "no number of trials would do: two days may differ by as much (compare.day_spread)"
    reason = f"{row.seen}, which leaves the limit of {limit:.3g} open; {advice}."
    return replace(row, needed_trials=needed, reason=reason)


def _count(row: FigureRow, baseline: ComparedArm, candidate: ComparedArm, limits: CompareLimits) -> FigureRow:
    """A count of what happened is no estimate: it FAILs with one trial."""
    one, two = ([value for value, _ in side.figures.values[row.figure.key].values()] for side in (baseline, candidate))
    more, label = row.limit or 0.0, row.figure.label
    if row.figure.key == "warmup_compiles":
        seen = f"{label}: {_span(two)}, in the baseline {_span(one)}"
        if max(two) <= max(one) + more:
            return replace(row, verdict=PASS, reason=f"{seen}.")
        verdict = FAIL if min(two) > max(one) + more else INCONCLUSIVE
        return replace(row, verdict=verdict, reason=f"{seen}, and {more:g} more are allowed.")
    rates = sum(one) / len(one), sum(two) / len(two)
    new, old = (f"{sum(counts):g} in {counted(len(counts), 'trial')}" for counts in (two, one))
    seen = f"{label}: {new}, in the baseline {old}"
    if rates[1] <= rates[0] + more:
        return replace(row, verdict=PASS, reason=f"{seen}.")
    if not sum(one):
        return replace(row, verdict=FAIL, reason=f"{seen}: it did not recompile before, and {more:g} are allowed.")
    # Given their sum, counts of equal rates fall on the candidate by its share of the trials.
    total = round(sum(one) + sum(two))
    chance = float(stats.binom.sf(round(sum(two)) - 1, total, len(two) / (len(one) + len(two))))
    if chance <= limits.alpha:
        return replace(row, verdict=FAIL, p_worse=chance, reason=f"{seen}: surely more.")
    return replace(row, verdict=INCONCLUSIVE, p_worse=chance, reason=f"{seen}, which traffic alone may explain.")


def _span(counts: Sequence[float]) -> str:
    return f"{min(counts):g}" if min(counts) == max(counts) else f"{min(counts):g} to {max(counts):g}"


# --- What may be believed ---------------------------------------------------------------------------------------------


def _believed(
    row: FigureRow, baseline: ComparedArm, candidate: ComparedArm, machine: MachineSpeeds, limits: CompareLimits
) -> FigureRow:
    """The row, INCONCLUSIVE where its verdict rests on what the runs do not show."""
    if row.verdict not in (PASS, FAIL):
        return row
    doubt = _doubt(row, baseline, candidate, machine, limits)
    if not doubt:
        return row
    reason = f"{row.reason} That would be a {row.verdict}, but {doubt}."
    return replace(row, verdict=INCONCLUSIVE, reason=reason, doubt=doubt)


def _doubt(
    row: FigureRow, baseline: ComparedArm, candidate: ComparedArm, machine: MachineSpeeds, limits: CompareLimits
) -> str:
    figure = row.figure
    sources = [side.figures.sources.get(figure.key) for side in (baseline, candidate)]
    if sources[0] != sources[1]:
        return f"the baseline has it from {sources[0]} and the candidate from {sources[1]}: record the baseline again"
    if figure.key in ("startup_s", "compile_s") and abs(_cached(baseline) - _cached(candidate)) > _CACHE_SHARE:
        shares = f"{100 * _cached(baseline):.0f} % and {100 * _cached(candidate):.0f} %"
        return f"the compile cache held {shares} of the compiles: run both from caches in one state"
    # What was counted, or held in memory, was so however the run went.
    fact = figure.counted or figure.machine == "none"
    if figure.traffic and not fact and baseline.answers is not None and candidate.answers is not None:
        apart = answers_apart("the candidate", "the baseline", candidate.answers, baseline.answers)
        if apart:
            return f"{'; '.join(apart)}: that is other work"
    for side, whose in ((candidate, "candidate"), (baseline, "baseline")):
        doubts = side.compile_doubts if figure.counted else side.doubts if figure.traffic else ()
        if fact and not figure.counted and (row.verdict == FAIL) == (whose == "baseline"):
            # a slower baseline held no less, and a slower candidate that passes would hold no more
            doubts = tuple(name for name in doubts if name not in side.slowed)
        if doubts and not (fact and row.verdict == FAIL and whose == "candidate"):
            return f"a check of the {whose}'s run failed ({', '.join(doubts)}): see its report"
    if figure.machine == "none":
        return ""
    if limits.need_references and not machine.known:
        return (
            "nothing says that the machines were equally fast: take references in both runs ([bed] reference_s), or "
            "set compare.need_references = false"
        )
    least, most = machine.drift_range
    if figure.machine == "unknown" and ((row.verdict == FAIL and most > 0) or (row.verdict == PASS and least < 0)):
        return f"{machine.text}: run the baseline again on this machine"
    return ""


def _cached(arm: ComparedArm) -> float:
    total = sum(arm.cache.values())
    return arm.cache.get("hit", 0.0) / total if total else 0.0
