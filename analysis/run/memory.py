"""What each arm held of memory while it served: the peak of each trial.

Nothing is decided here. Each figure is of one replica, the one that held most: replicas of an arm are alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from analysis.records.schemas import RUN_HOST
from analysis.run.machine_samples import Rows, Samples
from analysis.run.placement import alone_on, devices_of
from analysis.run.run import Run
from analysis.run.trials import Trial

_UNWATCHED = 0.1  # of the traffic, at either end, that samples may miss

DEVICE_FIGURES = ("device", "card", "reserved")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What is measured: rows of one kind, and the column whose highest value counts."""

    kind: str
    column: str
    name: str


# In the order in which they are compared: all that an arm takes of its device first, and what is on the host last.
FIGURES = {
    "device": Figure(kind="process", column="device_memory_bytes", name="device memory of the process"),
    "card": Figure(kind="device", column="memory_bytes", name="memory in use on its card"),
    "reserved": Figure(kind="allocator", column="reserved_bytes", name="memory that the allocator keeps"),
    "allocated": Figure(kind="allocator", column="peak_bytes", name="memory in tensors"),
    # The engine's own first: of a process with descendants, a page that several share counts for each.
    "engine": Figure(kind="allocator", column="memory_bytes", name="resident memory of the engine"),
    "process": Figure(kind="process", column="memory_bytes", name="resident memory of the process"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMemory:
    """What is known of the memory of all arms: peaks by arm, figure and trial. Figures that are not known are left
    out."""

    arms: Mapping[str, Mapping[str, Mapping[int, float]]]
    on_card: frozenset[str]  # arms on a GPU

    def shared_figure(self, arm: str, other: str) -> str | None:
        """The first figure that is known of both arms and says what they take; None where there is none.

        Of an arm on a card the memory of the host is no answer.
        """
        figures = DEVICE_FIGURES if {arm, other} & self.on_card else tuple(FIGURES)
        return next((name for name in figures if name in self.arms[arm] and name in self.arms[other]), None)


def memory_of(run: Run) -> RunMemory:
    """The memory of every arm that tailgate started, during the traffic of its trials.

    The process that listens for an external arm may be a proxy, and the memory of its cards is not sampled.
    """
    watched = Samples(run.records.bed)
    samples = {
        kind: [rows for trial in run.trials for rows in watched.of(kind, trial)]
        for kind in ("process", "device", "allocator")
    }
    arms = {}
    for arm in run.arms:
        figures = {} if run.account(arm).external else FIGURES
        peaks = {name: _peaks(run, arm, figure, samples[figure.kind]) for name, figure in figures.items()}
        arms[arm] = {name: own for name, own in peaks.items() if own}
    on_card = {arm for trial in run.trials for arm, name in devices_of(trial).items() if name.startswith("cuda")}
    on_card |= {arm for arm, figures in arms.items() if any(name in figures for name in DEVICE_FIGURES)}
    return RunMemory(arms=arms, on_card=frozenset(on_card))


def _peaks(run: Run, arm: str, figure: Figure, samples: Sequence[Rows]) -> dict[int, float]:
    peaks = {}
    for trial in run.trials:
        card = alone_on(trial, arm) if figure.kind == "device" else None
        own = [
            item
            for item in samples
            if item.trial == trial.number
            and (item.arm == arm if figure.kind != "device" else item.host == RUN_HOST and item.name == card)
        ]
        known = [peak for item in own if (peak := peak_of(item, figure, trial)) is not None]
        if known:
            peaks[trial.number] = max(known)
    return peaks


def peak_of(item: Rows, figure: Figure, trial: Trial) -> float | None:
    """The most that was held during the traffic; None where the samples begin late or end early.

    A card that other processes use too says nothing of the arm.
    """
    start, end = trial.start_ns, trial.end_ns
    at_ns, values = item.known(figure.column, start, end)
    slack = _UNWATCHED * (end - start)
    if not values.size or at_ns[0] > start + slack or at_ns[-1] < end - slack:
        return None
    if figure.kind == "device" and item.known("foreign_processes", start, end)[1].any():
        return None
    return float(values.max())
