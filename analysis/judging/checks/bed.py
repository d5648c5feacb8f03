"""Whether the machines behaved: nobody else on them, nothing held back, and as fast as before and as each other.

What disturbs one arm's device leaves that arm's gates open; on the control's device it leaves all open, as does what
disturbs a host. A difference that falls on an arm and the control alike, since they changed places, opens nothing and
is still said.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from analysis.judging.validity import ESTIMATES, Check
from analysis.judging.wording import counted, percent, sentence
from analysis.run.bed_samples import RUN_HOST
from analysis.run.test_bed import (
    CARD_FIGURES,
    FIGURES,
    HOST_FIGURES,
    POWER_CAP,
    THROTTLES,
    DeviceTraffic,
    TestBed,
)
from analysis.settings.known_speeds import DEVICES, HOSTS, LEAST_SHARE

MOST_SHARE = 0.01  # of a trial's traffic, in which a card may be held back or somebody else's
MOST_STEAL = 0.01  # of the time of a host's processors
MOST_FOREIGN_CPU = 0.10
MOST_MEMORY_PRESSURE = 0.01

FOREIGN, THROTTLING, SETTINGS = "foreign work", "throttling", "device settings"
STEAL, BUSY, DRIFT, APART, SLOW = "steal", "busy host", "bed drift", "bed apart", "slow bed"

_MENDS = {
    FOREIGN: "Stop what else runs on the card (`nvidia-smi` lists it), or use another one.",
    THROTTLING: "Cool the card or lower and lock its clock below what it cannot hold, and run again.",
    SETTINGS: "Give all cards one power limit and one clock (`nvidia-smi -pl`, `-lgc`), or swap them over an even "
    "number of trials.",
    STEAL: "Use a host whose processors are not shared: the hypervisor ran somebody else in this time.",
    BUSY: "Stop what else runs on the host, or give the run processors and memory of its own.",
    DRIFT: "Let the machine settle, lock the card's clock, and run again with nothing else on the host.",
    APART: "Put the arms on cards of one speed, or swap them over an even number of trials (trials.swap_devices).",
    SLOW: "Look for a throttled, shared or faulty machine, or run on another one.",
}
_SOUND = {
    FOREIGN: "Nobody else was on the arms' devices.",
    THROTTLING: "Nothing held the arms' devices back.",
    SETTINGS: "The arms' devices had one power limit and one highest clock.",
    STEAL: "The hosts had their processors to themselves.",
    BUSY: "The hosts did nothing else that counts.",
    DRIFT: "Devices and hosts were as fast after each trial as before it, and from trial to trial.",
    APART: "The arms' devices and their hosts were equally fast.",
    SLOW: "Devices and hosts are as fast as their kind is known to be.",
}
_FIGURE_NAMES = {
    "matmul_tflops": "multiplied matrices",
    "read_gb_per_s": "read memory",
    "launch_us": "launched small work",
    "python_ms": "ran Python",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """One thing that was not as it should be, in words, and whose gates it leaves open."""

    check: str
    place: str  # the device or host
    trial: int | None
    arms: tuple[str, ...] | None  # None: all; empty: none, because it falls on an arm and the control alike
    value: float
    limit: float
    text: str  # a sentence without its full stop


def check_bed(bed: TestBed, arms: Sequence[str], limit: float) -> tuple[list[Check], list[Disturbance]]:
    """The checks that the bed's records allow, and what they rest on, worst first in each check.

    `arms` begins with the control; `limit` is how far two measurements of the reference may lie apart. What could not
    be read has no check.
    """
    checks: list[Check] = []
    disturbances: list[Disturbance] = []
    for name, known, look in (
        (FOREIGN, any(one.foreign_s is not None or _earlier(bed, one) for one in _used(bed)), _foreign_work),
        (THROTTLING, any(one.throttled_s is not None for one in _used(bed)), _throttling),
        (SETTINGS, _several(bed, arms) and bool(bed.devices), _settings),
        (STEAL, any(host.steal is not None for host in bed.hosts), _steal),
        (BUSY, any((host.foreign, host.pressure_memory) != (None, None) for host in bed.hosts), _busy_host),
        (DRIFT, any(True for _ in _drifts(bed)), _drift),
        (APART, _several(bed, arms) and any(row.figures for row in bed.references), _apart),
        (SLOW, any(True for _ in _shares_of_kind(bed)), _slow),
    ):
        if not known:
            continue
        found = (_widened(item, arms[0]) for item in look(bed, arms, limit))
        own = _worst_of_each(found)
        disturbances += own
        checks += _checks(name, own, arms)
    return checks, disturbances


def _checks(name: str, own: Sequence[Disturbance], arms: Sequence[str]) -> Iterator[Check]:
    """One check of all arms, or one for each arm whose gates alone are concerned; one that holds where nothing is."""
    scopes: list[str | None] = [None, *arms[1:]]
    opened = False
    for arm in scopes:
        of_scope = [item for item in own if (item.arms is None if arm is None else arm in (item.arms or ()))]
        if of_scope:
            opened = True
            worst = max(of_scope, key=lambda item: item.value / item.limit)
            yield _check(name, False, worst, "; ".join(item.text for item in of_scope), arm)
    if not opened:
        balanced = "; ".join(item.text for item in own)
        yield _check(name, True, own[0] if own else None, balanced or _SOUND[name].rstrip("."), None)


def _check(name: str, ok: bool, worst: Disturbance | None, reason: str, arm: str | None) -> Check:
    return Check(
        check=name,
        ok=ok,
        arm=arm,
        value=worst.value if worst else None,
        limit=worst.limit if worst else None,
        reason=f"{sentence([reason])}.",
        affects=ESTIMATES,
        remedy=_MENDS[name],
    )


def _widened(item: Disturbance, control: str) -> Disturbance:
    """The disturbance, of all arms where it concerns the control: each is compared with it."""
    return replace(item, arms=None) if control in (item.arms or ()) else item


def _worst_of_each(found: Iterable[Disturbance]) -> list[Disturbance]:
    """For each place the worst trial, with the number of other trials in which it was so; worst places first."""

    def key(item: Disturbance) -> tuple[str, bool]:
        return item.place, item.arms == ()

    worst = []
    for _, group in groupby(sorted(found, key=key), key):
        items = sorted(group, key=lambda item: -item.value)
        trials = {item.trial for item in items} - {items[0].trial}
        named = [item.arms for item in items]
        arms = None if None in named else tuple(dict.fromkeys(arm for row in named for arm in row or ()))
        more = f", and in {counted(len(trials), 'more trial')}" if trials else ""
        worst.append(replace(items[0], arms=arms, text=items[0].text + more))
    return sorted(worst, key=lambda item: -item.value / item.limit)


# --- During the traffic -----------------------------------------------------------------------------------------------


def _used(bed: TestBed) -> list[DeviceTraffic]:
    """The devices that served an arm; those of trials that do not say who was where, all."""
    return [
        device
        for device in bed.devices
        if device.card.host == RUN_HOST and (device.arms or not bed.placed.get(device.trial))
    ]


def _concerned(device: DeviceTraffic) -> tuple[str, ...] | None:
    return device.arms or None


def _earlier(bed: TestBed, device: DeviceTraffic) -> tuple[str, ...]:
    return bed.earlier.get((device.trial, device.card.host, device.name), ())


def _of_traffic(device: DeviceTraffic, seconds: float) -> str:
    if seconds > 0.99 * device.seconds:
        return f"throughout trial {device.trial}"
    return f"for {seconds:.3g} s of the {device.seconds:.3g} s of trial {device.trial}"


def _foreign_work(bed: TestBed, arms: Sequence[str], limit: float) -> Iterator[Disturbance]:
    for device in _used(bed):
        before = _earlier(bed, device)
        share = device.foreign_s / device.seconds if device.foreign_s is not None and device.seconds > 0 else 0.0
        if device.foreign_s is None and before:
            share, text = 1.0, f"{'; '.join(before)} ran on {device.name} before the arms of trial {device.trial} did"
        else:
            count = device.foreign_processes or 1
            held = f" with {device.foreign_bytes / 2**30:.3g} GiB" if device.foreign_bytes else ""
            named = f" ({'; '.join(before)})" if before else ""
            text = (
                f"{count} process{' of others' if count == 1 else 'es of others'}{named}{held} "
                f"{'was' if count == 1 else 'were'} on {device.name} {_of_traffic(device, device.foreign_s or 0.0)}"
            )
        if share > MOST_SHARE:
            yield _during(FOREIGN, device, share, text)


def _during(check: str, device: DeviceTraffic, share: float, text: str) -> Disturbance:
    return Disturbance(
        check=check,
        place=device.name,
        trial=device.trial,
        arms=_concerned(device),
        value=share,
        limit=MOST_SHARE,
        text=text,
    )


def _throttling(bed: TestBed, arms: Sequence[str], limit: float) -> Iterator[Disturbance]:
    for device in _used(bed):
        share = (device.throttle_s or 0.0) / device.seconds if device.seconds > 0 else 0.0
        if share > MOST_SHARE and device.throttled_s:
            reasons = sorted(set(device.throttled_s) - {POWER_CAP}, key=lambda name: -(device.throttled_s or {})[name])
            why = ", ".join(THROTTLES[name] for name in reasons)
            held = _of_traffic(device, device.throttle_s or 0.0)
            yield _during(THROTTLING, device, share, f"{device.name} was throttled {held} ({why})")
    for arm in arms[1:]:
        yield from _power_cap(bed, arm, arms[0])


def _power_cap(bed: TestBed, arm: str, control: str) -> Iterator[Disturbance]:
    """A power cap that bound on one of two devices, unless it follows the arm from card to card: then the arm's own
    work draws the power, and any card would hold it so."""
    bound = [pair for pair in _pairs(bed, arm, control) if None not in (_capped(pair[0]), _capped(pair[1]))]
    apart = [(_capped(own) or 0.0) - (_capped(other) or 0.0) for own, other in bound]
    heavier = [
        (own if share > 0 else other, other if share > 0 else own, share > 0)
        for (own, other), share in zip(bound, apart, strict=True)
        if abs(share) > MOST_SHARE
    ]
    same_arm = len({of_arm for _, _, of_arm in heavier}) == 1 and len(heavier) == len(bound)
    if same_arm and len({device.card.identity for device, _, _ in heavier}) > 1 and not _limits_apart(bound):
        return
    for device, other, _ in heavier:
        share = abs((_capped(device) or 0.0) - (_capped(other) or 0.0))
        held = _of_traffic(device, (device.throttled_s or {}).get(POWER_CAP, 0.0))
        rest = percent(_capped(other) or 0.0)
        text = f"{device.name} was throttled {held} ({THROTTLES[POWER_CAP]}), {other.name} for {rest} of it"
        yield replace(_during(THROTTLING, device, share, text), arms=(arm,))


def _pairs(bed: TestBed, arm: str, control: str) -> list[tuple[DeviceTraffic, DeviceTraffic]]:
    """The devices of the arm and of the control, in the trials in which they are two."""
    pairs = []
    for trial in bed.trials:
        of = {name: device for device in _used(bed) if device.trial == trial for name in device.arms}
        own, other = of.get(arm), of.get(control)
        if own is not None and other is not None and own is not other:
            pairs.append((own, other))
    return pairs


def _capped(device: DeviceTraffic) -> float | None:
    if device.throttled_s is None or device.seconds <= 0:
        return None
    return device.throttled_s.get(POWER_CAP, 0.0) / device.seconds


def _limits_apart(pairs: Sequence[tuple[DeviceTraffic, DeviceTraffic]]) -> bool:
    limits = [_power_limit(device) for pair in pairs for device in pair]
    known = [value for value in limits if value is not None]
    return bool(known) and max(known) > 1.01 * min(known)


def _power_limit(device: DeviceTraffic) -> float | None:
    # The lowest that was seen: a limit may change while a trial runs.
    return device.power_limit_w.low if device.power_limit_w else device.card.power_limit_w


def _settings(bed: TestBed, arms: Sequence[str], limit: float) -> Iterator[Disturbance]:
    """Power limits and clocks that differ between an arm's device and the control's, of one model."""
    for arm in arms[1:]:
        for name, unit, of in (
            ("a power limit", "W", _power_limit),
            ("a highest clock under load", "MHz", lambda device: device.free_mhz),
        ):
            pairs = [pair for pair in _pairs(bed, arm, arms[0]) if pair[0].card.model == pair[1].card.model]
            values = [(own, other, of(own), of(other)) for own, other in pairs]
            known = [(own, other, a, b) for own, other, a, b in values if a is not None and b is not None and a > 0 < b]
            apart = [math.log(a / b) for _, _, a, b in known]
            for (own, other, a, b), each in zip(known, apart, strict=True):
                if _lost(each) <= limit:
                    continue
                low, high = ((own, a), (other, b)) if each < 0 else ((other, b), (own, a))
                balanced = _lost(sum(apart) / len(apart)) <= limit
                text = (
                    f"{low[0].name} had {name} of {low[1]:,.0f} {unit} in trial {own.trial}, "
                    f"{high[0].name} of {high[1]:,.0f} {unit}"
                )
                yield Disturbance(
                    check=SETTINGS,
                    place=f"{low[0].card.identity} {name}",
                    trial=own.trial,
                    arms=() if balanced else (arm,),
                    value=_lost(each),
                    limit=limit,
                    text=text + (_BALANCED if balanced else ""),
                )


def _lost(apart: float) -> float:
    """The share by which the slower of two speeds falls short of the other, from the logarithm of their ratio."""
    return -math.expm1(-abs(apart))


_BALANCED = ", which the arms' changing places balances"


def _steal(bed: TestBed, arms: Sequence[str], limit: float) -> Iterator[Disturbance]:
    for host in bed.hosts:
        if host.steal is not None and host.steal > MOST_STEAL:
            text = (
                f"the hypervisor took {percent(host.steal)} of the processors' time from {_host_name(host.host)} in "
                f"trial {host.trial}"
            )
            yield Disturbance(
                check=STEAL, place=host.host, trial=host.trial, arms=None, value=host.steal, limit=MOST_STEAL, text=text
            )


def _host_name(host: str) -> str:
    return "the host" if host == RUN_HOST else f"the host of {host}"


def _busy_host(bed: TestBed, arms: Sequence[str], limit: float) -> Iterator[Disturbance]:
    for host in bed.hosts:
        for value, most, what in (
            (host.foreign, MOST_FOREIGN_CPU, "work that is not of the run took {} of the processors of {}"),
            (host.pressure_memory, MOST_MEMORY_PRESSURE, "tasks waited for memory {} of the time on {}"),
        ):
            if value is not None and value > most:
                text = f"{what.format(percent(value), _host_name(host.host))} in trial {host.trial}"
                yield Disturbance(
                    check=BUSY,
                    place=f"{host.host} {what}",
                    trial=host.trial,
                    arms=None,
                    value=value,
                    limit=most,
                    text=text,
                )


# --- By the reference -------------------------------------------------------------------------------------------------


def _arms_of(bed: TestBed, trial: int, device: str, figure: str) -> tuple[str, ...] | None:
    """Whose gates a figure concerns: the arms on the device, or all where it is of the host they share."""
    return None if figure in HOST_FIGURES or not bed.placed.get(trial) else bed.arms_on(trial, device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drift:
    """Two measurements of one figure. `change` is of the speed, as a logarithm: negative is slower."""

    trial: int
    card: str
    device: str
    figure: str
    change: float
    arms: tuple[str, ...] | None
    text: str


def drifts(bed: TestBed) -> list[float]:
    """How far apart any two measurements of one figure on one device are, as shares: within trials and between."""
    return [_lost(item.change) for item in _drifts(bed)]


def _drifts(bed: TestBed) -> Iterator[_Drift]:
    """The reference after each trial against before it, and each trial's against the fastest of the same card."""
    for row in bed.references:
        after = [
            other
            for other in bed.references
            if (other.trial, other.host, other.device, other.when) == (row.trial, row.host, row.device, "after")
        ]
        if row.host != RUN_HOST or row.when != "before" or not after:
            continue
        for figure in sorted(row.figures.keys() & after[0].figures.keys(), key=FIGURES.index):
            change = math.log(after[0].figures[figure] / row.figures[figure])
            change = -change if figure in HOST_FIGURES else change
            arms = _arms_of(bed, row.trial, row.device, figure)
            if arms != ():
                when = f"after trial {row.trial} than before it"
                if change > 0:
                    when = f"before trial {row.trial} than after it"
                text = f"{_doer(row.device, figure)} {_FIGURE_NAMES[figure]} {percent(_lost(change))} slower {when}"
                yield _Drift(
                    trial=row.trial,
                    card=row.card,
                    device=row.device,
                    figure=figure,
                    change=change,
                    arms=arms,
                    text=text,
                )
    places = dict.fromkeys((row.card, row.trial, row.device) for row in bed.references if row.host == RUN_HOST)
    for figure in FIGURES:
        for card in dict.fromkeys(card for card, _, _ in places):
            speeds = [
                (speed, trial, device)
                for own, trial, device in places
                if own == card and (speed := bed.speed(trial, device, figure)) is not None
                if _arms_of(bed, trial, device, figure) != ()
            ]
            if len(speeds) < 2:
                continue
            fastest = max(speeds)
            for speed, trial, device in speeds:
                if (speed, trial, device) != fastest:
                    text = (
                        f"{_doer(device, figure)} {_FIGURE_NAMES[figure]} {percent(_lost(fastest[0] - speed))} "
                        f"slower in trial {trial} than in trial {fastest[1]}"
                    )
                    yield _Drift(
                        trial=trial,
                        card=card,
                        device=device,
                        figure=figure,
                        change=speed - fastest[0],
                        arms=_either(
                            _arms_of(bed, trial, device, figure), _arms_of(bed, fastest[1], fastest[2], figure)
                        ),
                        text=text,
                    )


def _either(one: tuple[str, ...] | None, other: tuple[str, ...] | None) -> tuple[str, ...] | None:
    return None if one is None or other is None else tuple(dict.fromkeys((*one, *other)))


def _doer(device: str, figure: str) -> str:
    if figure in HOST_FIGURES:
        return "the host" if device == "cpu" else f"the host beside {device}"
    return "the processor" if device == "cpu" else device


def _drift(bed: TestBed, arms: Sequence[str], limit: float) -> Iterator[Disturbance]:
    for item in _drifts(bed):
        if _lost(item.change) > limit:
            yield Disturbance(
                check=DRIFT,
                place=item.card if item.figure in CARD_FIGURES else "host",
                trial=item.trial,
                arms=item.arms,
                value=_lost(item.change),
                limit=limit,
                text=item.text,
            )


def _several(bed: TestBed, arms: Sequence[str]) -> bool:
    """Whether an arm sat on another device than the control in any trial."""
    return any(
        arms[0] in placed and any(arm in placed and placed[arm] != placed[arms[0]] for arm in arms[1:])
        for placed in bed.placed.values()
    )


def _apart(bed: TestBed, arms: Sequence[str], limit: float) -> Iterator[Disturbance]:
    """The speed of an arm's device over the control's, in each trial and over all trials in the mean of logarithms."""
    for arm in arms[1:]:
        for figure in FIGURES:
            known = []
            for trial, placed in bed.placed.items():
                own, other = placed.get(arm), placed.get(arms[0])
                if own is None or other is None:
                    continue
                speeds = [bed.speed(trial, device, figure) for device in (own, other)]
                if own == other:
                    known.append((0.0, trial, own, other))
                elif speeds[0] is not None and speeds[1] is not None:
                    known.append((speeds[0] - speeds[1], trial, own, other))
            balanced = bool(known) and _lost(sum(row[0] for row in known) / len(known)) <= limit
            for apart, trial, own, other in known:
                if _lost(apart) <= limit:
                    continue
                slow, fast = (own, other) if apart < 0 else (other, own)
                by = percent(_lost(apart))
                beside = f"than {_doer(fast, figure)} in trial {trial}"
                text = f"{_doer(slow, figure)} {_FIGURE_NAMES[figure]} {by} slower {beside}"
                yield Disturbance(
                    check=APART,
                    place=f"{_card_of(bed, trial, slow)}{' host' * (figure in HOST_FIGURES)}",
                    trial=trial,
                    arms=() if balanced else (arm,),
                    value=_lost(apart),
                    limit=limit,
                    text=text + (_BALANCED if balanced else ""),
                )


def _card_of(bed: TestBed, trial: int, device: str) -> str:
    rows = (row.card for row in bed.references if (row.trial, row.host, row.device) == (trial, RUN_HOST, device))
    return next(rows, device)


def _shares_of_kind(bed: TestBed) -> Iterator[tuple[int, str, str, str, float]]:
    """(trial, device, figure, kind, share of the speed that the kind is known for) of what can be compared."""
    cpu = bed.machines.get(RUN_HOST, {}).get("cpu")
    for trial, device in dict.fromkeys((row.trial, row.device) for row in bed.references if row.host == RUN_HOST):
        card = bed.cards.get((trial, RUN_HOST, device))
        kind = card.model if card and card.model and not card.shared else None
        for name, figures in ((kind, DEVICES.get(kind or "", {})), (cpu, HOSTS.get(str(cpu), {}))):
            for figure, known in figures.items():
                speed = bed.speed(trial, device, figure)
                if speed is not None:
                    expected = math.log(known) if figure in CARD_FIGURES else -math.log(known)
                    yield trial, device, figure, str(name), math.exp(speed - expected)


def _slow(bed: TestBed, arms: Sequence[str], limit: float) -> Iterator[Disturbance]:
    for trial, device, figure, kind, share in _shares_of_kind(bed):
        concerned = _arms_of(bed, trial, device, figure)
        if share < LEAST_SHARE and concerned != ():
            yield Disturbance(
                check=SLOW,
                place=_card_of(bed, trial, device) if figure in CARD_FIGURES else "host",
                trial=trial,
                arms=concerned,
                value=1.0 - share,
                limit=1.0 - LEAST_SHARE,
                text=f"{_doer(device, figure)} {_FIGURE_NAMES[figure]} in trial {trial} at {percent(share)} of the "
                f"speed that {kind} is known for",
            )
