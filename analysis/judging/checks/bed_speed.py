"""Whether machines were as fast as before, as each other and as their kind, by the reference beside the traffic."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from analysis.judging.checks.disturbances import BALANCED, Aspect, Disturbance, lost
from analysis.records.schemas import RUN_HOST
from analysis.run.references import CARD_FIGURES, FIGURES, HOST_FIGURES, speed_of
from analysis.run.test_bed import TestBed
from analysis.settings.known_speeds import DEVICES, HOSTS, LEAST_SHARE
from analysis.wording import percent

DRIFT = Aspect(
    check="bed drift",
    sound="Devices and hosts were as fast after each trial as before it, and from trial to trial.",
    remedy="Let the machine settle, lock the clocks of its cards, if any, and run again with nothing else on the host. "
    "A ratio to the control is decided by more trials, too: six or more in all, on several days.",
)
APART = Aspect(
    check="bed apart",
    sound="The arms' devices and their hosts were equally fast.",
    remedy="Put the arms on cards of one speed, or swap them over an even number of trials (trials.swap_devices): six "
    "or more, where the host's speed will not stay.",
)
SLOW = Aspect(
    check="slow bed",
    sound="Devices and hosts are as fast as their kind is known to be.",
    remedy="Look for a throttled, shared or faulty machine, or run on another one.",
    slows=True,
)

_DEEDS = {
    "matmul_tflops": "multiplied matrices",
    "read_gb_per_s": "read memory",
    "launch_us": "launched small work",
    "python_ms": "ran Python",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """One figure measured twice on one device. `change` is of the speed, as a logarithm: negative is slower."""

    trial: int
    card: str
    figure: str
    change: float
    moved: float  # by how much it can have changed the mean speed of what was compared, as a logarithm
    arms: tuple[str, ...] | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gap:
    """One figure on the devices of an arm and of the control in one trial. `apart` is the logarithm of the ratio of
    their speeds, negative where the arm's is slower; `stays` is what of it is there in all trials."""

    arm: str
    trial: int
    own: str
    other: str
    apart: float
    stays: float = 0.0


def drifts(bed: TestBed) -> list[float]:
    """How far apart any two measurements of one figure on one device are, as shares: within trials and between."""
    return [lost(item.change) for item in _changes(bed, shared=True)]


def drift(bed: TestBed, limit: float, *, shared: bool) -> list[Disturbance] | None:
    """Devices and hosts that were slower after a trial than before it, or in one trial than in another; None where
    nothing was measured twice. `shared`: all arms ran at the same time."""
    changes = list(_changes(bed, shared=shared))
    if not changes:
        return None
    return [
        Disturbance(
            aspect=DRIFT,
            place=item.card if item.figure in CARD_FIGURES else "host",
            trial=item.trial,
            arms=item.arms,
            value=lost(item.change),
            limit=limit,
            shift=item.moved,
            among_trials=True,
            text=item.text,
        )
        for item in changes
        if lost(item.change) > limit
    ]


def apart(bed: TestBed, arms: Sequence[str], limit: float) -> list[Disturbance] | None:
    """Devices and hosts of an arm that are slower or faster than the control's; None where no two were measured.

    What counts is the mean of the logarithms over trials: by as much their speeds alone move the ratio of the arms.
    What of it stays with a device is in all trials, as far as places do not balance it; the rest is the moment's, and
    in what trials differ by.
    """
    measured = False
    found: list[Disturbance] = []
    for figure in FIGURES:
        gaps = _with_stays(bed, list(_gaps(bed, arms, figure)))
        measured = measured or any(gap.own != gap.other for gap in gaps)
        for arm in arms[1:]:
            found += _wide(bed, figure, [gap for gap in gaps if gap.arm == arm], limit)
    return found if measured else None


def _gaps(bed: TestBed, arms: Sequence[str], figure: str) -> Iterator[_Gap]:
    """How far each arm's device was from the control's, trial by trial, where the two did equal work."""
    for arm in arms[1:]:
        for trial, placed in bed.placed.items():
            own, other = placed.get(arm), placed.get(arms[0])
            if own is None or other is None:
                continue
            speeds = bed.speed(trial, own, figure), bed.speed(trial, other, figure)
            alike = bed.sizes.get((trial, own, figure)) == bed.sizes.get((trial, other, figure))
            if own == other:
                yield _Gap(arm=arm, trial=trial, own=own, other=other, apart=0.0)
            elif alike and speeds[0] is not None and speeds[1] is not None:
                yield _Gap(arm=arm, trial=trial, own=own, other=other, apart=speeds[0] - speeds[1])


def _with_stays(bed: TestBed, gaps: Sequence[_Gap]) -> list[_Gap]:
    """The gaps with what their devices differ by in all trials: least squares with one speed for each device."""
    if not gaps:
        return []
    cards = [(bed.identity(gap.trial, gap.own), bed.identity(gap.trial, gap.other)) for gap in gaps]
    number = {card: place for place, card in enumerate(dict.fromkeys(card for pair in cards for card in pair))}
    signs = np.zeros((len(gaps), len(number)))
    for row, (own, other) in enumerate(cards):
        signs[row, number[own]] += 1.0
        signs[row, number[other]] -= 1.0
    speeds = np.linalg.lstsq(signs, np.array([gap.apart for gap in gaps]))[0]
    return [replace(gap, stays=float(stays)) for gap, stays in zip(gaps, signs @ speeds, strict=True)]


def _wide(bed: TestBed, figure: str, gaps: Sequence[_Gap], limit: float) -> Iterator[Disturbance]:
    """The gaps of one arm that are too wide, with what all of them leave on it."""
    if not gaps:
        return
    mean, stays = fmean(gap.apart for gap in gaps), fmean(gap.stays for gap in gaps)
    balanced = lost(mean) <= limit
    for gap in gaps:
        if lost(gap.apart) <= limit:
            continue
        slower, faster = (gap.own, gap.other) if gap.apart < 0 else (gap.other, gap.own)
        text = (
            f"{_doer(slower, figure)} {_DEEDS[figure]} {percent(lost(gap.apart))} slower than {_doer(faster, figure)} "
            f"in trial {gap.trial}"
        )
        yield Disturbance(
            aspect=APART,
            place=f"{bed.identity(gap.trial, slower)}{' host' * (figure in HOST_FIGURES)}",
            trial=gap.trial,
            arms=() if balanced else (gap.arm,),
            value=lost(gap.apart),
            limit=limit,
            shift=abs(mean),
            among_trials=lost(stays) <= limit,
            text=text + (BALANCED if balanced else ""),
        )


def slow(bed: TestBed) -> list[Disturbance] | None:
    """Devices and hosts far below what their kind is known for; None where nothing is known of the kind."""
    compared = list(_shares_of_kind(bed))
    if not compared:
        return None
    return [
        Disturbance(
            aspect=SLOW,
            place=bed.identity(trial, device) if figure in CARD_FIGURES else "host",
            trial=trial,
            arms=_arms_of(bed, trial, device, figure),
            value=1.0 - share,
            limit=1.0 - LEAST_SHARE,
            text=f"{_doer(device, figure)} {_DEEDS[figure]} in trial {trial} at {percent(share)} of the speed that "
            f"{kind} is known for",
        )
        for trial, device, figure, kind, share in compared
        if share < LEAST_SHARE and _arms_of(bed, trial, device, figure) != ()
    ]


def _changes(bed: TestBed, *, shared: bool) -> Iterator[_Change]:
    """The reference after each trial against before it, and each trial's against the fastest of the same device."""
    places = dict.fromkeys((row.trial, row.device) for row in bed.references if row.host == RUN_HOST)
    pairs = {(row.trial, row.device, row.when): row.figures for row in bed.references if row.host == RUN_HOST}
    for figure in FIGURES:
        used = [place for place in places if _arms_of(bed, *place, figure) != ()]
        for trial, device in used:
            figures = [pairs.get((trial, device, when), {}) for when in ("before", "after")]
            if all(figure in row for row in figures):
                change = speed_of(figure, figures[1][figure]) - speed_of(figure, figures[0][figure])
                when = ("after", "before") if change < 0 else ("before", "after")
                yield _Change(
                    trial=trial,
                    card=bed.identity(trial, device),
                    figure=figure,
                    change=change,
                    # Arms that ran at the same time saw every speed in between: the mean is off by half of the change.
                    moved=abs(change) / 2.0 if shared else abs(change),
                    arms=_arms_of(bed, trial, device, figure),
                    text=f"{_doer(device, figure)} {_DEEDS[figure]} {percent(lost(change))} slower {when[0]} trial "
                    f"{trial} than {when[1]} it",
                )
        for card in dict.fromkeys(bed.identity(*place) for place in used):
            own = [place for place in used if bed.identity(*place) == card]
            speeds = [(known, place) for place in own if (known := bed.speed(*place, figure)) is not None]
            best, (fastest, name) = max(speeds, default=(0.0, (0, "")))
            for speed, (trial, device) in speeds:
                if trial != fastest:
                    yield _Change(
                        trial=trial,
                        card=card,
                        figure=figure,
                        change=speed - best,
                        moved=abs(speed - best),
                        arms=_either(_arms_of(bed, trial, device, figure), _arms_of(bed, fastest, name, figure)),
                        text=f"{_doer(device, figure)} {_DEEDS[figure]} {percent(lost(speed - best))} slower in trial "
                        f"{trial} than in trial {fastest}",
                    )


def _arms_of(bed: TestBed, trial: int, device: str, figure: str) -> tuple[str, ...] | None:
    """Whose gates a figure concerns: those of the arms on the device, or of all where it is of the host they share."""
    return None if figure in HOST_FIGURES or not bed.placed.get(trial) else bed.arms_on(trial, device)


def _either(one: tuple[str, ...] | None, other: tuple[str, ...] | None) -> tuple[str, ...] | None:
    return None if one is None or other is None else tuple(dict.fromkeys((*one, *other)))


def _doer(device: str, figure: str) -> str:
    if figure in HOST_FIGURES:
        return "the host" if device == "cpu" else f"the host beside {device}"
    return "the processor" if device == "cpu" else device


def _shares_of_kind(bed: TestBed) -> Iterator[tuple[int, str, str, str, float]]:
    """(trial, device, figure, kind, share of the speed that the kind is known for) of what can be compared."""
    for trial, device in dict.fromkeys((row.trial, row.device) for row in bed.references if row.host == RUN_HOST):
        card = bed.cards.get((trial, RUN_HOST, device))
        cpu = str(bed.machines.get((trial, RUN_HOST), {}).get("cpu"))
        model = card.model if card and card.model and not card.shared else ""
        for kind, figures in ((model, DEVICES.get(model, {})), (cpu, HOSTS.get(cpu, {}))):
            for figure, known in figures.items():
                speed = bed.speed(trial, device, figure)
                if speed is not None:
                    yield trial, device, figure, kind, math.exp(speed - speed_of(figure, known))
