"""Whether machines were left to the run while the traffic ran: nobody else on them, and nothing held back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from analysis.judging.checks.disturbances import BALANCED, Aspect, Disturbance, lost
from analysis.judging.validity import ESTIMATES
from analysis.records.schemas import RUN_HOST
from analysis.run.test_bed import POWER_CAP, THROTTLES, DeviceTraffic, HostTraffic, TestBed
from analysis.settings.gate_limits import GateLimits
from analysis.wording import counted, digits, percent

MOST_SHARE = 0.01  # of a trial's traffic, in which a card may be held back or somebody else's
MOST_MEMORY_PRESSURE = 0.01
_MUCH_BYTES = 2 << 30  # more than a driver keeps of an idle card, or a desktop takes

FOREIGN = Aspect(
    check="foreign work",
    sound="Nobody else was on the arms' devices.",
    remedy="Stop what else runs on the card (`nvidia-smi` lists it), or use another one.",
    affects=(*ESTIMATES, "memory"),  # others' memory on a card cannot be told from the arm's
    slows=True,
)
THROTTLING = Aspect(
    check="throttling",
    sound="Nothing held the arms' devices back.",
    remedy="Cool the card or lower and lock its clock below what it cannot hold, and run again.",
    slows=True,
)
SETTINGS = Aspect(
    check="device settings",
    sound="The arms' devices had one power limit and one highest clock.",
    remedy="Give all cards one power limit and one clock (`nvidia-smi -pl`, `-lgc`), or swap them over an even "
    "number of trials.",
)
HOST = Aspect(
    check="host",
    sound="The hosts had their processors to themselves and did nothing else that counts.",
    remedy="Stop other work on the host and give the run its own processors and memory, use one that shares no "
    "processor with other virtual machines, or raise gates.max_steal_pct or gates.max_other_cpu_pct.",
    slows=True,
)


def foreign_work(bed: TestBed) -> list[Disturbance] | None:
    """Processes of others on an arm's device; None where nobody can tell."""
    if not any(device.foreign_s is not None or _held_before(bed, device) for device in _used(bed)):
        return None
    found: list[Disturbance] = []
    for device in _used(bed):
        before, count = _named_before(bed, device), device.foreign_processes or 1
        if device.foreign_s is not None:
            seconds = device.foreign_s
            named = f" ({before})" if before else ""
            held = f" with {device.foreign_bytes / 2**30:.3g} GiB" if device.foreign_bytes else ""
            were = "was" if count == 1 else "were"
            whose = f"{counted(count, 'process')} of others{named}{held}"
            text = f"{whose} {were} on {device.name} {_how_long(device, seconds)}"
        else:
            # Whose the processes of the traffic were is hidden, but not that somebody was there first.
            held = _held_before(bed, device)
            seconds = device.seconds if held else 0.0
            text = f"{held} {device.name} before the arms of trial {device.trial} started"
        found += _over_limit(FOREIGN, device, seconds, text)
    return found


def throttling(bed: TestBed, arms: Sequence[str], limit: float) -> list[Disturbance] | None:
    """What held an arm's device back, the power cap only where it bound on one of two; None where no device says."""
    if not any(device.throttled_s is not None for device in _used(bed)):
        return None
    found: list[Disturbance] = []
    for device in _used(bed):
        held = {name: took for name, took in (device.throttled_s or {}).items() if name != POWER_CAP}
        why = ", ".join(THROTTLES[name] for name in sorted(held, key=lambda name: -held[name]))
        seconds = device.throttle_s or 0.0
        text = f"{device.name} was throttled {_how_long(device, seconds)} ({why})"
        found += _over_limit(THROTTLING, device, seconds, text)
    return found + [item for arm in arms[1:] for item in _power_cap(bed, arm, arms[0], limit)]


def _power_cap(bed: TestBed, arm: str, control: str, limit: float) -> Iterator[Disturbance]:
    """The power cap where it bound on one of two devices and made it slower than the other by more than `limit`.

    Not where it followed the arm from card to card: then the arm's own work draws the power, and any card of the kind
    would hold it so. Where clocks are unknown, a cap that bound is taken for one that mattered.
    """
    pairs = [(own, other) for own, other in _pairs(bed, arm, control) if None not in (_capped(own), _capped(other))]
    more = [(_capped(own) or 0.0) - (_capped(other) or 0.0) for own, other in pairs]
    held = [(own, other) if share > 0 else (other, own) for (own, other), share in zip(pairs, more, strict=True)]
    on_one_arm = all(share > MOST_SHARE for share in more) or all(share < -MOST_SHARE for share in more)
    if on_one_arm and len({device.card.identity for device, _ in held}) > 1 and _one_power_limit(pairs):
        return
    clocks = [(own.mean_mhz or 0.0, other.mean_mhz or 0.0) for own, other in pairs]
    apart = [math.log(own / other) for own, other in clocks if own > 0 and other > 0]
    balanced = len(apart) == len(pairs) and lost(sum(apart) / max(1, len(apart))) <= limit
    for (device, free), share in zip(held, more, strict=True):
        slower, faster = device.mean_mhz or 0.0, free.mean_mhz or 0.0
        known = min(slower, faster) > 0
        if abs(share) <= MOST_SHARE or (known and slower > (1.0 - limit) * faster):
            continue
        text = f"{device.name} was throttled {_how_long(device, (device.throttled_s or {}).get(POWER_CAP, 0.0))} "
        text += f"({THROTTLES[POWER_CAP]})"
        text += f", to {slower:,.0f} MHz in the mean where {free.name} had {faster:,.0f} MHz" if known else ""
        for item in _over_limit(THROTTLING, device, abs(share) * device.seconds, text):
            shift = math.log(faster / slower) if known else None
            yield replace(
                item,
                place=f"{item.place} power cap",
                shift=shift,
                arms=() if balanced else (arm,),
                text=text + (BALANCED if balanced else ""),
            )


def settings(bed: TestBed, arms: Sequence[str], limit: float) -> list[Disturbance] | None:
    """Power limits and clocks that differ between an arm's device and the control's, of one model; None where no two
    devices were used."""
    if not any(_pairs(bed, arm, arms[0]) for arm in arms[1:]):
        return None
    found = []
    for arm in arms[1:]:
        pairs = [pair for pair in _pairs(bed, arm, arms[0]) if pair[0].card.model == pair[1].card.model]
        for name, unit, of in (
            ("a power limit", "W", _power_limit),
            ("a highest clock under load", "MHz", lambda device: device.free_mhz),
        ):
            values = [(own, other, of(own) or 0.0, of(other) or 0.0) for own, other in pairs]
            known = [row for row in values if row[2] > 0 and row[3] > 0]
            apart = [math.log(a / b) for _, _, a, b in known]
            mean = sum(apart) / max(1, len(apart))
            balanced = bool(apart) and lost(mean) <= limit
            for (own, other, a, b), each in zip(known, apart, strict=True):
                low, high = (own, other) if each < 0 else (other, own)
                if lost(each) > limit:
                    text = (
                        f"{low.name} had {name} of {min(a, b):,.0f} {unit} in trial {low.trial}, {high.name} of "
                        f"{max(a, b):,.0f} {unit}"
                    )
                    found.append(
                        Disturbance(
                            aspect=SETTINGS,
                            place=f"{low.card.identity} {name}",
                            trial=low.trial,
                            arms=() if balanced else (arm,),
                            value=lost(each),
                            limit=limit,
                            shift=abs(mean),
                            text=text + (BALANCED if balanced else ""),
                        )
                    )
    return found


def host_work(bed: TestBed, limits: GateLimits, *, shared: bool) -> list[Disturbance] | None:
    """Hosts on which the hypervisor or work that is not of the run took too much of the processors' time, or tasks
    waited for memory. None where no host says.

    `shared`: all arms ran at the same time, so such a share of the processors' time can have slowed an arm by that
    share at most. Where arms took turns, all of it may have fallen on one of them. The load that an experiment puts on
    its machines itself ([pressure]) is no disturbance.
    """
    if all((host.steal, host.foreign, host.pressure_memory) == (None, None, None) for host in bed.hosts):
        return None
    most_stolen, most_other = limits.max_steal_pct / 100.0, limits.max_other_cpu_pct / 100.0
    found: list[Disturbance] = []
    for host in bed.hosts:
        taken = [(host.steal, most_stolen, "the hypervisor took {share} of the processors' time from {host}")]
        if host.trial not in bed.pressed:
            taken += [
                (host.foreign, most_other, "work that is not of the run took {share} of the processors of {host}"),
                (host.pressure_memory, MOST_MEMORY_PRESSURE, "tasks waited for memory {share} of the time on {host}"),
            ]
        for share, limit, what in taken:
            found += _of_host(HOST, host, share, limit, what, shared=shared)
    return found


# --- Devices and hosts ------------------------------------------------------------------------------------------------


def _used(bed: TestBed) -> list[DeviceTraffic]:
    """The devices that served an arm; those of trials that do not say who was where, all."""
    own = (device for device in bed.devices if device.card.host == RUN_HOST)
    return [device for device in own if device.arms or not bed.placed.get(device.trial)]


def _named_before(bed: TestBed, device: DeviceTraffic) -> str:
    """The processes that were seen on the device before the arms started."""
    before = bed.earlier.get((device.trial, device.card.host, device.name))
    return "; ".join(before.processes) if before else ""


def _held_before(bed: TestBed, device: DeviceTraffic) -> str:
    """What shows that the device was somebody else's before the arms started; empty where nothing does."""
    before = bed.earlier.get((device.trial, device.card.host, device.name))
    if named := _named_before(bed, device):
        return f"{named} ran on"
    held = before.memory_bytes if before else None
    return f"somebody held {held / 2**30:.3g} GiB of" if held is not None and held > _MUCH_BYTES else ""


def _how_long(device: DeviceTraffic, seconds: float) -> str:
    if seconds > 0.99 * device.seconds:
        return f"throughout trial {device.trial}"
    return f"for {digits(seconds)} s of the {digits(device.seconds)} s of trial {device.trial}"


def _over_limit(aspect: Aspect, device: DeviceTraffic, seconds: float, text: str) -> Iterator[Disturbance]:
    """The disturbance of a device that lasted so long, if that is too long."""
    share = seconds / device.seconds if device.seconds > 0 else 0.0
    if share > MOST_SHARE:
        yield Disturbance(
            aspect=aspect,
            place=device.name,
            trial=device.trial,
            arms=device.arms or None,
            value=share,
            limit=MOST_SHARE,
            text=text,
        )


def _of_host(
    aspect: Aspect, host: HostTraffic, share: float | None, limit: float, what: str, *, shared: bool
) -> Iterator[Disturbance]:
    """Yield the disturbance of a host by this share of its time, if that is too much."""
    if share is not None and share > limit:
        name = "the host" if host.host == RUN_HOST else f"the host of {host.host}"
        yield Disturbance(
            aspect=aspect,
            place=f"{host.host} {what}",
            trial=host.trial,
            arms=None,
            value=share,
            limit=limit,
            shift=-math.log1p(-share) if shared and share < 1.0 else None,
            text=f"{what.format(share=percent(share), host=name)} in trial {host.trial}",
        )


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
    """The share of its traffic in which the power cap bound."""
    if device.throttled_s is None or device.seconds <= 0:
        return None
    return device.throttled_s.get(POWER_CAP, 0.0) / device.seconds


def _power_limit(device: DeviceTraffic) -> float | None:
    # The lowest that was seen: a limit may change while a trial runs.
    return device.power_limit_w.low if device.power_limit_w else device.card.power_limit_w


def _one_power_limit(pairs: Sequence[tuple[DeviceTraffic, DeviceTraffic]]) -> bool:
    known = [limit for pair in pairs for device in pair if (limit := _power_limit(device)) is not None]
    return not known or max(known) <= 1.01 * min(known)
