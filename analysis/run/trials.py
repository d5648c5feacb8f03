"""The trials of a run: when they were, the blocks that they are cut into, and the devices and machines that they had.

Devices have the names of the samples: `cuda:0`, `cpu`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tailgate.analysis.arrays import Ints
from tailgate.analysis.records.joining import RecordedRun
from tailgate.analysis.records.plain_values import mapping, number, rows_of, text_of
from tailgate.analysis.records.plain_values import seconds as seconds_of
from tailgate.analysis.records.requests import Requests

SECOND = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One trial's place in time."""

    number: int
    info: Mapping[str, Any]  # trial.json; empty where there is none
    start_ns: int
    first_ns: int  # the first request
    seconds: float  # that it really lasted
    blocks: int
    first_block: int  # its blocks are numbered from here, unique over trials

    @property
    def end_ns(self) -> int:
        """When its traffic ended."""
        return self.start_ns + int(self.seconds * SECOND)

    def has(self, arm: str) -> bool:
        """Return whether the arm was part of the trial; True if the trial names no arm."""
        return takes_part(self.info, arm)


def takes_part(info: Mapping[str, Any], arm: str) -> bool:
    """Return whether the arm was part of the trial of this trial.json; True if it names no arm."""
    rows = rows_of(info.get("arms"))
    return not rows or any(row.get("name") == arm for row in rows)


def planned_ends(infos: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """Return each trial's planned end in ns since the epoch; trials without one are left out."""
    ends = {}
    for info in infos:
        start, duration = number(info.get("start_ns")), seconds_of(info.get("duration_s"))
        if start is not None and duration is not None:
            ends[int(info["trial"])] = int(info["start_ns"]) + int(duration * SECOND)
    return ends


def trials_of(
    requests: Requests, infos: Sequence[Mapping[str, Any]], block_s: float, *, whole: bool = False
) -> tuple[Trial, ...]:
    """Return the trials in order, each with its place in time, from their trial.json and their requests.

    `whole`: the rest at the end is a block of its own, so that no block changes by what comes after it.
    """
    by_number, spans = {int(info["trial"]): info for info in infos}, requests.spans()
    trials: list[Trial] = []
    first_block = 0
    for trial in sorted({*by_number, *np.unique(requests.trial).tolist()}):
        info, known = by_number.get(trial, {}), trial in spans
        first, last, _ = spans.get(trial, (0, 0, 0))
        reported = number(info.get("start_ns"))
        start = int(info["start_ns"]) if reported is not None and 0 < reported <= first else first
        lengths = [] if (duration := seconds_of(info.get("duration_s"))) is None else [duration]
        if not lengths or not info.get("complete"):
            lengths.append((last - start) / 1e9 if known else 0.0)
        seconds = max(min(lengths), 1e-9)
        # A last block shorter than half a block joins the one before it.
        blocks = max(1, math.ceil(seconds / block_s - 1e-6) if whole else math.floor(seconds / block_s + 0.5))
        trials.append(
            Trial(
                number=trial,
                info=info,
                start_ns=start,
                first_ns=first,
                seconds=seconds,
                blocks=blocks,
                first_block=first_block,
            )
        )
        first_block += blocks
    return tuple(trials)


_FIRST_CARD = "cuda:0"


def described(trial: Trial, device: str) -> Mapping[str, Any]:
    """Return what the machine monitor reports of a device; empty if nothing."""
    return mapping(mapping(mapping(trial.info.get("monitor")).get("devices")).get(device))


def identity_of(trial: Trial, device: str) -> str:
    """Return what identifies a device in all trials, whatever its name there."""
    return text_of(described(trial, device), "uuid", f"{text_of(trial.info, 'machine')} {device}")


def devices_of(trial: Trial) -> dict[str, str]:
    """Return the device of each managed arm: `auto` and `cuda` are the first card, or the processor.

    A replica that reports that it ran on the processor takes precedence.
    """
    cards = [str(name) for name in mapping(mapping(trial.info.get("monitor")).get("devices"))]
    first = _FIRST_CARD if _FIRST_CARD in cards else next(iter(cards), None)
    devices = {}
    for arm, given in mapping(trial.info.get("devices")).items():
        name = str(given)
        product = mapping(mapping(trial.info.get("startup")).get(arm)).get("device")
        if product == "cpu":
            name = "cpu"
        elif name in ("auto", "cuda"):
            name = first or ("cpu" if name == "auto" and not product else _FIRST_CARD)
        devices[str(arm)] = name
    return devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """The machines that the trials of a run ran on, in order of their first trial. A run by itself has one."""

    names: tuple[str, ...] = ("",)
    of_trial: Mapping[int, int] = field(default_factory=dict)  # place in `names`; 0 for trials that are not there

    @classmethod
    def of(cls, runs: Sequence[RecordedRun]) -> Machines:
        """Return the machines of joined runs. A run that does not record its machine has one of its own."""
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
        """Return the machine of each of these trials, as its place in `names`."""
        place = np.zeros(max(self.of_trial, default=0) + 2, dtype=np.int64)
        place[list(self.of_trial)] = list(self.of_trial.values())
        return np.asarray(place[np.clip(trial.astype(np.int64), 0, len(place) - 1)])  # the last is of no trial
