"""Compare the verdicts of other tools' rules on the stored records of a case with tailgate's.

The same records, arms, metrics and cold start as `tailgate analyze`, latency from the scheduled time as well. A rule
sees the answers that came, past the cold start, also those that a compile delayed. A request that failed, or that had
no end, is in none of them, and no rule knows of compiles. What a rule says is PASS, FAIL or "cannot say".

Kayenta is Spinnaker's canary analysis. Its judge NetflixACAJudge-v1.0 is followed as of Spinnaker's commit f8b98eb [1]:
Wilcoxon's interval for the shift of location at 98 %, and High where all of it lies above a quarter of the shift that
Hodges and Lehmann estimate. The tolerance is a share of the estimated shift and of nothing else, so that however small
a shift is High once it is known well enough. Where both sides are constant the judge adds noise to compare them; here
it cannot say. What it compares is a series of points, of which Spinnaker's guide asks for at least 50 a metric [2].

[1] github.com/spinnaker/spinnaker, kayenta/kayenta-judge/src/main/scala/com/netflix/kayenta/judge:
    NetflixACAJudge.scala, classifiers/metric/MannWhitneyClassifier.scala, stats/EffectSizes.scala;
    kayenta/kayenta-mannwhitney: MannWhitney.scala
[2] spinnaker.io/docs/guides/user/canary/best-practices, "Run the canary for enough time"
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from scipy import optimize, stats

from tailgate.analysis.arrays import Floats, Ints
from tailgate.analysis.judging.verdict import combined
from tailgate.analysis.records.run_records import read_run
from tailgate.analysis.run.run import Run
from tailgate.analysis.run.trials import SECOND
from tailgate.analysis.settings.metrics import quantile_label
from tailgate.analysis.statistics.quantiles import quantile
from tailgate.analysis.wording import counted

PASS: Final = "PASS"
FAIL: Final = "FAIL"
CANNOT_SAY: Final = "cannot say"

MARGIN: Final = 0.10
ALPHA: Final = 0.05
TAIL: Final = 0.99
MINUTE_S: Final = 60.0
KAYENTA_TOLERANCE: Final = 0.25
KAYENTA_CONFIDENCE: Final = 0.98
_ENOUGH_POINTS: Final = 50  # of a series, as Spinnaker's guide has it
_DRAWS: Final = 9_999
_SOLVER_MS: Final = 1e-4  # how near Kayenta's solver comes
_SLACK_NS: Final = 1_000_000  # the last request of a trial that was cut off starts at its end
_GATES: Final = {f"noninferiority p{100 * TAIL:g}_{metric}": metric for metric in ("ttft", "e2e")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The completed requests of an arm: latencies, trials, and when each ended in the window of its trial."""

    latency_ms: Floats
    trial: Ints
    ended_s: Floats  # since the window opened
    window_s: Mapping[int, float]  # of each trial

    def series(self, width_s: float) -> Floats:
        """Return the p99 of what ended in each whole interval of a window, as a monitor does.

        An interval in which nothing ended has no point, and what ended after the window is in none.
        """
        points = []
        for trial, window_s in self.window_s.items():
            own = self.trial == trial
            interval = np.floor_divide(self.ended_s[own], width_s)
            for number in range(int(window_s / width_s + 1e-6)):
                points.append(quantile(self.latency_ms[own][interval == number], TAIL))
        return np.array([point for point in points if not math.isnan(point)], dtype=np.float64)

    def trial_means(self) -> Floats:
        """Return the mean latency of each trial that has an answer."""
        return np.array([self.latency_ms[self.trial == trial].mean() for trial in np.unique(self.trial)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Opinion:
    """What a rule says of a candidate; of Kayenta, its class where that says more, and the candidate's points."""

    verdict: str
    kind: str = ""
    points: int = _ENOUGH_POINTS

    def __str__(self) -> str:
        """Return the verdict, with the class, and with the number of points if they are few."""
        more = [self.kind] if self.kind else []
        more += [counted(self.points, "point")] if self.points < _ENOUGH_POINTS else []
        return f"{self.verdict} ({', '.join(more)})" if more else self.verdict


Rule = Callable[[Answers, Answers], Opinion]


def _fails(fails: bool) -> Opinion:
    return Opinion(verdict=FAIL if fails else PASS)


def threshold(candidate: Answers, control: Answers) -> Opinion:
    """Return FAIL if the candidate's p99 exceeds the control's by more than the margin, without regard to chance."""
    p99, control_p99 = quantile(candidate.latency_ms, TAIL), quantile(control.latency_ms, TAIL)
    if math.isnan(p99) or not control_p99 > 0:
        return Opinion(verdict=CANNOT_SAY)
    return _fails(p99 / control_p99 > 1 + MARGIN)


def mann_whitney(candidate: Answers, control: Answers) -> Opinion:
    """Return FAIL if a one-sided asymptotic Mann–Whitney test over requests calls the candidate slower."""
    if not candidate.latency_ms.size or not control.latency_ms.size:
        return Opinion(verdict=CANNOT_SAY)
    test = stats.mannwhitneyu(candidate.latency_ms, control.latency_ms, alternative="greater", method="asymptotic")
    return _fails(test.pvalue < ALPHA)


def overlap(candidate: Answers, control: Answers) -> Opinion:
    """Return FAIL if the 95 % bootstrap intervals of the p99 are disjoint and the candidate's is the higher one."""
    if not candidate.latency_ms.size or not control.latency_ms.size:
        return Opinion(verdict=CANNOT_SAY)
    low, _ = p99_interval(candidate.latency_ms, rng=np.random.default_rng([0, 1]))
    _, control_high = p99_interval(control.latency_ms, rng=np.random.default_rng([0, 0]))
    return _fails(low > control_high)


def welch(candidate: Answers, control: Answers) -> Opinion:
    """Return FAIL if Welch's one-sided t over the mean latencies of trials calls the candidate slower.

    It needs two trials of each arm, whose means are not all equal.
    """
    means, control_means = candidate.trial_means(), control.trial_means()
    if min(means.size, control_means.size) < 2 or not (np.ptp(means) or np.ptp(control_means)):
        return Opinion(verdict=CANNOT_SAY)
    return _fails(stats.ttest_ind(means, control_means, equal_var=False, alternative="greater").pvalue < ALPHA)


def kayenta(candidate: Answers, control: Answers, *, width_s: float | None = None) -> Opinion:
    """Return FAIL if Kayenta's judge classifies the metric as High, by which `direction: increase` fails.

    It compares the p99 of each interval of `width_s`, as a monitor would give it; None: the requests themselves.
    """
    values, others = (arm.latency_ms if width_s is None else arm.series(width_s) for arm in (candidate, control))
    if not values.size or not others.size:
        return Opinion(verdict=CANNOT_SAY)
    if np.array_equal(np.sort(values), np.sort(others)):
        return Opinion(verdict=PASS, points=values.size)
    if not np.ptp(values) and not np.ptp(others):
        return Opinion(verdict=CANNOT_SAY, points=values.size)
    low, shift, high = shift_interval(values, others, confidence=KAYENTA_CONFIDENCE)
    bound, is_slower = KAYENTA_TOLERANCE * abs(shift), values.mean() >= others.mean()
    if low > bound and is_slower:
        return Opinion(verdict=FAIL, points=values.size)
    is_low = high < -bound and values.mean() <= others.mean()
    return Opinion(verdict=PASS, kind="Low" if is_low else "", points=values.size)


RULES: Final[Mapping[str, Rule]] = {
    "p99 ≤ 1.10 ×": threshold,
    "Kayenta, requests": kayenta,
    "Kayenta, p99 a minute": partial(kayenta, width_s=MINUTE_S),
    "Mann–Whitney, requests": mann_whitney,
    "disjoint intervals": overlap,
    "Welch, trial means": welch,
}


def shift_interval(values: Floats, others: Floats, *, confidence: float) -> tuple[float, float, float]:
    """Return (low, estimate, high) of how far `values` lie above `others`.

    Hodges and Lehmann's estimate with Wilcoxon's interval, both by the normal law with a correction for continuity and
    ties, as R's wilcox.test solves for them.

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
        excess_rank = float(left.sum() + right.sum() - pairs) / 2
        # To sort all of them takes longest, and few shifts make a value meet another.
        ties = own_ties if (left == right).all() else _ties(np.concatenate((moved, others)))
        spread = math.sqrt(pairs / 12 * (count + 1 - ties / (count * (count - 1))))
        return (excess_rank - math.copysign(0.5, excess_rank) * (excess_rank != 0)) / spread - quantile_of_law

    def root(quantile_of_law: float) -> float:
        if excess(least, quantile_of_law) <= 0:
            return least
        if excess(most, quantile_of_law) >= 0:
            return most
        return float(optimize.brentq(excess, least, most, args=(quantile_of_law,), xtol=_SOLVER_MS))

    law = float(stats.norm.ppf((1 + confidence) / 2))
    return root(law), root(0.0), root(-law)


def _ties(values: Floats) -> float:
    """Return the sum of t³ - t over groups of t equal values."""
    _, sizes = np.unique(values, return_counts=True)
    return float((sizes.astype(np.float64) ** 3 - sizes).sum())


def p99_interval(values: Floats, *, rng: np.random.Generator) -> tuple[float, float]:
    """Return the percentile bootstrap of p99 at 95 %, assuming independent requests.

    Only two order statistics of a resample are in its p99. Their ranks are drawn from their own law, that of order
    statistics of uniform numbers, which gives what whole resamples give and costs nothing.
    """
    ordered, size = np.sort(values), values.size
    position = (size - 1) * TAIL
    rank = math.floor(position) + 1  # from 1
    one = rng.beta(rank, size - rank + 1, _DRAWS)
    other = one + (1 - one) * rng.beta(1, size - rank, _DRAWS) if rank < size else one
    lower, upper = (ordered[np.minimum((size * place).astype(np.int64), size - 1)] for place in (one, other))
    low, high = np.quantile(lower + (upper - lower) * (position - rank + 1), (ALPHA / 2, 1 - ALPHA / 2))
    return float(low), float(high)


def other_verdicts(cases: Mapping[str, tuple[Path, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return what every rule says of each arm of each case whose gates compare latencies.

    `cases` holds the folder and the verdict of each case, by name. The same records give the same rows.
    """
    rows: list[dict[str, Any]] = []
    for name, (case, verdict) in cases.items():
        gates = {(row["arm"], row["gate"]): row["verdict"] for row in verdict["gates"] if row["gate"] in _GATES}
        if not gates:  # a search for the highest load compares no latencies
            continue
        run = Run.of(read_run(case))
        for row in _rows_of_case(run, gates):
            verdicts = [gate["verdict"] for gate in verdict["gates"] if gate["arm"] == row["arm"]]
            rows.append({"case": name, **row, "overall": combined(verdicts)})
    return rows


def _rows_of_case(run: Run, gates: Mapping[tuple[str, str], str]) -> Iterator[dict[str, Any]]:
    for (arm, gate), verdict in gates.items():
        metric = _GATES[gate]
        candidate, control = (answers(run, name, metric) for name in (arm, run.control))
        yield {
            "arm": arm,
            "metric": metric,
            "sent": int((run.of_arm(arm) & run.requests.measured & ~run.cold).sum()),
            "seen": candidate.latency_ms.size,
            "gate": verdict,
            "rules": {name: str(rule(candidate, control)) for name, rule in RULES.items()},
        }


def answers(run: Run, arm: str, metric: str) -> Answers:
    """Return the completed requests of the arm that were due after the cold start of their trial."""
    cold_ns = int(run.limits.cold_s * SECOND)
    windows = {
        trial.number: (trial.start_ns + cold_ns, max(trial.start_ns + cold_ns, trial.end_ns + _SLACK_NS))
        for trial in run.trials
    }
    requests = run.requests
    latency_ms = requests.metric_ms(metric).astype(np.float64)
    rows = np.flatnonzero(run.answered(arm) & ~run.cold & ~np.isnan(latency_ms))
    begin_ns, end_ns = np.array([windows[int(number)] for number in requests.trial[rows]], np.int64).reshape(-1, 2).T
    start_ns = requests.start_ns[rows]
    within = (start_ns >= begin_ns) & (start_ns < end_ns)
    rows, begin_ns = rows[within], begin_ns[within]
    return Answers(
        latency_ms=latency_ms[rows],
        trial=requests.trial[rows],
        ended_s=(requests.end_ns[rows] - begin_ns) / SECOND,
        window_s={number: (end - begin) / SECOND for number, (begin, end) in windows.items()},
    )


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format the verdicts as a table."""
    head = ["case", "arm and metric", "requests seen", "tailgate", *RULES]
    cells = [
        [
            row["case"],
            f"{row['arm']}, {quantile_label(row['metric'], TAIL)}",
            f"{row['seen']} of {row['sent']}",
            f"{row['gate']}, in all {row['overall']}",
            *row["rules"].values(),
        ]
        for row in rows
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *cells))
