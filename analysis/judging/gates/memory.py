"""Memory: the peak of a replica is at most so many times that of the control's (`gates.max_memory_ratio`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from tailgate.analysis.arrays import Floats
from tailgate.analysis.judging.gates import INCONCLUSIVE, Gate, status
from tailgate.analysis.run.machine_records import Rows, samples_of
from tailgate.analysis.run.run import Run
from tailgate.analysis.run.trials import Trial, devices_of
from tailgate.analysis.statistics.distributions import t_quantile
from tailgate.analysis.wording import bytes_text, counted, enough, fixed

# The standard deviation of the log ratio of two peaks over fresh starts, which counts as four starts.
_SPREAD = 0.01
_STARTS = 4


def memory_gates(run: Run, arm: str, memory: Mapping[str, Peaks]) -> list[Gate]:
    """Judge the memory ratio, if the experiment limits it."""
    limit = run.limits.max_memory_ratio
    if limit is None:
        return []
    gate = Gate(
        arm=arm,
        gate="memory ratio",
        kind="memory",
        value=None,
        limit=limit,
        unit="ratio",
        verdict=INCONCLUSIVE,
        reason=f"The memory of {arm} and {run.control} was not both seen in one trial: watch the machines "
        "([machines] sample_s = 1), with arms that tailgate starts.",
    )
    figure = shared_figure(memory[arm], memory[run.control])
    if figure is None:
        return [gate]
    own, base, alpha = memory[arm][figure], memory[run.control][figure], run.limits.alpha
    if run.separate:
        # No trial has both: the limits of each at half the risk.
        logs, others = np.log(list(own.values())), np.log(list(base.values()))
        (own_low, own_high), (base_low, base_high) = (ratio_limits(side, alpha / 2.0) for side in (logs, others))
        value, low, high = math.exp(float(logs.mean() - others.mean())), own_low / base_high, own_high / base_low
    else:
        logs = np.log([own[trial] / base[trial] for trial in sorted(own.keys() & base.keys())])
        if not logs.size:
            return [gate]
        value, (low, high) = math.exp(float(logs.mean())), ratio_limits(logs, alpha)
    most = f"{bytes_text(max(own.values()))} against {bytes_text(max(base.values()))} of {FIGURES[figure].name}"
    seen = [fixed(one, enough(limit, (value, low, high), fixed)) for one in (value, low, high)]
    reason = (
        f"The peak memory of a replica is {seen[0]} times that of a replica of {run.control} (between {seen[1]} and "
        f"{seen[2]}; {counted(len(own), 'trial')}; {most}), limit {limit:g}."
    )
    return [replace(gate, value=value, verdict=status(low, high, limit), reason=reason, interval=(low, high))]


def ratio_limits(logs: Floats, alpha: float) -> tuple[float, float]:
    """Return one-sided limits, each at level alpha, of the ratio with these logarithms, one at least.

    Student's t; it pools the trials' own variance with the assumed variance of starts.
    """
    own = float(((logs - logs.mean()) ** 2).sum())
    freedom = _STARTS + logs.size - 1
    spread = math.sqrt((own + _STARTS * _SPREAD**2) / freedom)
    reach = float(t_quantile(1.0 - alpha, freedom)) * spread / math.sqrt(logs.size)
    return math.exp(float(logs.mean()) - reach), math.exp(float(logs.mean()) + reach)


_UNWATCHED = 0.1  # of the traffic, at either end, that samples may miss

Peaks = Mapping[str, Mapping[int, float]]
"""Bytes by figure and trial. Figures that are not known are left out."""


class Figure(NamedTuple):
    """What is measured: rows of one kind, and the column whose highest value counts."""

    kind: str
    column: str
    name: str
    on_device: bool


# In the order in which they are compared.
FIGURES = {
    "device": Figure("process", "device_memory_bytes", "device memory of the process", on_device=True),
    "reserved": Figure("allocator", "reserved_bytes", "memory that the allocator keeps", on_device=True),
    # The engine's own first: of a process with descendants, a page that several share counts for each.
    "engine": Figure("allocator", "memory_bytes", "resident memory of the engine", on_device=False),
    "process": Figure("process", "memory_bytes", "resident memory of the process", on_device=False),
}


def memory_of(run: Run) -> dict[str, Peaks]:
    """Return each managed arm's peaks during the traffic of its trials; on a card, those of the card alone.

    The process that listens for an external arm may be a proxy, and the memory of its cards is not sampled.
    """
    samples = {
        kind: [(trial, rows) for trial in run.trials for rows in samples_of(run.records.machines, kind, trial)]
        for kind in {figure.kind for figure in FIGURES.values()}
    }
    on_card = {arm for trial in run.trials for arm, name in devices_of(trial).items() if name.startswith("cuda")}
    arms: dict[str, Peaks] = {}
    for arm in run.arms:
        figures = {} if run.account(arm).external else FIGURES
        known = {name: _peaks(arm, figure, samples[figure.kind]) for name, figure in figures.items()}
        of_card = arm in on_card or any(known[name] and FIGURES[name].on_device for name in known)
        arms[arm] = {name: peaks for name, peaks in known.items() if peaks and (FIGURES[name].on_device or not of_card)}
    return arms


def shared_figure(own: Peaks, other: Peaks) -> str | None:
    """Return the first figure that is known of both; None without one."""
    return next((name for name in FIGURES if name in own and name in other), None)


def _peaks(arm: str, figure: Figure, samples: Sequence[tuple[Trial, Rows]]) -> dict[int, float]:
    """Return the highest peak of a replica by trial, without samples that begin late, end early or show none."""
    peaks: dict[int, float] = {}
    for trial, rows in samples:
        if rows.arm == arm:
            at_ns, values = rows.known(figure.column, trial.start_ns, trial.end_ns)
            slack = _UNWATCHED * (trial.end_ns - trial.start_ns)
            if values.any() and at_ns[0] <= trial.start_ns + slack and at_ns[-1] >= trial.end_ns - slack:
                peaks[trial.number] = max(float(values.max()), peaks.get(trial.number, 0.0))
    return peaks
