"""How the latency of each arm rises with its load: the objective's quantile in every step, with an interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from analysis.judging.load_steps import step_windows
from analysis.run.run import Run
from analysis.run.trials import SECOND
from analysis.settings.slo_targets import SloTarget
from analysis.statistics.quantiles import ordered_interval, quantile

_CONFIDENCE = 0.95
_ALIKE = 1.05  # rates that differ by less are one load


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLatency:
    """One arm in one step of one trial, at `rate` requests/s a replica.

    `low_ms` and `high_ms` are the 95 % interval of the quantile, taking the step's requests as independent: order
    statistics, None where so few requests set no limit. `compiles` are the events that held the device in the step,
    for `compile_s` together.
    """

    arm: str
    trial: int
    rate: float
    ms: float
    low_ms: float | None
    high_ms: float | None
    requests: int
    compiles: int
    compile_s: float


def drawn_target(run: Run) -> SloTarget | None:
    """The first objective that is a quantile of a request's latency; None where no step is held to one."""
    return next((item for item in run.targets if item.quantile is not None and item.metric != "itl"), None)


def step_latencies(run: Run, target: SloTarget) -> list[StepLatency]:
    """Every step of every arm, in order of trial and rate. Requests that failed count with their deadline."""
    assert target.quantile is not None
    requests = run.requests
    values = requests.metric_ms(target.metric)
    found = []
    for window in step_windows(run):
        trial = window.trial
        since, until = (trial.start_ns + int(at_s * SECOND) for at_s in (window.start_s, window.end_s))
        due = run.usable & (requests.trial == trial.number) & (requests.start_ns >= since) & (requests.start_ns < until)
        for arm in filter(trial.has, run.arms):
            own = np.sort(values[due & run.of_arm(arm) & ~np.isnan(values)])
            if not own.size:
                continue
            low, high = ordered_interval(own, target.quantile, confidence=_CONFIDENCE)
            events = [
                event
                for event in run.events
                if event.arm == arm and event.trial == trial.number and event.serving and event.stalls
                if event.start_ns < until and event.end_ns > since
            ]
            found.append(
                StepLatency(
                    arm=arm,
                    trial=trial.number,
                    rate=window.rate / run.replicas(arm),
                    ms=quantile(own, target.quantile),
                    low_ms=None if np.isnan(low) else low,
                    high_ms=None if np.isnan(high) else high,
                    requests=int(own.size),
                    compiles=len(events),
                    compile_s=sum(event.seconds for event in events),
                )
            )
    return sorted(found, key=lambda item: (item.trial, item.rate))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadLatency:
    """The latency of each arm that was tried at about `rate` requests/s a replica: the median over its starts, ms."""

    rate: float
    ms: dict[str, float]
    starts: dict[str, int]


def latency_at_one_load(steps: Sequence[StepLatency], arms: Sequence[str], most_rps: float) -> LoadLatency | None:
    """That of the highest load up to `most_rps` at which the first of `arms` and another one were tried; None where
    there is none."""
    control = arms[0]
    for rate in sorted({step.rate for step in steps if step.arm == control and step.rate <= most_rps}, reverse=True):
        near = [step for step in steps if rate / _ALIKE <= step.rate <= rate * _ALIKE]
        by_arm = {arm: own for arm in arms if (own := [step for step in near if step.arm == arm])}
        if len(by_arm) > 1:
            return LoadLatency(
                rate=rate,
                ms={arm: median(step.ms for step in own) for arm, own in by_arm.items()},
                starts={arm: len({step.trial for step in own}) for arm, own in by_arm.items()},
            )
    return None
