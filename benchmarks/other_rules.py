"""The rules by which other tools compare two servers' latencies, as plain functions of completed requests.

A rule sees the answers that came. A request that failed, or that had no end, is in none of them, and no rule knows of
compiles. What a rule says is PASS, FAIL or "cannot say".

Kayenta is Spinnaker's canary analysis. Its judge NetflixACAJudge-v1.0 is followed as of Spinnaker's commit f8b98eb [1]:
Wilcoxon's interval for the shift of location at 98 %, and High where all of it lies above a quarter of the shift that
Hodges and Lehmann estimate. The tolerance is a share of the estimated shift and of nothing else, so that however small
a shift is High once it is known well enough. `allowedIncrease` (default 1) asks for a ratio of the means as well. Where
both sides are constant the judge adds noise to compare them; here it cannot say.

What it compares is a series of points, of which Spinnaker's guide asks for at least 50 a metric [2].

[1] github.com/spinnaker/spinnaker, kayenta/kayenta-judge/src/main/scala/com/netflix/kayenta/judge:
    NetflixACAJudge.scala, classifiers/metric/MannWhitneyClassifier.scala, stats/EffectSizes.scala;
    kayenta/kayenta-mannwhitney: MannWhitney.scala
[2] spinnaker.io/docs/guides/user/canary/best-practices, "Run the canary for enough time"
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np
from scipy import optimize, stats

from analysis.arrays import Codes, Floats
from analysis.statistics.quantiles import quantile

PASS: Final = "PASS"
FAIL: Final = "FAIL"
CANNOT_SAY: Final = "cannot say"

MARGIN: Final = 0.10
ALPHA: Final = 0.05
TAIL: Final = 0.99
MINUTE_S: Final = 60.0
BLOCK_S: Final = 30.0
KAYENTA_TOLERANCE: Final = 0.25
KAYENTA_CONFIDENCE: Final = 0.98
_SOLVER_MS: Final = 1e-4  # how near Kayenta's solver comes
_DRAWS: Final = 9_999


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The completed requests of an arm: latencies, trials, and when each ended in the window of its trial."""

    latency_ms: Floats
    trial: Codes
    ended_s: Floats  # since the window opened
    window_s: Mapping[int, float]  # of each trial

    def series(self, width_s: float) -> Floats:
        """The p99 of what ended in each whole interval of a window, as a monitor has it.

        Where nothing ended there is no point, and what ended after the window is in none.
        """
        points = []
        for trial, window_s in self.window_s.items():
            own = self.trial == trial
            interval = np.floor_divide(self.ended_s[own], width_s)
            for number in range(int(window_s / width_s + 1e-6)):
                points.append(quantile(self.latency_ms[own][interval == number], TAIL))
        return np.array([point for point in points if not math.isnan(point)], dtype=np.float64)

    def trial_means(self) -> Floats:
        """The mean latency of each trial that has an answer."""
        return np.array([self.latency_ms[self.trial == trial].mean() for trial in np.unique(self.trial)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Opinion:
    """What a rule says of a candidate, and the figures that it says it by."""

    verdict: str
    figures: Mapping[str, float | str] = field(default_factory=dict)


Rule = Callable[[Answers, Answers], Opinion]


# --- Rules: of a candidate and a control ------------------------------------------------------------------------------


def threshold(candidate: Answers, control: Answers, *, margin: float = MARGIN) -> Opinion:
    """FAIL where the candidate's p99 is above the control's by more than the margin, whatever chance may have done."""
    ratio = _ratio(quantile(candidate.latency_ms, TAIL), quantile(control.latency_ms, TAIL))
    if math.isnan(ratio):
        return Opinion(verdict=CANNOT_SAY)
    return Opinion(verdict=FAIL if ratio > 1 + margin else PASS, figures={"ratio": ratio})


def mann_whitney(candidate: Answers, control: Answers, *, alpha: float = ALPHA) -> Opinion:
    """FAIL where Mann and Whitney's test over requests, one-sided and by the normal law, calls the candidate slower."""
    if not candidate.latency_ms.size or not control.latency_ms.size:
        return Opinion(verdict=CANNOT_SAY)
    test = stats.mannwhitneyu(candidate.latency_ms, control.latency_ms, alternative="greater", method="asymptotic")
    return Opinion(verdict=FAIL if test.pvalue < alpha else PASS, figures={"p": float(test.pvalue)})


def overlap(candidate: Answers, control: Answers, *, seed: int = 0) -> Opinion:
    """FAIL where the 95 % intervals of the two p99, by a bootstrap over requests, are apart and the candidate's is the
    higher one."""
    if not candidate.latency_ms.size or not control.latency_ms.size:
        return Opinion(verdict=CANNOT_SAY)
    low, high = p99_interval(candidate.latency_ms, rng=np.random.default_rng([seed, 1]))
    control_low, control_high = p99_interval(control.latency_ms, rng=np.random.default_rng([seed, 0]))
    figures = {"low": low, "high": high, "control_low": control_low, "control_high": control_high}
    return Opinion(verdict=FAIL if low > control_high else PASS, figures=figures)


def welch(candidate: Answers, control: Answers, *, alpha: float = ALPHA) -> Opinion:
    """FAIL where Welch's t over the mean latencies of trials, one-sided, calls the candidate slower. It needs two
    trials of each arm, whose means are not all one."""
    means, control_means = candidate.trial_means(), control.trial_means()
    if min(means.size, control_means.size) < 2 or not (np.ptp(means) or np.ptp(control_means)):
        return Opinion(verdict=CANNOT_SAY)
    p = float(stats.ttest_ind(means, control_means, equal_var=False, alternative="greater").pvalue)
    figures = {"p": p, "ratio": _ratio(float(means.mean()), float(control_means.mean()))}
    return Opinion(verdict=FAIL if p < alpha else PASS, figures=figures)


def kayenta(
    candidate: Answers, control: Answers, *, width_s: float | None = None, allowed_increase: float = 1.0
) -> Opinion:
    """FAIL where Kayenta's judge classifies the metric as High, which is what `direction: increase` fails by.

    It compares the p99 of each interval of `width_s`, as a monitor would give it; None: the requests themselves.
    """
    values, control_values = (
        arm.latency_ms if width_s is None else arm.series(width_s) for arm in (candidate, control)
    )
    if not values.size or not control_values.size:
        return Opinion(verdict=CANNOT_SAY, figures={"class": "Nodata"})
    figures: dict[str, float | str] = {"points": values.size, "control_points": control_values.size}
    if np.array_equal(np.sort(values), np.sort(control_values)):
        return Opinion(verdict=PASS, figures={**figures, "class": "Pass", "shift_ms": 0.0})
    if not np.ptp(values) and not np.ptp(control_values):
        return Opinion(verdict=CANNOT_SAY, figures=figures)
    low, shift, high = shift_interval(values, control_values, confidence=KAYENTA_CONFIDENCE)
    ratio = _ratio(float(values.mean()), float(control_values.mean()))
    bound = KAYENTA_TOLERANCE * abs(shift)
    # As no decrease is asked for by default, any ratio of at most 1 is one.
    name = "High" if low > bound and ratio >= allowed_increase else "Low" if high < -bound and ratio <= 1 else "Pass"
    figures |= {"class": name, "shift_ms": shift, "low_ms": low, "high_ms": high, "mean_ratio": ratio}
    return Opinion(verdict=FAIL if name == "High" else PASS, figures=figures)


RULES: Final[Mapping[str, Rule]] = {
    "threshold": threshold,
    "kayenta_requests": kayenta,
    "kayenta_minutes": partial(kayenta, width_s=MINUTE_S),
    "kayenta_blocks": partial(kayenta, width_s=BLOCK_S),
    "kayenta_minutes_margin": partial(kayenta, width_s=MINUTE_S, allowed_increase=1 + MARGIN),
    "mann_whitney": mann_whitney,
    "overlap": overlap,
    "welch": welch,
}
RULE_NAMES: Final[Mapping[str, str]] = {
    "threshold": "p99 ≤ 1.10 ×",
    "kayenta_requests": "Kayenta, requests",
    "kayenta_minutes": "Kayenta, p99 a minute",
    "kayenta_blocks": "Kayenta, p99 of 30 s",
    "kayenta_minutes_margin": "Kayenta, p99 a minute, allowedIncrease 1.1",
    "mann_whitney": "Mann–Whitney, requests",
    "overlap": "intervals apart",
    "welch": "Welch, trial means",
}


# --- Statistics -------------------------------------------------------------------------------------------------------


def shift_interval(values: Floats, others: Floats, *, confidence: float) -> tuple[float, float, float]:
    """(low, estimate, high) of how far `values` lie above `others`: Hodges and Lehmann's estimate with Wilcoxon's
    interval, both by the normal law with a correction for continuity and ties, as R's wilcox.test solves for them.

    With few values the interval ends at the least or the largest difference that there is, as R has it, whatever the
    confidence: three values against three never reach 98 %, and the interval is then narrower than its name.
    """
    least, most = float(values.min() - others.max()), float(values.max() - others.min())
    values, others = np.sort(values), np.sort(others)
    count, pairs = values.size + others.size, values.size * others.size
    own_ties = _ties(values) + _ties(others)

    def excess(shift: float, quantile_of_law: float) -> float:
        moved = values - shift
        left, right = np.searchsorted(others, moved, "left"), np.searchsorted(others, moved, "right")
        apart = float(left.sum() + right.sum() - pairs) / 2
        # To sort all of them takes longest, and few shifts make a value meet another.
        ties = own_ties if (left == right).all() else _ties(np.concatenate((moved, others)))
        spread = math.sqrt(pairs / 12 * (count + 1 - ties / (count * (count - 1))))
        return (apart - math.copysign(0.5, apart) * (apart != 0)) / spread - quantile_of_law

    def root(quantile_of_law: float) -> float:
        if excess(least, quantile_of_law) <= 0:
            return least
        if excess(most, quantile_of_law) >= 0:
            return most
        return float(optimize.brentq(excess, least, most, args=(quantile_of_law,), xtol=_SOLVER_MS))

    law = float(stats.norm.ppf((1 + confidence) / 2))
    return root(law), root(0.0), root(-law)


def _ties(values: Floats) -> float:
    """The sum of t³ - t over groups of t equal values."""
    _, sizes = np.unique(values, return_counts=True)
    return float((sizes.astype(np.float64) ** 3 - sizes).sum())


def p99_interval(values: Floats, *, rng: np.random.Generator, confidence: float = 0.95) -> tuple[float, float]:
    """The percentile bootstrap of p99, requests taken as independent.

    Only two order statistics of a resample are in its p99. Their ranks are drawn from their own law, that of order
    statistics of uniform numbers, which gives what whole resamples give and costs nothing.
    """
    ordered = np.sort(values)
    size = ordered.size
    position = (size - 1) * TAIL
    rank = math.floor(position) + 1  # from 1
    one = rng.beta(rank, size - rank + 1, _DRAWS)
    other = one + (1 - one) * rng.beta(1, size - rank, _DRAWS) if rank < size else one
    lower, upper = (ordered[np.minimum((size * place).astype(np.int64), size - 1)] for place in (one, other))
    low, high = np.quantile(
        lower + (upper - lower) * (position - rank + 1), ((1 - confidence) / 2, (1 + confidence) / 2)
    )
    return float(low), float(high)


def _ratio(value: float, other: float) -> float:
    return value / other if other > 0 else math.nan
