"""How much load each arm holds within its SLO: steps of rising rate, judged one by one, and the knee behind them.

A step is judged on the requests that were due in it after its settling time: it is held when the share of requests
that miss an objective is at most what the objective allows. The interval of the knee allows for small samples and for
what the steps of one start share (`tailgate.analysis.statistics.knees`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from tailgate.analysis.arrays import Bools
from tailgate.analysis.checks.complete import allowed_missing
from tailgate.analysis.checks.generator import dropped_faults, known_accounts, late_faults
from tailgate.analysis.judging.gates import FAIL, INCONCLUSIVE, PASS, Gate
from tailgate.analysis.records.plain_values import mapping, number, rows_of
from tailgate.analysis.run.run import Run
from tailgate.analysis.run.slo import meets_all, units
from tailgate.analysis.run.trials import SECOND, Trial
from tailgate.analysis.settings.slo_targets import SloTarget
from tailgate.analysis.statistics.knees import KneeProfile, knee_grid, knee_profile
from tailgate.analysis.statistics.quantiles import ordered_interval, quantile
from tailgate.analysis.wording import counted, digits

Held = Literal["held", "missed", "undecided"]

FEWEST = 20  # the fewest requests by which a step is judged
FEWEST_STARTS = 2  # of an arm by which its load is known: one start decides nothing

_LONGEST_S = 1e9  # thirty years
_CONFIDENCE = 0.95
_MEDIAN_MISS = math.log(2.0)  # expected misses at which none is seen half of the time


def requests_to_see(allowed_share: float) -> int:
    """Return how many requests a step needs for an objective that lets this share of them miss: 70 for a p99."""
    return math.ceil(_MEDIAN_MISS / allowed_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One arm under one `rate` (requests/s) of one trial. `good` requests met every limit.

    `thin`: without any miss, the share that misses an objective is as likely above what it allows as below: at fewer
    than 70 requests for a p99. `ms` is the quantile that the first objective on a request's latency names, with its
    95 % interval by order statistics; None without a limit. `compiles` held the device for `compile_s` together.
    """

    arm: str
    trial: int
    rate: float
    requests: int
    good: int
    held: Held
    reason: str
    thin: bool = False
    ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    compiles: int = 0
    compile_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What one arm holds, in requests/s: surely all up to `low_rps`, surely nothing above `high_rps`; None where open.

    `seen_rps` is the likeliest knee, or the highest rate that was held where no step missed; None where none was held.
    `starts` and `steps` are those that were judged. `thin`: most steps that count for `low_rps` had too few requests,
    so that nothing is surely held.
    """

    arm: str
    low_rps: float | None
    seen_rps: float | None
    high_rps: float | None
    starts: int
    steps: int
    thin: bool = False


def is_search(run: Run) -> bool:
    """Return whether the run's trials raised the load in steps to find what the arms hold."""
    return any(rows_of(info.get("steps")) for info in run.infos)


def steps_of(run: Run) -> list[Step]:
    steps = []
    for trial in run.trials:
        settle_s = number(trial.info.get("settle_s")) or 0.0
        for row in rows_of(trial.info.get("steps")):
            start_s, end_s, rate = (number(row.get(key)) for key in ("start_s", "end_s", "rate"))
            if start_s is None or end_s is None or rate is None or not 0 <= start_s < end_s - settle_s < _LONGEST_S:
                continue
            for arm in filter(trial.has, run.arms):
                step = _step(run, arm, trial, start_s + settle_s, end_s, rate)
                doubt = _doubt(run, arm, trial) if run.in_turn else ""  # else the checks of the whole run cover it
                steps.append(replace(step, held="undecided", reason=doubt) if doubt else step)
    return sorted(steps, key=lambda step: (step.trial, step.rate))


def latency_target(run: Run) -> SloTarget | None:
    """Return the first objective that is a quantile of a request's latency; None without one."""
    return next((item for item in run.targets if item.quantile is not None and item.metric != "itl"), None)


def _doubt(run: Run, arm: str, trial: Trial) -> str:
    """Say why the arm's steps in this trial prove nothing: its load fell behind or was lost. Else empty."""
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


def _step(run: Run, arm: str, trial: Trial, start_s: float, end_s: float, rate: float) -> Step:
    requests = run.requests
    since, until = (trial.start_ns + int(at_s * SECOND) for at_s in (start_s, end_s))
    mask = run.of_arm(arm) & run.usable & (requests.trial == trial.number)
    mask &= (requests.start_ns >= since) & (requests.start_ns < until)
    count, good = int(mask.sum()), int((meets_all(requests, run.targets) & mask).sum())
    thin, reasons = False, []
    for target in run.targets:
        missed = units(requests, mask, target).missed
        seen, bad = len(missed), int(missed.sum())
        thin |= 0 < target.allowed_share * seen < _MEDIAN_MISS
        if seen and bad / seen > target.allowed_share + 1e-12:
            what = "token gaps" if target.metric == "itl" else "requests"
            reasons.append(f"{bad} of {seen} {what} miss {target.key}")
    held: Held = "missed" if reasons else "held"
    if end_s > trial.seconds + 1e-6:
        held, reasons = "undecided", ["the trial ended before it"]
    elif count < FEWEST:
        held, reasons = "undecided", [f"{counted(count, 'request')}, {FEWEST} are needed"]
    events = [
        event
        for event in run.events
        if event.arm == arm and event.trial == trial.number and event.serving and event.stalls
        if event.start_ns < until and event.end_ns > since
    ]
    ms, low_ms, high_ms = _latency(run, mask)
    return Step(
        arm=arm,
        trial=trial.number,
        rate=rate,
        requests=count,
        good=good,
        held=held,
        reason="; ".join(reasons) or "every objective was met",
        thin=thin,
        ms=ms,
        low_ms=low_ms,
        high_ms=high_ms,
        compiles=len(events),
        compile_s=sum(event.seconds for event in events),
    )


def _latency(run: Run, mask: Bools) -> tuple[float | None, float | None, float | None]:
    """Return the quantile of the latency target and its interval, in ms. Failed requests count with their deadline."""
    target = latency_target(run)
    if target is None or target.quantile is None:
        return None, None, None
    values = run.requests.metric_ms(target.metric)
    own = np.sort(values[mask & ~np.isnan(values)])
    if not own.size:
        return None, None, None
    return quantile(own, target.quantile), *ordered_interval(own, target.quantile, confidence=_CONFIDENCE)


def profiles_of(steps: Sequence[Step]) -> dict[str, KneeProfile]:
    """Return the likelihood of the knee of each arm that has a judged step, over one grid."""
    judged = [step for step in steps if step.held != "undecided"]
    profiles = {}
    for arm in dict.fromkeys(step.arm for step in judged):
        own = [step for step in judged if step.arm == arm]
        profiles[arm] = knee_profile(
            [step.rate for step in own],
            [step.held == "held" for step in own],
            [step.trial for step in own],
            grid=knee_grid([step.rate for step in judged]),
        )
    return profiles


def holding_of(arm: str, steps: Sequence[Step], profile: KneeProfile | None = None, *, error: float = 0.05) -> Holding:
    """Return what the steps of `arm` show that it holds, with an interval of its knee at two-sided level `error`.

    `profile` is by default that of its own steps. One start decides nothing.
    """
    own = [step for step in steps if step.arm == arm and step.held != "undecided"]
    profile = profiles_of(own).get(arm) if profile is None else profile
    if profile is None:
        return Holding(arm=arm, low_rps=None, seen_rps=None, high_rps=None, starts=0, steps=0)
    low, high = profile.interval(error) if profile.starts >= FEWEST_STARTS else (None, None)
    counting = [step.thin for step in own if step.held == "held" and low is not None and step.rate >= low / 2]
    thin = 2 * sum(counting) > len(counting)
    return Holding(
        arm=arm,
        low_rps=None if thin else low,
        seen_rps=profile.likeliest if profile.missed else max(step.rate for step in own),
        high_rps=high,
        starts=profile.starts,
        steps=len(own),
        thin=thin,
    )


def to_search(arm: str, steps: Sequence[Step]) -> tuple[float | None, float | None]:
    """Return where the next start of `arm` should look: over the 95 % interval of its knee, or where that is open on
    from the highest rate below which nothing failed, or to the lowest above which nothing was held."""
    own = [step for step in steps if step.arm == arm]
    held = [step.rate for step in own if step.held == "held"]
    missed = [step.rate for step in own if step.held == "missed"]
    profile = profiles_of(own).get(arm)
    low, high = (None, None) if profile is None else profile.interval(0.05)
    if high is None:
        return max((rate for rate in held if rate < min(missed, default=math.inf)), default=None) or low, None
    if low is None:
        return None, min((rate for rate in missed if rate > max(held, default=0.0)), default=None) or high
    return low, high


def goodput_gate(own: Holding, control: Holding, *, margin: float) -> Gate:
    """Judge whether the arm surely holds at least 1 - `margin` of the load that the control holds: by the far ends of
    both intervals, so that both would have to be wrong."""
    limit = 1.0 - margin
    least, most = _ratio(own.low_rps, control.high_rps), _ratio(own.high_rps, control.low_rps)
    verdict, more = INCONCLUSIVE, "more trials narrow that."
    if min(own.starts, control.starts) < FEWEST_STARTS:
        more = f"{FEWEST_STARTS} trials or more with steps that can be judged are needed."
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
