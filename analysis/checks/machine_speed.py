"""Whether machines were as fast as before, as each other and as their kind, by the reference around the traffic."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from analysis.checks.check import MACHINES, Arms, Disturbance, Evidence, Rule
from analysis.checks.machines import Gap, found_by, is_shared, lost, unequal
from analysis.records.schemas import RUN_HOST
from analysis.run.machine_records import MachineRecords
from analysis.run.references import CARD_FIGURES, FIGURES, HOST_FIGURES, speed_of
from analysis.wording import percent

_DEEDS = {
    "matmul_tflops": "multiplied matrices",
    "read_gb_per_s": "read memory",
    "launch_us": "launched small work",
    "python_ms": "ran Python",
}
# Medians that the reference measured on idle machines, by the device's name in NVML. Of a bf16 matrix product on random
# data with a rest after each, and of a read of memory. Add a kind here.
_KNOWN: Mapping[str, Mapping[str, float]] = {"NVIDIA H200": {"matmul_tflops": 705.0, "read_gb_per_s": 4430.0}}
_LEAST_OF_KIND = 0.8  # below this share of its kind a device is not what it should be: wide, since kinds vary


def drift(seen: Evidence) -> list[Disturbance] | None:
    """Devices and hosts that were slower after a trial than before it, or in one trial than in another; None where
    nothing was measured twice."""
    changes = list(_changes(seen))
    return [item for item in changes if item.value > item.limit] if changes else None


def _changes(seen: Evidence) -> Iterator[Disturbance]:
    """The reference after each trial against before it, and each trial's against the fastest of the same device.

    Arms that ran at the same time saw every speed in between: their mean is off by half of the change.
    """
    machines, half = seen.machines, 0.5 if is_shared(seen) else 1.0
    for figure in FIGURES:
        used = [place for place in machines.measured if _arms_of(machines, *place, figure) != ()]
        # (trial, device, change, by how much of it a mean can be off, other place, text)
        rows: list[tuple[int, str, float, float, tuple[int, str], str]] = []
        for trial, device in used:
            own = {row.when: speed_of(figure, row.figures[figure]) for row in machines.reference(trial, device, figure)}
            if {"before", "after"} <= own.keys():
                slower, faster = sorted(("before", "after"), key=lambda when: own[when])
                text = f"slower {slower} trial {trial} than {faster} it"
                rows.append((trial, device, own[faster] - own[slower], half, (trial, device), text))
        for card in dict.fromkeys(machines.identity(*place) for place in used):
            places = [place for place in used if machines.identity(*place) == card]
            speeds = {place: speed for place in places if (speed := machines.speed(*place, figure)) is not None}
            fastest = max(speeds, key=lambda place: speeds[place], default=(0, ""))
            for place, speed in speeds.items():
                if place[0] != fastest[0]:
                    text = f"slower in trial {place[0]} than in trial {fastest[0]}"
                    rows.append((*place, speeds[fastest] - speed, 1.0, fastest, text))
        for trial, device, change, part, other, text in rows:
            both = [_arms_of(machines, *place, figure) for place in ((trial, device), other)]
            yield Disturbance(
                place=machines.identity(trial, device) if figure in CARD_FIGURES else "host",
                trial=trial,
                arms=None if None in both else tuple(dict.fromkeys(arm for arms in both for arm in arms or ())),
                value=lost(change),
                limit=seen.run.limits.max_machine_drift,
                shift=part * change,
                among_trials=True,
                text=f"{_doer(device, figure)} {_DEEDS[figure]} {percent(lost(change))} {text}",
            )


def apart(seen: Evidence) -> list[Disturbance] | None:
    """Devices and hosts of an arm that are slower or faster than the control's, where the two did equal work; None
    where no two were measured.

    What of a gap stays with a device is in all trials, as far as swapping devices does not balance it; the rest is
    momentary, and in what trials differ by.
    """
    machines, measured = seen.machines, False
    found: list[Disturbance] = []
    for figure in FIGURES:
        gaps: dict[str, list[Gap]] = {arm: [] for arm in seen.run.treatments}
        for trial, placed in machines.placed.items():
            for arm in gaps:
                own, other = placed.get(arm), placed.get(seen.run.control)
                gap = _gap(machines, trial, own, other, figure) if own is not None and other is not None else None
                gaps[arm] += [gap] if gap else []
                measured |= gap is not None and own != other
        stays = _that_stays([gap for own in gaps.values() for gap in own])
        for arm, own_gaps in gaps.items():
            with_stays = [replace(gap, stays=stays[gap.trial, *gap.cards]) for gap in own_gaps]
            found += unequal(arm, with_stays, seen.run.limits.max_machine_drift)
    return found if measured else None


def _gap(machines: MachineRecords, trial: int, own: str, other: str, figure: str) -> Gap | None:
    cards = machines.identity(trial, own), machines.identity(trial, other)
    if own == other:
        return Gap(trial=trial, place=own, apart=0.0, cards=cards)
    speeds = machines.speed(trial, own, figure), machines.speed(trial, other, figure)
    sizes = [{row.sizes[figure] for row in machines.reference(trial, name, figure)} for name in (own, other)]
    if speeds[0] is None or speeds[1] is None or sizes[0] != sizes[1]:
        return None
    gap = speeds[0] - speeds[1]
    slower, faster = (own, other) if gap < 0 else (other, own)
    text = f"{_doer(slower, figure)} {_DEEDS[figure]} {percent(lost(gap))} slower than {_doer(faster, figure)}"
    place = f"{machines.identity(trial, slower)}{' host' * (figure in HOST_FIGURES)}"
    return Gap(trial=trial, place=place, apart=gap, text=f"{text} in trial {trial}", cards=cards)


def _that_stays(gaps: Sequence[Gap]) -> dict[tuple[int, str, str], float]:
    """What the devices of each gap differ by in all trials: least squares with one speed for each device."""
    number = {card: place for place, card in enumerate(dict.fromkeys(card for gap in gaps for card in gap.cards))}
    signs = np.zeros((len(gaps), len(number)))
    for row, gap in enumerate(gaps):
        for card, sign in zip(gap.cards, (1.0, -1.0), strict=True):
            signs[row, number[card]] += sign
    speeds = np.linalg.lstsq(signs, np.array([gap.apart or 0.0 for gap in gaps]))[0] if gaps else np.zeros(0)
    return {(gap.trial, *gap.cards): float(part) for gap, part in zip(gaps, signs @ speeds, strict=True)}


def slow(seen: Evidence) -> list[Disturbance] | None:
    """Devices far below what their kind is known for; None where nothing is known of the kind."""
    machines, compared = seen.machines, False
    found: list[Disturbance] = []
    for trial, device in machines.measured:
        card = machines.cards.get((trial, RUN_HOST, device))
        kind = card.model if card and card.model and not card.shared else ""
        for figure, known in _KNOWN.get(kind, {}).items():
            speed, arms = machines.speed(trial, device, figure), _arms_of(machines, trial, device, figure)
            if speed is None:
                continue
            compared, share = True, math.exp(speed - speed_of(figure, known))
            if share < _LEAST_OF_KIND and arms != ():
                text = (
                    f"{_doer(device, figure)} {_DEEDS[figure]} in trial {trial} at {percent(share)} of the speed that "
                )
                found.append(
                    Disturbance(
                        place=machines.identity(trial, device),
                        trial=trial,
                        arms=arms,
                        value=1.0 - share,
                        limit=1.0 - _LEAST_OF_KIND,
                        text=f"{text}{kind} is known for",
                    )
                )
    return found if compared else None


def _arms_of(machines: MachineRecords, trial: int, device: str, figure: str) -> Arms:
    """Whose gates a figure concerns: those of the arms on the device, or of all where it is of the host they share."""
    return None if figure in HOST_FIGURES or not machines.placed.get(trial) else machines.arms_on(trial, device)


def _doer(device: str, figure: str) -> str:
    if figure in HOST_FIGURES:
        return "the host" if device == "cpu" else f"the host of {device}"
    return "the processor" if device == "cpu" else device


DRIFT: Rule = Rule(
    name="machine speed",
    find=lambda seen: found_by(DRIFT, seen, drift(seen)),
    sound="By the reference, the arms' devices and hosts were as fast before as after, and as fast as each other.",
    remedy="Let the machine settle, lock the clocks of its cards, if any, and run again with nothing else on the host. "
    "A ratio to the control is decided by more trials, too: six or more in all, on several days.",
    rank=MACHINES,
)
APART: Rule = Rule(
    name="machine speed",
    find=lambda seen: found_by(APART, seen, apart(seen)),
    remedy="Put the arms on cards of one speed, or swap them over an even number of trials (trials.swap_devices): six "
    "or more, where the host's speed will not stay.",
    rank=MACHINES,
)
SLOW: Rule = Rule(
    name="machine speed",
    find=lambda seen: found_by(SLOW, seen, slow(seen)),
    remedy="Look for a throttled, shared or faulty machine, or run on another one.",
    slows=True,
    rank=MACHINES,
)
