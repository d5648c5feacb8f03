"""How much load each arm holds within its SLO: steps of rising rate, judged one by one, and the knee behind them.

A step is judged on the requests that were due in it after its settling time: it is held when the share of requests
that miss an objective is at most what the objective allows. One step is a small sample, and what a start brings is
shared by all its steps; the interval of the knee allows for both (`analysis.statistics.knees`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from analysis.arrays import Floats
from analysis.checks.complete import allowed_missing
from analysis.checks.generator import dropped_faults, known_accounts, late_faults
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
    """Return how many requests a step needs for an objective that lets this share of them miss: 70 for a p99."""
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
class Holding:
    """What one arm holds, in requests/s: surely all up to `low_rps`, surely nothing above `high_rps`; None where open.

    `seen_rps` is the likeliest knee, or the highest rate that was held where no step missed; None where none was held.
    `lowest_rps` is the lowest rate that was tried. `starts` and `steps` are those that were judged. `thin`: most steps
    that count for `low_rps` had too few requests, so that nothing is surely held.
    """

    arm: str
    low_rps: float | None
    seen_rps: float | None
    high_rps: float | None
    starts: int
    steps: int
    lowest_rps: float | None = None
    thin: bool = False

    def at(self, rps: float) -> Literal["holds", "open", "misses"]:
        """Whether the arm surely holds the load, or surely does not."""
        if self.low_rps is not None and rps <= self.low_rps:
            return "holds"
        return "misses" if self.high_rps is not None and rps > self.high_rps else "open"


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
    known = known_accounts(accounts)
    return next(iter([*dropped_faults(known), *late_faults(known, limit_ms)]), "")


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


def profile_of(steps: Sequence[Step], grid: Floats | None = None) -> KneeProfile | None:
    """Return the likelihood of the knee behind the judged steps of one arm, over `grid` or over one of its own; None
    without such steps."""
    judged = [step for step in steps if step.held != "undecided"]
    if not judged:
        return None
    rates = [step.rate for step in judged]
    held = [step.held == "held" for step in judged]
    return knee_profile(rates, held, [step.trial for step in judged], grid=knee_grid(rates) if grid is None else grid)


def holding_of(arm: str, steps: Sequence[Step], *, error: float = 0.05, grid: Floats | None = None) -> Holding:
    """Return what the steps of `arm` show that it holds, with an interval at two-sided level `error`.

    One start decides nothing.
    """
    own = [step for step in steps if step.arm == arm and step.held != "undecided"]
    profile, starts = profile_of(own, grid), len({step.trial for step in own})
    if profile is None:
        return Holding(arm=arm, low_rps=None, seen_rps=None, high_rps=None, starts=0, steps=0)
    low, high = profile.interval(error) if starts >= FEWEST_STARTS else (None, None)
    counting = [step.thin for step in own if step.held == "held" and low is not None and step.rate >= low / 2]
    thin = 2 * sum(counting) > len(counting)
    return Holding(
        arm=arm,
        low_rps=None if thin else low,
        seen_rps=profile.likeliest if profile.missed else max(step.rate for step in own),
        high_rps=high,
        starts=starts,
        steps=len(own),
        lowest_rps=min(step.rate for step in own),
        thin=thin,
    )


def to_search(arm: str, steps: Sequence[Step]) -> tuple[float | None, float | None]:
    """Return where the next start of `arm` should look: over the 95 % interval of its knee, or where that is open on
    from the highest rate below which nothing failed, or to the lowest above which nothing was held."""
    own = [step for step in steps if step.arm == arm]
    held = [step.rate for step in own if step.held == "held"]
    missed = [step.rate for step in own if step.held == "missed"]
    profile = profile_of(own)
    low, high = (None, None) if profile is None else profile.interval(0.05)
    if high is None:
        return max((rate for rate in held if rate < min(missed, default=math.inf)), default=None) or low, None
    if low is None:
        return None, min((rate for rate in missed if rate > max(held, default=0.0)), default=None) or high
    return low, high


def goodput_gate(own: Holding, control: Holding, *, margin: float) -> Gate:
    """Judge whether the arm surely holds at least 1 - `margin` of the load that the control holds.

    PASS when even the lower end of the ratio is enough, FAIL when the upper end is not. The ends are the far ends of
    both intervals, so that both would have to be wrong.
    """
    limit = 1.0 - margin
    least, most = _ratio(own.low_rps, control.high_rps), _ratio(own.high_rps, control.low_rps)
    verdict, more = INCONCLUSIVE, "more trials narrow that."
    if not own.steps or not control.steps:
        more = "none of its steps could be judged."
    elif min(own.starts, control.starts) < FEWEST_STARTS:
        more = "one trial cannot tell how sure that is: run two or more."
    elif own.thin or control.thin:
        more = "the steps had too few requests for the objective: make them longer."
    elif control.low_rps is None:
        more = f"start the search lower, so that {control.arm} holds a step."
    elif least is not None and least >= limit:
        verdict, more = PASS, f"at least {least:.2f} times as much, {limit:g} is enough."
    elif most is not None and most < limit:
        verdict, more = FAIL, f"at most {most:.2f} times as much, {limit:g} is needed."
    elif own.high_rps is None or control.high_rps is None:
        more = "search higher, so that more steps fail."
    return Gate(
        arm=own.arm,
        gate="goodput",
        kind="goodput",
        value=_ratio(own.seen_rps, control.seen_rps),
        limit=limit,
        unit="ratio",
        verdict=verdict,
        reason=f"{own.arm} holds {_span(own)} and {control.arm} {_span(control)}: {more}",
    )


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over is not None and under else None


def _span(held: Holding) -> str:
    low, high = held.low_rps, held.high_rps
    if low is not None and high is not None:
        return f"{digits(low)} to {digits(high)} requests/s"
    if low is not None:
        return f"{digits(low)} requests/s or more"
    return "an unknown load" if high is None else f"less than {digits(high)} requests/s"
