"""How much load each arm holds within its SLO: steps of rising rate, judged one by one, and the bracket they leave.

A step is judged on the requests that were due in it after its settling time: it is held when the share of requests
that miss an objective is at most what the objective allows, as it was seen. The bracket over the steps of all trials
goes from the highest rate below which nothing failed to the lowest above which nothing was held: what was seen, so that
steps that contradict each other make it wider.

One step is a small sample, and the same rate may be held in one trial and not in the next. The interval allows for
that, and for what a start brings to all its steps: it holds every knee that the steps do not contradict at 95 %
(`analysis.statistics.knees`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from analysis.arrays import Floats
from analysis.checks.complete import allowed_missing
from analysis.checks.generator import known_accounts, measured_of
from analysis.judging.gates import FAIL, INCONCLUSIVE, PASS, Gate
from analysis.records.plain_values import mapping, number, rows_of
from analysis.run.run import Run
from analysis.run.slo import meets_all, units
from analysis.run.trials import SECOND, Trial
from analysis.statistics.knees import KneeProfile, knee_grid, knee_profile
from analysis.statistics.quantiles import quantile
from analysis.wording import counted, digits

Held = Literal["held", "missed", "undecided"]

FEWEST = 20  # the fewest requests by which a step is judged
FEWEST_STARTS = 2  # of an arm by which its load is known: one start decides nothing

_LONGEST_S = 1e9  # thirty years
_MEDIAN_MISS = math.log(2.0)  # expected misses at which none is seen half of the time


def requests_to_see(allowed_share: float) -> int:
    """How many requests a step needs so that it speaks for an objective that lets this share of them miss: 70 for a
    p99."""
    return math.ceil(_MEDIAN_MISS / allowed_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One arm under one rate of one trial. Rates are requests/s; `goodput_rps` counts those that met every limit.

    `thin`: without any miss, the share that misses an objective is as likely above what it allows as below: at fewer
    than 70 requests for a p99.
    """

    arm: str
    trial: int
    rate: float
    requests: int
    good: int
    failed: int
    offered_rps: float
    goodput_rps: float
    held: Held
    reason: str
    thin: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Bracket:
    """Where an arm's knee lies: above `passed_rps`, at or below `failed_rps`; None where no step shows it.

    `low_rps` and `high_rps` are the interval of the knee; None where it is open. `goodput_rps` is the mean goodput of
    the steps at `passed_rps`; `highest_rps` is the most that any step gave.
    """

    arm: str
    passed_rps: float | None
    failed_rps: float | None
    low_rps: float | None
    high_rps: float | None
    goodput_rps: float | None
    highest_rps: float | None
    trials: int
    steps: int

    @property
    def to_search(self) -> tuple[float | None, float | None]:
        """Where the next trial should look: over the interval, or on from the last step where that is open."""
        if self.high_rps is None:
            return self.passed_rps or self.low_rps, None
        if self.low_rps is None:
            return None, self.failed_rps or self.high_rps
        return self.low_rps, self.high_rps


def is_search(run: Run) -> bool:
    """Whether the run's trials raised the load in steps to find what the arms hold."""
    return any(rows_of(info.get("steps")) for info in run.infos)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWindow:
    """Where a step lies in its trial, without its settling time: seconds from the trial's start."""

    trial: Trial
    start_s: float
    end_s: float
    rate: float

    @property
    def whole(self) -> bool:
        """Whether the trial lasted to the end of the step."""
        return self.end_s <= self.trial.seconds + 1e-6


def step_windows(run: Run) -> Iterator[StepWindow]:
    """Every step of every trial that makes sense."""
    for trial in run.trials:
        settle_s = number(trial.info.get("settle_s")) or 0.0
        for row in rows_of(trial.info.get("steps")):
            start_s, end_s, rate = (number(row.get(key)) for key in ("start_s", "end_s", "rate"))
            if start_s is None or end_s is None or rate is None or not 0 <= start_s < end_s - settle_s < _LONGEST_S:
                continue
            yield StepWindow(trial=trial, start_s=start_s + settle_s, end_s=end_s, rate=rate)


def steps_of(run: Run) -> list[Step]:
    """Every step of every arm, in order of trial and rate."""
    steps = []
    for window in step_windows(run):
        for arm in filter(window.trial.has, run.arms):
            step = _step(run, arm, window)
            doubt = _doubt(run, arm, window.trial) if run.in_turn else ""
            steps.append(replace(step, held="undecided", reason=doubt) if doubt else step)
    return sorted(steps, key=lambda step: (step.trial, step.rate))


def _doubt(run: Run, arm: str, trial: Trial) -> str:
    """Why nothing can be said of the arm's steps in this trial: its load fell behind, or was lost. Else empty.

    Where all arms share every trial, the checks of the whole run say it.
    """
    limit_ms = run.limits.max_generator_lag_ms
    requests = run.requests
    own = run.of_arm(arm) & (requests.trial == trial.number)
    accounts = [account for account in run.records.generators if account.get("trial", 1) == trial.number]
    if trial.info.get("complete"):
        planned = number(mapping(trial.info.get("planned")).get(arm)) or 0.0
        if planned - int(own.sum()) > allowed_missing(int(planned)):
            return f"{int(own.sum())} of {planned:.0f} requests of its trial were recorded"
        if any(account.get("lost") or not account.get("complete", True) for account in accounts):
            return "a load process of its trial was lost"
    sent = quantile(requests.lag_ms(own & ~requests.broken), 0.99)
    if sent > limit_ms:
        return f"1 % of its trial's requests were sent {digits(sent)} ms late or more, limit {limit_ms:g} ms"
    return next((item.text for item in measured_of(known_accounts(accounts), limit_ms) if not item.ok), "")


def _step(run: Run, arm: str, window: StepWindow) -> Step:
    requests, trial = run.requests, window.trial
    since = requests.start_ns - trial.start_ns
    mask = run.of_arm(arm) & run.usable & (requests.trial == trial.number)
    mask &= (since >= int(window.start_s * SECOND)) & (since < int(window.end_s * SECOND))
    count = int(mask.sum())
    seconds = window.end_s - window.start_s
    good = int((meets_all(requests, run.goodput_targets) & mask).sum())
    held: Held = "held"
    thin = False
    reasons = []
    for target in run.targets:
        missed = units(requests, mask, target).missed
        seen, bad = len(missed), int(missed.sum())
        thin |= 0 < target.allowed_share * seen < _MEDIAN_MISS
        if seen and bad / seen > target.allowed_share + 1e-12:
            what = "token gaps" if target.metric == "itl" else "requests"
            reasons.append(f"{bad} of {seen} {what} miss {target.key}")
    share = run.attainment
    if share is not None and count and good / count < share - 1e-12:
        reasons.append(f"{good} of {counted(count, 'request')} meet every limit, {100 * share:g} % must")
    if reasons:
        held = "missed"
    if count < FEWEST or not window.whole:
        held = "undecided"
        reasons = [f"{counted(count, 'request')}, {FEWEST} are needed" if window.whole else "the trial ended before it"]
    return Step(
        arm=arm,
        trial=trial.number,
        rate=window.rate,
        requests=count,
        good=good,
        failed=int((requests.failed & mask).sum()),
        offered_rps=count / seconds,
        goodput_rps=good / seconds,
        held=held,
        reason="; ".join(reasons) or "every objective was met",
        thin=thin or (share is not None and 0 < (1.0 - share) * count < _MEDIAN_MISS),
    )


def bracket(arm: str, steps: Sequence[Step]) -> Bracket:
    """The bracket that the steps of `arm` leave."""
    own = [step for step in steps if step.arm == arm]
    held = sorted(step.rate for step in own if step.held == "held")
    missed = sorted(step.rate for step in own if step.held == "missed")
    passed = max((rate for rate in held if not missed or rate < missed[0]), default=None)
    failed = min((rate for rate in missed if not held or rate > held[-1]), default=None)
    at_passed = [step.goodput_rps for step in own if step.rate == passed and step.held == "held"]
    profile = profile_of(own)
    low, high = (None, None) if profile is None else profile.interval(0.05)
    return Bracket(
        arm=arm,
        passed_rps=passed,
        failed_rps=failed,
        low_rps=low,
        high_rps=high,
        goodput_rps=float(np.mean(at_passed)) if at_passed else None,
        highest_rps=max((step.goodput_rps for step in own if step.held != "undecided"), default=None),
        trials=len({step.trial for step in own if step.held != "undecided"}),
        steps=sum(step.held != "undecided" for step in own),
    )


def profile_of(steps: Sequence[Step], grid: Floats | None = None) -> KneeProfile | None:
    """The likelihood of the knee behind the steps of one arm, over `grid` or over one of its own; None where no step
    was long enough to judge."""
    judged = [step for step in steps if step.held != "undecided"]
    if not judged:
        return None
    rates = [step.rate for step in judged]
    held = [step.held == "held" for step in judged]
    starts = [step.trial for step in judged]
    return knee_profile(rates, held, starts, grid=knee_grid(rates) if grid is None else grid)


def brackets(run: Run) -> list[Bracket]:
    """The bracket of every arm, the control first."""
    steps = steps_of(run)
    return [bracket(arm, steps) for arm in run.arms]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRatio:
    """What an arm holds over what the control holds. `low` and `high` are the far ends of the two intervals, so that
    both would have to be wrong for the ratio to lie outside; None where open. `goodput` is of the rates held."""

    arm: str
    control: str
    ratio: float | None
    low: float | None
    high: float | None
    goodput: float | None
    trials: int


def load_ratio(own: Bracket, control: Bracket) -> LoadRatio:
    """The ratio of the loads held, with its interval."""
    return LoadRatio(
        arm=own.arm,
        control=control.arm,
        ratio=_ratio(own.passed_rps, control.passed_rps),
        low=_ratio(own.low_rps, control.high_rps),
        high=_ratio(own.high_rps, control.low_rps),
        goodput=_ratio(own.goodput_rps, control.goodput_rps),
        trials=min(own.trials, control.trials),
    )


def goodput_gate(own: Bracket, control: Bracket, *, margin: float) -> Gate:
    """Whether the arm surely holds at least 1 - `margin` of the load that the control holds.

    PASS when even the lower end of the ratio is enough, FAIL when the upper end is not. One trial decides nothing: in
    it a step that fails makes those after it fail too.
    """
    limit = 1.0 - margin
    ratio = load_ratio(own, control)
    loads = f"{own.arm} holds {_span(own)} and {control.arm} {_span(control)}"
    verdict, more = INCONCLUSIVE, "more trials narrow that."
    if own.low_rps is None and own.high_rps is None:
        more = "none of its steps could be judged."
    elif control.low_rps is None:
        more = f"start the search lower, so that {control.arm} holds a step."
    elif ratio.trials < FEWEST_STARTS:
        more = "one trial cannot tell how sure that is: run two or more."
    elif ratio.low is not None and ratio.low >= limit:
        verdict, more = PASS, f"at least {ratio.low:.2f} times as much, {limit:g} is enough."
    elif ratio.high is not None and ratio.high < limit:
        verdict, more = FAIL, f"at most {ratio.high:.2f} times as much, {limit:g} is needed."
    elif own.high_rps is None or control.high_rps is None:
        more = "search higher, so that more steps fail."
    return Gate(
        arm=own.arm,
        gate="goodput",
        kind="goodput",
        value=ratio.ratio,
        limit=limit,
        unit="ratio",
        verdict=verdict,
        reason=f"{loads}: {more}",
        interval=(ratio.low, ratio.high),
    )


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over is not None and under else None


def _span(held: Bracket) -> str:
    low, high = held.low_rps, held.high_rps
    if low is not None and high is not None:
        return f"{digits(low)} to {digits(high)} requests/s"
    if low is not None:
        return f"{digits(low)} requests/s or more"
    return "an unknown load" if high is None else f"less than {digits(high)} requests/s"


def summary_rows(run: Run) -> dict[str, Any] | None:
    """The search as the summary holds it; None where the run made none."""
    if not is_search(run):
        return None
    steps = steps_of(run)
    control, *others = [bracket(arm, steps) for arm in run.arms]
    return {
        "objectives": [target.key for target in run.targets],
        "goodput_limits": {
            target.metric: target.limit for target in run.goodput_targets if target.quantile is not None
        },
        "attainment_pct": None if run.attainment is None else 100.0 * run.attainment,
        "brackets": [asdict(item) for item in (control, *others)],
        "ratios": [asdict(load_ratio(item, control)) for item in others],
        "steps": [asdict(step) for step in steps],
    }
