"""The machines of a run: which trial ran on which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from analysis.arrays import Ints
from analysis.records.joining import RecordedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """The machines that the trials of a run ran on, in order of their first trial. A run by itself has one."""

    names: tuple[str, ...] = ("",)
    of_trial: Mapping[int, int] = field(default_factory=dict)  # place in `names`; 0 for trials that are not there

    @classmethod
    def of(cls, runs: Sequence[RecordedRun]) -> Machines:
        """Those of joined runs. A run that does not say where it ran has a machine of its own."""
        joined = [run for run in runs if run.place]
        trials = sorted(
            (number, run.machine or f"the machine of {run.name}")
            for run in joined
            for number in (run.trials[own] for own in run.numbers)
        )
        names = tuple(dict.fromkeys(name for _, name in trials))
        return cls(names=names or ("",), of_trial={number: names.index(name) for number, name in trials})

    def __len__(self) -> int:
        return len(self.names)

    def codes(self, trial: Ints) -> Ints:
        """The machine of each of these trials, as its place in `names`."""
        place = np.zeros(max(self.of_trial, default=0) + 2, dtype=np.int64)
        place[list(self.of_trial)] = list(self.of_trial.values())
        return np.asarray(place[np.clip(trial, 0, len(place) - 1)])  # the last is of no trial
