"""What each arm took of energy while it served, by answered token and by request.

Only of arms that had their cards to themselves: what a card takes for two arms belongs to neither. A card that waits
takes power too, which is part of what serving costs; what it took above that stands beside it where it is known.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from analysis.records.plain_values import mapping, number, rows_of
from analysis.records.schemas import RUN_HOST
from analysis.run.machine_samples import Rows, Samples
from analysis.run.placement import alone_on, devices_of
from analysis.run.run import Run
from analysis.run.trials import SECOND, Trial

_EMPTY_BYTES = 64 << 20  # by which what a driver holds for itself may vary
_FEWEST_IDLE = 3  # samples
_LONGEST_GAP_S = 5.0  # between samples of power, and at either end of the traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialEnergy:
    """What one arm's card took in one trial, in joules, from the first request due to the last answer."""

    trial: int
    joules: float
    seconds: float
    idle_w: float | None  # before the arms started
    others_seen: bool  # the card shows whose processes are on it; elsewhere it is taken to be the arm's
    integrated: bool  # from samples of power alone, because the card counts no energy
    requests: int  # answered
    tokens: int  # that came out

    @property
    def per_token_j(self) -> float | None:
        """By token that came out; None where none did."""
        return self.joules / self.tokens if self.tokens else None

    @property
    def above_idle_j(self) -> float | None:
        """Without what the waiting card takes."""
        return None if self.idle_w is None else self.joules - self.idle_w * self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmEnergy:
    """The energy of an arm in the trials in which it is known. `obstacles` say why it is not in the others."""

    arm: str
    trials: tuple[TrialEnergy, ...]
    obstacles: tuple[str, ...]


def energy_of(run: Run, arm: str) -> ArmEnergy | None:
    """The energy of the arm; None where no card was watched in any trial, and of arms that tailgate did not start."""
    samples = Samples(run.records.bed)
    if run.account(arm).external or not any(list(samples.of("device", trial)) for trial in run.trials):
        return None
    known: list[TrialEnergy] = []
    obstacles: dict[str, None] = {}
    for trial in run.trials_of(arm):
        card = own_card(samples, trial, arm)
        taken = card if isinstance(card, str) else _taken(run, arm, trial, card)
        if isinstance(taken, str):
            obstacles[taken] = None
        else:
            known.append(taken)
    return ArmEnergy(arm=arm, trials=tuple(known), obstacles=tuple(obstacles))


def own_card(samples: Samples, trial: Trial, arm: str) -> Rows | str:
    """What was watched of the card that the arm had to itself in the trial; in words why there is nothing."""
    if not devices_of(trial).get(arm, "").startswith("cuda"):
        return "it ran on no card"
    name = alone_on(trial, arm)
    if name is None:
        return "its card was shared: not attributable"
    own = (item for item in samples.of("device", trial) if (item.host, item.name) == (RUN_HOST, name))
    return next(own, "its card was not watched")


def _taken(run: Run, arm: str, trial: Trial, card: Rows) -> TrialEnergy | str:
    """What the card took for the arm; in words why that is not known."""
    requests = run.requests
    rows = np.flatnonzero(run.of_arm(arm) & (requests.trial == trial.number) & ~requests.broken)
    if not rows.size:
        return "it was sent no request"
    start, end = trial.start_ns, max(trial.end_ns, int(requests.end_ns[rows].max()))
    if shared(card, start, end):
        return "its card was shared with processes of others: not attributable"
    joules, by_power = _counted(card, start, end), False
    if joules is None:
        joules, by_power = integrated(card, start, end), True
    if joules is None:
        return "its card tells neither energy nor power, or not from the beginning to the end of the traffic"
    return TrialEnergy(
        trial=trial.number,
        joules=joules,
        seconds=(end - start) / SECOND,
        idle_w=_idle_w(trial, card),
        others_seen=bool(card.known("foreign_processes", start, end)[1].size),
        integrated=by_power,
        requests=int(requests.ok[rows].sum()),
        tokens=int(requests.output_tokens[rows].sum()),
    )


def shared(card: Rows, start: int, end: int) -> bool:
    """Whether processes of others were seen on the card between the two times, ns."""
    return bool(card.known("foreign_processes", start, end)[1].any())


def _counted(card: Rows, start: int, end: int) -> float | None:
    """What the card's own counter rose by, with the power of the time before its first reading and after its last, or
    for a few seconds its mean rise; None where it was not read twice under the traffic, or began anew.

    It is read every ten seconds or so, and rises by far less before the traffic than in it: readings outside say
    nothing of what lies inside.
    """
    at_ns, joules = card.known("energy_j", start, end)
    if at_ns.size < 2 or (np.diff(joules) < 0).any():
        return None
    first, last, rise = int(at_ns[0]), int(at_ns[-1]), float(joules[-1] - joules[0])
    mean_w = rise * SECOND / (last - first)
    for begins, ends in ((start, first), (last, end)):
        taken = integrated(card, begins, ends)
        if taken is None and ends - begins > _LONGEST_GAP_S * SECOND:
            return None
        rise += mean_w * (ends - begins) / SECOND if taken is None else taken
    return rise


def integrated(card: Rows, start: int, end: int) -> float | None:
    """Joules from `start` to `end`, ns: the area under the samples of power; None where they have gaps."""
    longest = int(_LONGEST_GAP_S * SECOND)
    at_ns, watts = card.known("power_w", start - longest, end + longest)
    if not at_ns.size or np.diff(np.clip(at_ns, start, end), prepend=start, append=end).max() > longest:
        return None
    marks = np.concatenate(([start], at_ns[(at_ns > start) & (at_ns < end)], [end]))
    # Counted from the start: a moment in ns is more than a float holds.
    return float(np.trapezoid(np.interp(marks - start, at_ns - start, watts), (marks - start) / SECOND))


def _idle_w(trial: Trial, card: Rows) -> float | None:
    """The card's power before the traffic, while it held no more than before the arms started and nothing ran on it."""
    for row in rows_of(mapping(trial.info.get("bed")).get("before")):
        if (row.get("host") or RUN_HOST, row.get("device")) == (card.host, card.name):
            held = number(row.get("memory_bytes"))
            if held is None or row.get("processes") != []:
                return None
            before = card.at_ns < trial.start_ns
            power = card.whole("power_w")
            watts = power[before & (card.whole("memory_bytes") <= held + _EMPTY_BYTES) & np.isfinite(power)]
            return float(np.median(watts)) if watts.size >= _FEWEST_IDLE else None
    return None
