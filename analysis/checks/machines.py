"""Whether the run had its machines to itself: no other work on them, and nothing that held devices back.

What disturbs one arm's device leaves that arm's gates open; on the control's device it leaves all open, as does what
disturbs a host. A difference that falls on an arm and the control alike, since they swapped devices, opens nothing and
is still reported.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import fmean

from analysis.checks.check import ESTIMATES, MACHINES, Check, Disturbance, Evidence, Rule
from analysis.records.schemas import RUN_HOST
from analysis.run.machine_records import POWER_CAP, THROTTLES, DeviceTraffic, MachineRecords
from analysis.wording import counted, digits, percent, sentence

# By how much more than its machine's speed an arm's latency can change, in logarithms. What waits in a queue at half
# its load waits longer by 2 + ρ / (1 - ρ) = 3 times as much (M/M/1, Kleinrock 1975, section 3.2); what does not wait
# takes as much longer as the machine does.
LEVER = 3.0
MOST_SHARE = 0.01  # of a trial's traffic, in which a card may be held back or used by others, or tasks wait for memory
_MUCH_BYTES = 2 << 30  # more than a driver keeps of an idle card, or a desktop takes
_BALANCED = ", which swapping devices balances"


def lost(apart: float) -> float:
    """The share by which the slower of two speeds falls short of the other, from the logarithm of their ratio."""
    return -math.expm1(-abs(apart))


def found_by(rule: Rule, seen: Evidence, found: Iterable[Disturbance] | None) -> Iterable[Check]:
    return () if found is None else rows_of_rule(rule, seen.run.arms, found)


def rows_of_rule(rule: Rule, arms: Sequence[str], found: Iterable[Disturbance]) -> Iterator[Check]:
    """One row of all arms, and one for each arm whose gates alone are concerned; one that holds for what is left.

    Of each place and arm the worst trial counts, with the number of other trials in which it was so. What concerns the
    control, the first of `arms`, concerns all: each is compared with it.
    """
    worst = _worst_of_places(found, arms[0])
    opened = False
    for arm in (None, *arms[1:]):
        own = tuple(item for item in worst if (item.arms is None if arm is None else arm in (item.arms or ())))
        if own:
            opened = True
            shifts = [item.shift for item in own]
            known = [shift for shift in shifts if shift is not None]
            yield rule.row(
                False,
                f"{sentence([item.text for item in own])}.",
                arm=arm,
                value=own[0].value,
                limit=own[0].limit,
                shift=LEVER * sum(known) if len(known) == len(shifts) else None,
                among_trials=all(item.among_trials for item in own),
                disturbances=own,
            )
    balanced = tuple(item for item in worst if item.arms == ())
    if balanced or not opened:
        reason = f"{sentence([item.text for item in balanced])}." if balanced else ""
        yield rule.row(True, reason, disturbances=balanced)


def _worst_of_places(found: Iterable[Disturbance], control: str) -> list[Disturbance]:
    def key(item: Disturbance) -> tuple[str, bool]:
        return item.place, item.arms == ()

    worst = []
    for _, group in groupby(sorted(found, key=key), key):
        items = sorted(group, key=lambda item: -item.value)
        trials = {item.trial for item in items} - {items[0].trial}
        named = [item.arms for item in items]
        arms = None if None in named else tuple(dict.fromkeys(arm for row in named for arm in row or ()))
        # An unknown shift stays unknown among known ones; of known ones the largest counts.
        known = [item.shift for item in items if item.shift is not None]
        more = f", and in {counted(len(trials), 'more trial')}" if trials else ""
        worst.append(
            replace(
                items[0],
                shift=max(known) if len(known) == len(items) else None,
                arms=None if control in (arms or ()) else arms,
                among_trials=all(item.among_trials for item in items),
                text=items[0].text + more,
            )
        )
    return sorted(worst, key=lambda item: -item.excess)


def disturbances_of(checks: Iterable[Check]) -> list[tuple[str, Disturbance]]:
    """Return (check, disturbance) of all that these rest on, each once, worst first in each rule."""
    by_rule: dict[Rule, dict[Disturbance, None]] = {}
    for check in checks:
        by_rule.setdefault(check.rule, {}).update(dict.fromkeys(check.disturbances))
    return [
        (rule.name, item) for rule, found in by_rule.items() for item in sorted(found, key=lambda item: -item.excess)
    ]


# --- Other work -------------------------------------------------------------------------------------------------------


def foreign_work(machines: MachineRecords) -> list[Disturbance] | None:
    """Processes of others on an arm's device; None where that is unknown. Where it is hidden whose the processes of the
    traffic were, what was there before the arms started is taken to have stayed."""
    found: list[Disturbance] = []
    known = False
    for device in machines.used:
        before = machines.earlier.get((device.trial, device.card.host, device.card.name))
        names = "; ".join(before.processes) if before else ""
        name, seconds = device.card.name, device.foreign_s
        if seconds is not None:
            count = device.foreign_processes or 1
            held = f" with {device.foreign_bytes / 2**30:.3g} GiB" if device.foreign_bytes else ""
            who = f"{counted(count, 'process')} of others{f' ({names})' if names else ''}{held}"
            text = f"{who} {'was' if count == 1 else 'were'} on {name} {_how_long(device, seconds)}"
        elif before and (names or (before.memory_bytes or 0.0) > _MUCH_BYTES):
            who = f"{names} ran on" if names else f"others held {(before.memory_bytes or 0.0) / 2**30:.3g} GiB of"
            seconds, text = device.seconds, f"{who} {name} before the arms of trial {device.trial} started"
        else:
            continue
        known = True
        found += _for_too_long(device, seconds, text)
    return found if known else None


def _how_long(device: DeviceTraffic, seconds: float) -> str:
    if seconds > 0.99 * device.seconds:
        return f"throughout trial {device.trial}"
    return f"for {digits(seconds)} s of the {digits(device.seconds)} s of trial {device.trial}"


def _for_too_long(device: DeviceTraffic, seconds: float, text: str) -> Iterator[Disturbance]:
    share = seconds / device.seconds if device.seconds > 0 else 0.0
    if share > MOST_SHARE:
        yield Disturbance(
            place=device.card.name,
            trial=device.trial,
            arms=device.arms or None,
            value=share,
            limit=MOST_SHARE,
            text=text,
        )


def host_work(seen: Evidence) -> list[Disturbance] | None:
    """Hosts on which the hypervisor or other work took too much of the processors' time, or tasks waited for memory.
    None where no host reports it.

    Where all arms ran at the same time, such a share of the processors' time can have slowed an arm by that share at
    most. Where arms took turns, all of it may have fallen on one of them.
    """
    hosts, limits = seen.machines.hosts, seen.run.limits
    if all((host.steal, host.foreign, host.pressure_memory) == (None, None, None) for host in hosts):
        return None
    found: list[Disturbance] = []
    for host in hosts:
        name = "the host" if host.host == RUN_HOST else f"the host of {host.host}"
        steal, other = limits.max_steal_pct / 100.0, limits.max_other_cpu_pct / 100.0
        taken = (
            (host.steal, steal, "the hypervisor took {} of the processors' time from {}"),
            (host.foreign, other, "work that is not of the run took {} of the processors of {}"),
            (host.pressure_memory, MOST_SHARE, "tasks waited for memory {} of the time on {}"),
        )
        found += [
            Disturbance(
                place=f"{host.host} {text}",
                trial=host.trial,
                arms=None,
                value=share,
                limit=limit,
                shift=-math.log1p(-share) if is_shared(seen) and share < 1.0 else None,
                text=f"{text.format(percent(share), name)} in trial {host.trial}",
            )
            for share, limit, text in taken
            if share is not None and share > limit
        ]
    return found


def is_shared(seen: Evidence) -> bool:
    """Whether all arms ran at the same time."""
    return seen.run.design != "switchback" and not seen.run.in_turn


FOREIGN: Rule = Rule(
    name="other work",
    find=lambda seen: found_by(FOREIGN, seen, foreign_work(seen.machines)),
    sound="Nothing else ran on the machines that counts.",
    remedy="Stop what else runs on the card (`nvidia-smi` lists it), or use another one.",
    opens=(*ESTIMATES, "memory"),  # others' memory on a card looks like the arm's
    slows=True,
    rank=MACHINES,
)
HOST: Rule = Rule(
    name="other work",
    find=lambda seen: found_by(HOST, seen, host_work(seen)),
    remedy="Stop other work on the host and give the run its own processors and memory, use one that shares no "
    "processor with other virtual machines, or raise gates.max_steal_pct or gates.max_other_cpu_pct.",
    slows=True,
    rank=MACHINES,
)


# --- Throttling -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """How far an arm's device was from the control's in one trial. `apart` is the logarithm of the ratio of their
    speeds, negative where the arm's is slower; None: unknown. `stays` is what of it is there in all trials."""

    trial: int
    place: str  # of the slower one
    apart: float | None
    text: str = ""
    cards: tuple[str, str] = ("", "")  # the arm's and the control's
    stays: float = math.inf
    counts: bool = True  # whether it is a disturbance by itself, where it is too wide


def unequal(arm: str, gaps: Sequence[Gap], limit: float) -> Iterator[Disturbance]:
    """The gaps that are too wide. What counts is the mean of the logarithms over trials: by as much the machines alone
    move the ratio of the arms, and where it is small, swapping devices balanced them."""
    known = [gap.apart for gap in gaps if gap.apart is not None]
    mean = fmean(known) if known else 0.0
    balanced = len(known) == len(gaps) and lost(mean) <= limit
    stays = fmean(gap.stays for gap in gaps) if gaps else 0.0
    for gap in gaps:
        wide = 1.0 if gap.apart is None else lost(gap.apart)
        if gap.counts and wide > limit:
            yield Disturbance(
                place=gap.place,
                trial=gap.trial,
                arms=() if balanced else (arm,),
                value=wide,
                limit=limit,
                shift=None if gap.apart is None else abs(mean),
                among_trials=lost(stays) <= limit,
                text=gap.text + _BALANCED * balanced,
            )


def _pairs(machines: MachineRecords, arm: str, control: str) -> list[tuple[DeviceTraffic, DeviceTraffic]]:
    """The devices of the arm and of the control, in the trials in which they are two."""
    pairs = []
    for trial in machines.trials:
        of = {name: device for device in machines.used if device.trial == trial for name in device.arms}
        own, other = of.get(arm), of.get(control)
        if own is not None and other is not None and own is not other:
            pairs.append((own, other))
    return pairs


def throttling(seen: Evidence) -> list[Disturbance] | None:
    """What held an arm's device back, the power cap only where it bound on one of two; None where no device reports
    it."""
    machines = seen.machines
    found: list[Disturbance] = []
    if not any(device.throttled_s is not None for device in machines.used):
        return None
    for device in machines.used:
        held = {name: took for name, took in (device.throttled_s or {}).items() if name != POWER_CAP}
        why = ", ".join(THROTTLES[name] for name in sorted(held, key=lambda name: -held[name]))
        seconds = device.throttle_s or 0.0
        text = f"{device.card.name} was throttled {_how_long(device, seconds)} ({why})"
        found += _for_too_long(device, seconds, text)
    for arm in seen.run.treatments:
        gaps = _power_caps(_pairs(machines, arm, seen.run.control))
        found += unequal(arm, gaps, seen.run.limits.max_machine_drift)
    return found


def _power_caps(pairs: Sequence[tuple[DeviceTraffic, DeviceTraffic]]) -> list[Gap]:
    """The gaps between clocks where the power cap bound on one of two devices.

    None where it followed the arm from card to card: then the arm's own work draws the power, and any card of the kind
    would hold it so. Where clocks are unknown, a cap that bound is taken for one that mattered.
    """
    gaps, held, sides = [], set(), set()
    for own, other in pairs:
        one, two = _capped(own), _capped(other)
        if one is None or two is None:
            continue
        device, free = (own, other) if one > two else (other, own)
        held.add(device.card.identity)
        sides.add(0 if abs(one - two) <= MOST_SHARE else 1 if one > two else -1)
        slower, faster = device.mean_mhz or 0.0, free.mean_mhz or 0.0
        known = min(slower, faster) > 0
        seconds = (device.throttled_s or {}).get(POWER_CAP, 0.0)
        text = f"{device.card.name} was throttled {_how_long(device, seconds)} ({THROTTLES[POWER_CAP]})"
        text += f", to {slower:,.0f} MHz in the mean where {free.card.name} had {faster:,.0f} MHz" if known else ""
        gaps.append(
            Gap(
                trial=device.trial,
                place=f"{device.card.name} power cap",
                apart=math.log((own.mean_mhz or 1.0) / (other.mean_mhz or 1.0)) if known else None,
                text=text,
                counts=abs(one - two) > MOST_SHARE and (slower < faster or not known),
            )
        )
    follows_the_arm = len(held) > 1 and len(sides) == 1 and 0 not in sides and _one_power_limit(pairs)
    return [] if follows_the_arm else gaps


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


def settings(seen: Evidence) -> list[Disturbance] | None:
    """Power limits and clocks that differ between an arm's device and the control's, of one model; None where no two
    devices were used."""
    run = seen.run
    found: list[Disturbance] = []
    pairs_of = {arm: _pairs(seen.machines, arm, run.control) for arm in run.treatments}
    if not any(pairs_of.values()):
        return None
    for arm, pairs in pairs_of.items():
        alike = [pair for pair in pairs if pair[0].card.model == pair[1].card.model]
        for name, unit, of in (
            ("a power limit", "W", _power_limit),
            ("a highest clock under load", "MHz", lambda device: device.free_mhz),
        ):
            gaps = []
            for own, other in alike:
                a, b = of(own) or 0.0, of(other) or 0.0
                if min(a, b) > 0:
                    low, high = (own, other) if a < b else (other, own)
                    text = f"{low.card.name} had {name} of {min(a, b):,.0f} {unit} in trial {low.trial}, "
                    text += f"{high.card.name} of {max(a, b):,.0f} {unit}"
                    place = f"{low.card.identity} {name}"
                    gaps.append(Gap(trial=low.trial, place=place, apart=math.log(a / b), text=text))
            found += unequal(arm, gaps, run.limits.max_machine_drift)
    return found


THROTTLED: Rule = Rule(
    name="throttling",
    find=lambda seen: found_by(THROTTLED, seen, throttling(seen)),
    sound="Nothing held the arms' devices back, and they had one power limit and one highest clock.",
    remedy="Cool the card or lower and lock its clock below what it cannot hold, and run again.",
    slows=True,
    rank=MACHINES,
)
SETTINGS: Rule = Rule(
    name="throttling",
    find=lambda seen: found_by(SETTINGS, seen, settings(seen)),
    remedy="Give all cards one power limit and one clock (`nvidia-smi -pl`, `-lgc`), or swap them over an even "
    "number of trials (trials.swap_devices).",
    rank=MACHINES,
)
