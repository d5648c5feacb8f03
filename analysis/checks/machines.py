"""Whether the run had its machines to itself: no other work on them, nothing that held devices back, one speed.

What disturbs one arm's device leaves that arm's gates open; on the control's device it leaves all open, as does what
disturbs a host. A difference that falls on an arm and the control alike, since they swapped devices, opens nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal, NamedTuple

from tailgate.analysis.checks.check import ESTIMATES, MACHINES, Check, Evidence, Rule
from tailgate.analysis.checks.generator import Named
from tailgate.analysis.run.machine_records import (
    CARD_FIGURES,
    FIGURES,
    LEAST_SAMPLED,
    POWER_CAP,
    THROTTLES,
    WORK,
    Device,
    MachineRecords,
    Speed,
)
from tailgate.analysis.wording import counted, digits, percent, sentence

# By how much more than its machine's speed an arm's latency can change, in logarithms. What waits in a queue at half
# its load waits longer by 2 + ρ / (1 - ρ) = 3 times as much (M/M/1, Kleinrock 1975, section 3.2); what does not wait
# takes as much longer as the machine does.
LEVER = 3.0
_OF_GPUS = (
    "Lock the clocks of GPUs, and use GPUs of one speed or swap them over an even number of trials "
    "(trials.swap_devices). "
)
_MOST_SHARE = 0.01  # of a trial's traffic, in which a card may be held back or used by others, or tasks wait for memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """One fault of a machine, and whose gates it leaves open."""

    place: str  # of several faults of one place the worst counts, those of several places add up
    trial: int
    arms: tuple[str, ...] | None  # None: all
    excess: float  # how many times its limit
    shift: float | None = None  # by how much it changed a machine's speed, in logarithms; None: unknown
    among_trials: bool = False  # as of the check
    remedy: str = ""  # empty: the rule's
    text: str  # a sentence without its full stop


def rows_of_rule(rule: Rule, seen: Evidence, found: Iterable[Disturbance]) -> Iterator[Check]:
    """Yield one row for all arms, and one for each arm whose gates alone are concerned."""
    arms = seen.run.arms
    on_cpu = all(item.device == "cpu" for item in seen.machines.speeds)
    worst = sorted(found, key=lambda item: -item.excess)
    of_all = {item.place for item in worst if item.arms is None or arms[0] in item.arms}
    for arm in (None, *arms[1:]):
        places: dict[str, list[Disturbance]] = {}
        for item in worst:
            if (arm is None) == (item.place in of_all) and (arm is None or arm in (item.arms or ())):
                places.setdefault(item.place, []).append(item)
        own = [item for items in places.values() for item in items]
        if not own:
            continue
        texts = []
        for first, *others in places.values():
            more = [*{item.trial for item in others} - {first.trial}]
            also = seen.run.trial_name(more[0]) if len(more) == 1 else counted(len(more), "more trial")
            texts.append(first.text + (f" (also in {also})" if more else ""))
        shifts = [[item.shift for item in items if item.shift is not None] for items in places.values()]
        unknown = any(item.shift is None for item in own)
        yield rule.found(
            [sentence(texts)],
            arm=arm,
            shift=None if unknown else LEVER * sum(map(max, shifts)),
            among_trials=all(item.among_trials for item in own),
            remedy=" ".join(dict.fromkeys(item.remedy for item in own if item.remedy))
            or rule.remedy.replace(_OF_GPUS, "" if on_cpu else _OF_GPUS),
        )


def machine_rule(name: str, **facts: Any) -> Callable[[Callable[[Evidence], Iterable[Disturbance]]], Rule]:
    """Make a rule with these fields of a function that finds disturbances."""

    def made(find: Callable[[Evidence], Iterable[Disturbance]]) -> Rule:
        rule = Rule(
            name=name,
            find=lambda seen: rows_of_rule(rule, seen, find(seen)),
            rank=MACHINES,
            **facts,
        )
        return rule

    return made


@machine_rule(
    "other work",
    sees=f"Other processes were on an arm's device for over {percent(_MOST_SHARE)} of a trial. On the control's "
    "device it opens the gates of every arm.",
    remedy="Stop what else runs on the card (`nvidia-smi` lists it), or use another one.",
    opens=(*ESTIMATES, "memory"),  # others' memory on a card looks like the arm's
    slows=True,
)
def foreign(seen: Evidence) -> Iterator[Disturbance]:
    """Where other processes are hidden during the traffic, those seen before it count throughout."""
    for device in seen.machines.used:
        if device.foreign_s is not None:
            held = f" with {device.foreign_bytes / 2**30:.3g} GiB" if device.foreign_bytes else ""
            text = f"{device.name} had {counted(device.foreign_processes, 'process')} of others{held}"
            yield from _for_too_long(seen, device, device.foreign_s, text)
        elif device.held_before:
            text = f"{device.name} was held by others before the arms started, and perhaps"
            yield from _for_too_long(seen, device, device.seconds, text)


def _for_too_long(seen: Evidence, device: Device, seconds: float, text: str) -> Iterator[Disturbance]:
    share, named = seconds / device.seconds if device.seconds > 0 else 0.0, seen.run.trial_name
    if share > _MOST_SHARE:
        yield Disturbance(
            place=device.name,
            trial=device.trial,
            arms=device.arms or None,
            excess=share / _MOST_SHARE,
            text=f"{text} for {digits(seconds)} s of the {digits(device.seconds)} s of {named(device.trial)}",
        )


_HOST = {  # what disturbs a host, and what helps
    "the hypervisor took {} of the processors' time from the host": "Use a host that shares no processor with other "
    "virtual machines, or raise gates.max_steal_pct.",
    "other processes took {} of the host's processors": "Stop other work on the host (`tailgate doctor` measures it), "
    "or raise gates.max_other_cpu_pct.",
    "tasks waited for memory {} of the time on the host": "Free memory of the host (stop what holds, reads or writes "
    "much), or use one with more.",
}


@machine_rule(
    "other work",
    sees="The hypervisor took over `gates.max_steal_pct` of a host, other work over `gates.max_other_cpu_pct`, or "
    f"tasks waited for memory for over {percent(_MOST_SHARE)} of the time.",
    remedy=" ".join(_HOST.values()),
    slows=True,
)
def host(seen: Evidence) -> Iterator[Disturbance]:
    """If all arms ran at the same time, a share of CPU time can have slowed an arm by at most that share. If arms took
    turns, all of it may have fallen on one of them."""
    most = seen.run.limits.max_steal_pct / 100.0, seen.run.limits.max_other_cpu_pct / 100.0, _MOST_SHARE
    for host in seen.machines.hosts:
        shares = host.steal, host.foreign, host.pressure_memory
        for share, limit, (text, remedy) in zip(shares, most, _HOST.items(), strict=True):
            if share is not None and share > limit:
                yield Disturbance(
                    place=text,
                    trial=host.trial,
                    arms=None,
                    excess=share / limit if limit else math.inf,
                    shift=-math.log1p(-share) if _is_shared(seen) and share < 1.0 else None,
                    text=f"{text.format(percent(share))} in {seen.run.trial_name(host.trial)} (limit {percent(limit)})",
                    remedy=remedy,
                )


def _is_shared(seen: Evidence) -> bool:
    return seen.run.design != "switchback" and not seen.run.in_turn


class Reading(NamedTuple):
    """A figure of a device, or of its host, in one trial, as a logarithm."""

    value: float
    where: str
    card: str


Gaps = Mapping[int, tuple[Reading, Reading]]  # of the arm's and of the control's device, by trial


def unequal(
    seen: Evidence, arm: str, what: str, gaps: Gaps, *, part: str, momentary: bool = False
) -> Iterator[Disturbance]:
    """Yield gaps that are too wide, unless swapping devices balanced them: the machines move the ratio of the arms by
    the mean logarithm over trials alone. `part` names what of a card the gaps concern; empty means its speed."""
    limit = seen.run.limits.max_machine_drift
    mean = fmean(own.value - other.value for own, other in gaps.values()) if gaps else 0.0
    for trial, (low, high) in ((trial, sorted(pair)) for trial, pair in gaps.items()):
        share = _lost(high.value - low.value)
        if _lost(mean) > limit and share > limit:
            yield Disturbance(
                place=f"{low.card} {part}".strip(),
                trial=trial,
                arms=(arm,),
                excess=share / limit,
                shift=abs(mean),
                among_trials=momentary,
                text=f"{what} was {percent(share)} lower on {low.where} than on {high.where} in "
                f"{seen.run.trial_name(trial)}",
            )


def _lost(log_ratio: float) -> float:
    """Return the share by which the slower of two speeds falls short, from the logarithm of their ratio."""
    return -math.expm1(-abs(log_ratio))


@machine_rule(
    "throttling",
    sees=f"Heat, a power brake or sync boost held an arm's device back for over {percent(_MOST_SHARE)} of a trial. On "
    "the control's device it opens the gates of every arm.",
    remedy="Cool the card or lower and lock its clock below what it cannot hold, and run again.",
    slows=True,
)
def throttled(seen: Evidence) -> Iterator[Disturbance]:
    """The power cap counts only if clocks are unknown: clocks show its effect."""
    for device in seen.machines.used:
        held = dict(device.throttled_s or {})
        seconds = device.throttle_s or 0.0
        if device.mean_mhz is None:
            seconds = max(seconds, held.get(POWER_CAP, 0.0))
        else:
            held.pop(POWER_CAP, None)
        why = ", ".join(THROTTLES[name] for name in sorted(held, key=lambda name: -held[name]))
        yield from _for_too_long(seen, device, seconds, f"{device.name} was throttled ({why})")


@machine_rule(
    "throttling",
    sees="The power limit or clock of the arm's device differs from the control's by more than "
    "`gates.max_machine_drift`.",
    remedy="Give all cards one power limit and one clock that they hold (`nvidia-smi -pl`, `-lgc`), or swap them over "
    "an even number of trials (trials.swap_devices).",
)
def settings(seen: Evidence) -> Iterator[Disturbance]:
    for arm in seen.run.treatments:
        pairs = seen.machines.pairs(arm, seen.run.control)
        for what, gaps in (
            ("the power limit", _gaps(pairs, "power_limit_w")),
            ("the highest clock under load", _gaps(pairs, "free_mhz")),
            ("the mean clock under the power cap", _capped_clocks(pairs)),
        ):
            yield from unequal(seen, arm, what, gaps, part=what)


Pairs = Mapping[int, tuple[Device, Device]]


def _gaps(pairs: Pairs, figure: str) -> Gaps:
    gaps = {}
    for trial, pair in pairs.items():
        if all((getattr(device, figure) or 0.0) > 0.0 for device in pair):
            own, other = (Reading(math.log(getattr(device, figure)), device.name, device.card) for device in pair)
            gaps[trial] = own, other
    return gaps


def _capped_clocks(pairs: Pairs) -> Gaps:
    """Return the gaps between mean clocks, 0 if both devices were at the power cap for equally long.

    Empty if the cap followed the arm from card to card at one power limit: then the arm's own work draws the power.
    """
    gaps = {}
    held = []  # (whether it was the arm's device, its card) of each trial in which it bound on one for longer
    for trial, (own, other) in _gaps(pairs, "mean_mhz").items():
        one, two = (
            (device.throttled_s or {}).get(POWER_CAP, 0.0) / max(device.seconds, 1.0) for device in pairs[trial]
        )
        gaps[trial] = (own, own) if abs(one - two) <= _MOST_SHARE else (own, other)
        if abs(one - two) > _MOST_SHARE:
            held.append((one > two, own.card if one > two else other.card))
    watts = [device.power_limit_w for pair in pairs.values() for device in pair if device.power_limit_w]
    one_limit = max(watts, default=0.0) <= 1.01 * min(watts, default=0.0)
    sides, cards = {side for side, _ in held}, {card for _, card in held}
    follows_the_arm = len(held) == len(gaps) and len(sides) == 1 and len(cards) > 1 and one_limit
    return {} if follows_the_arm else gaps


@machine_rule(
    "machine speed",
    sees="By the reference, a device or host changed by more than `gates.max_machine_drift` around or between "
    "trials, or differs between the arms. From six trials on a ratio may still be decided.",
    remedy=f"Run again once `tailgate doctor` finds the machine steady, with nothing else on the host. {_OF_GPUS}Six "
    "or more trials on several days can decide a ratio on unsteady machines too.",
)
def speed(seen: Evidence) -> Iterator[Disturbance]:
    yield from _changes(seen)
    yield from _differences(seen)


def _changes(seen: Evidence) -> Iterator[Disturbance]:
    """Compare the reference after each trial with before it, and each trial's with the fastest of the same device.

    Arms that ran at the same time saw every speed in between: their mean is off by half of the change.
    """
    half, named = 0.5 if _is_shared(seen) else 1.0, seen.run.trial_name
    groups: dict[tuple[str, str, str], list[Speed]] = {}
    for item in seen.machines.speeds:
        if _concerned(seen.machines, item) != ():  # else no arm was on it
            groups.setdefault((item.figure, item.size, item.card), []).append(item)
    for own in groups.values():
        fastest = max(own, key=lambda item: item.mean)
        changes = [
            (item, fastest, fastest.mean - item.mean, 1.0, f"in {named(item.trial)} than in {named(fastest.trial)}")
            for item in own
            if item.trial != fastest.trial
        ]
        for item in own:
            if len(item.logs) == 2:
                change = item.logs[1] - item.logs[0]
                when, than = ("after", "before") if change < 0 else ("before", "after")
                changes.append((item, item, abs(change), half, f"{when} {named(item.trial)} than {than} it"))
        for item, other, change, part, text in changes:
            lost, both = _lost(change), [_concerned(seen.machines, one) for one in (item, other)]
            if lost > seen.run.limits.max_machine_drift:
                yield Disturbance(
                    place=item.card if item.figure in CARD_FIGURES else "host",
                    trial=item.trial,
                    arms=None if None in both else tuple(dict.fromkeys(arm for arms in both for arm in arms or ())),
                    excess=lost / seen.run.limits.max_machine_drift,
                    shift=part * change,
                    among_trials=True,
                    text=f"{WORK[item.figure]} was {percent(lost)} lower on {_where(item)} {text}",
                )


def _concerned(machines: MachineRecords, item: Speed) -> tuple[str, ...] | None:
    """Return the arms whose gates a figure concerns: those on the device; None (all) for a figure of the shared
    host."""
    if item.figure not in CARD_FIGURES or not machines.placed.get(item.trial):
        return None
    return machines.arms_on(item.trial, item.device)


def _where(item: Speed) -> str:
    if item.figure in CARD_FIGURES:
        return "the processor" if item.device == "cpu" else item.device
    return "the host" if item.device == "cpu" else f"the host of {item.device}"


def _differences(seen: Evidence) -> Iterator[Disturbance]:
    """Yield an arm's devices and hosts that are slower or faster than the control's at equal work.

    The part of a gap that stays with a device is in all trials, unless swapping devices balances it; the rest is
    momentary and part of the variance between trials.
    """
    machines, limit = seen.machines, seen.run.limits.max_machine_drift
    for figure, size in dict.fromkeys((item.figure, item.size) for item in machines.speeds):
        own = [item for item in machines.speeds if (item.figure, item.size) == (figure, size)]
        at = {(item.trial, item.device): Reading(item.mean, _where(item), item.card) for item in own}
        lasting = {card: fmean(item.mean for item in own if item.card == card) for card in {item.card for item in own}}
        for arm in seen.run.treatments:
            gaps = {}
            for trial, placed in machines.placed.items():
                pair = [at.get((trial, placed.get(name, ""))) for name in (arm, seen.run.control)]
                if pair[0] is not None and pair[1] is not None:
                    gaps[trial] = pair[0], pair[1]
            stays = fmean(lasting[one.card] - lasting[two.card] for one, two in gaps.values()) if gaps else 0.0
            part = "" if figure in CARD_FIGURES else "host"
            yield from unequal(seen, arm, WORK[figure], gaps, part=part, momentary=_lost(stays) <= limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineVerdict:
    """The verdict on the machines, and a sentence that begins with it and names what the records leave open."""

    verdict: Literal["quiet", "disturbed", "partly monitored", "not monitored"]
    line: str


def machine_verdict(machines: MachineRecords, checks: Sequence[Check], named: Named) -> MachineVerdict:
    """Return the verdict: disturbed where a check of the machines failed, quiet only where nothing is unknown."""
    if not machines.monitored:
        line = "Not monitored: no monitor recorded the machines of this run."
        return MachineVerdict(verdict="not monitored", line=line)
    if disturbed := [row.reason for row in checks if row.rule.rank == MACHINES and not row.ok]:
        return MachineVerdict(verdict="disturbed", line=f"Disturbed: {' '.join(disturbed)}")
    if unknown := "; ".join(_unknown(machines, named)):
        line = f"Partly monitored: no disturbance was recorded; unknown: {unknown}."
        return MachineVerdict(verdict="partly monitored", line=line)
    return MachineVerdict(verdict="quiet", line="Quiet: no disturbance was recorded.")


def _unknown(machines: MachineRecords, named: Named) -> Iterator[str]:
    """Yield what the records leave open: machines are quiet only if all of this is known."""
    sampled = {host.trial for host in machines.hosts if host.known}
    if short := [trial for trial in machines.placed if trial not in sampled]:
        where = ", ".join(map(named, short))
        yield f"what happened in at least {percent(1.0 - LEAST_SAMPLED)} of {where}, which was not sampled"
    if any(host.steal is None or host.foreign is None for host in machines.hosts):
        yield "CPU steal, or other work on the host"
    known = {(device.trial, device.name) for device in machines.used if device.known}
    cards = {(trial, name) for trial, row in machines.placed.items() for name in row.values() if name != "cpu"}
    cards |= {(device.trial, device.name) for device in machines.used}
    if lacking := {name for trial, name in cards - known if trial in {host.trial for host in machines.hosts}}:
        yield f"other processes, clocks and throttling of {', '.join(sorted(lacking))}"
    twice = {(item.trial, item.device, item.figure) for item in machines.speeds if len(item.logs) == 2}
    placed = {(trial, device) for trial, row in machines.placed.items() for device in row.values()}
    placed |= {(item.trial, item.device) for item in machines.speeds}
    short = sorted({place[0] for place in placed if any((*place, figure) not in twice for figure in FIGURES)})
    why = f" ({'; '.join(machines.errors)})" if machines.errors else ""
    if not twice:
        yield f"the speed of the machines, since no reference was measured{why}"
    elif short:
        yield f"changes of speed, since a reference is missing in {', '.join(map(named, short))}{why}"
