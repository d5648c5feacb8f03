"""Whether machines were as fast as before, as each other and as their kind, by the reference beside the traffic."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from analysis.judging.checks.disturbances import BALANCED, Aspect, Disturbance, lost
from analysis.judging.wording import percent
from analysis.records.schemas import RUN_HOST
from analysis.run.references import CARD_FIGURES, FIGURES, HOST_FIGURES, speed_of
from analysis.run.test_bed import TestBed
from analysis.settings.known_speeds import DEVICES, HOSTS, LEAST_SHARE

DRIFT = Aspect(
    check="bed drift",
    sound="Devices and hosts were as fast after each trial as before it, and from trial to trial.",
    remedy="Let the machine settle, lock the clocks of its cards, if any, and run again with nothing else on the host, "
    "or run six trials or more, on several days.",
    among_trials=True,
)
APART = Aspect(
    check="bed apart",
    sound="The arms' devices and their hosts were equally fast.",
    remedy="Put the arms on cards of one speed, or swap them over an even number of trials (trials.swap_devices).",
)
SLOW = Aspect(
    check="slow bed",
    sound="Devices and hosts are as fast as their kind is known to be.",
    remedy="Look for a throttled, shared or faulty machine, or run on another one.",
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
    arms: tuple[str, ...] | None
    text: str


def drifts(bed: TestBed) -> list[float]:
    """How far apart any two measurements of one figure on one device are, as shares: within trials and between."""
    return [lost(item.change) for item in _changes(bed)]


def drift(bed: TestBed, limit: float) -> list[Disturbance] | None:
    """Devices and hosts that were slower after a trial than before it, or in one trial than in another; None where
    nothing was measured twice."""
    changes = list(_changes(bed))
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
            shift=abs(item.change),
            text=item.text,
        )
        for item in changes
        if lost(item.change) > limit
    ]


def apart(bed: TestBed, arms: Sequence[str], limit: float) -> list[Disturbance] | None:
    """Devices and hosts of an arm that are slower or faster than the control's; None where no two were measured.

    What counts is the mean of the logarithms over trials: by as much their speeds alone move the ratio of the arms.
    """
    measured = False
    found = []
    for arm in arms[1:]:
        for figure in FIGURES:
            known = []
            for trial, placed in bed.placed.items():
                own, other = placed.get(arm), placed.get(arms[0])
                if own is None or other is None:
                    continue
                speeds = bed.speed(trial, own, figure), bed.speed(trial, other, figure)
                if own == other:
                    known.append((0.0, trial, own, other))
                elif bed.sizes.get((trial, own, figure)) != bed.sizes.get((trial, other, figure)):
                    continue
                elif speeds[0] is not None and speeds[1] is not None:
                    measured = True
                    known.append((speeds[0] - speeds[1], trial, own, other))
            mean = sum(row[0] for row in known) / max(1, len(known))
            balanced = bool(known) and lost(mean) <= limit
            for difference, trial, own, other in known:
                if lost(difference) <= limit:
                    continue
                slower, faster = (own, other) if difference < 0 else (other, own)
                text = (
                    f"{_doer(slower, figure)} {_DEEDS[figure]} {percent(lost(difference))} slower than "
                    f"{_doer(faster, figure)} in trial {trial}"
                )
                found.append(
                    Disturbance(
                        aspect=APART,
                        place=f"{bed.identity(trial, slower)}{' host' * (figure in HOST_FIGURES)}",
                        trial=trial,
                        arms=() if balanced else (arm,),
                        value=lost(difference),
                        limit=limit,
                        shift=abs(mean),
                        text=text + (BALANCED if balanced else ""),
                    )
                )
    return found if measured else None


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


def _changes(bed: TestBed) -> Iterator[_Change]:
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
