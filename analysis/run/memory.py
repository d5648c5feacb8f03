"""What each arm held of memory while it served: the peak of each trial.

Nothing is decided here. Each figure is of one replica, the one that held most: replicas of an arm are alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from analysis.run.machine_samples import Rows, Samples
from analysis.run.run import Run
from analysis.run.trials import Trial, devices_of

_UNWATCHED = 0.1  # of the traffic, at either end, that samples may miss

Peaks = Mapping[str, Mapping[int, float]]
"""Bytes by figure and trial. Figures that are not known are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What is measured: rows of one kind, and the column whose highest value counts."""

    kind: str
    column: str
    name: str
    on_device: bool = False


# In the order in which they are compared.
FIGURES = {
    "device": Figure(kind="process", column="device_memory_bytes", name="device memory of the process", on_device=True),
    "reserved": Figure(
        kind="allocator", column="reserved_bytes", name="memory that the allocator keeps", on_device=True
    ),
    # The engine's own first: of a process with descendants, a page that several share counts for each.
    "engine": Figure(kind="allocator", column="memory_bytes", name="resident memory of the engine"),
    "process": Figure(kind="process", column="memory_bytes", name="resident memory of the process"),
}


def memory_of(run: Run) -> dict[str, Peaks]:
    """The peaks of every managed arm during the traffic of its trials; of an arm on a card those of the card alone.

    The process that listens for an external arm may be a proxy, and the memory of its cards is not sampled.
    """
    watched = Samples(run.records.machines)
    kinds = {figure.kind for figure in FIGURES.values()}
    samples = {kind: [(trial, rows) for trial in run.trials for rows in watched.of(kind, trial)] for kind in kinds}
    on_card = {arm for trial in run.trials for arm, name in devices_of(trial).items() if name.startswith("cuda")}
    arms: dict[str, Peaks] = {}
    for arm in run.arms:
        figures = {} if run.account(arm).external else FIGURES
        known = {name: _peaks(arm, figure, samples[figure.kind]) for name, figure in figures.items()}
        of_card = arm in on_card or any(known[name] and FIGURES[name].on_device for name in known)
        arms[arm] = {name: peaks for name, peaks in known.items() if peaks and (FIGURES[name].on_device or not of_card)}
    return arms


def shared_figure(own: Peaks, other: Peaks) -> str | None:
    """The first figure that is known of both; None where there is none."""
    return next((name for name in FIGURES if name in own and name in other), None)


def _peaks(arm: str, figure: Figure, samples: Sequence[tuple[Trial, Rows]]) -> dict[int, float]:
    peaks: dict[int, float] = {}
    for trial, rows in samples:
        peak = peak_of(rows, figure, trial) if rows.arm == arm else None
        if peak is not None:
            peaks[trial.number] = max(peak, peaks.get(trial.number, 0.0))
    return peaks


def peak_of(rows: Rows, figure: Figure, trial: Trial) -> float | None:
    """The most that was held during the traffic; None where the samples begin late or end early, or show none."""
    start, end = trial.start_ns, trial.end_ns
    at_ns, values = rows.known(figure.column, start, end)
    slack = _UNWATCHED * (end - start)
    if not values.size or at_ns[0] > start + slack or at_ns[-1] < end - slack:
        return None
    return float(values.max()) or None
