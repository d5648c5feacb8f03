"""What was not as it should be with a machine, and the checks that follow from it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from analysis.judging.validity import ESTIMATES, Check
from analysis.wording import counted, sentence

# By how much more than its machine's speed an arm's latency can change, in logarithms. What waits in a queue at half
# its load waits longer by 2 + ρ / (1 - ρ) = 3 times as much (M/M/1, Kleinrock 1975, section 3.2); what does not wait
# takes as much longer as the machine does.
LEVER = 3.0

BALANCED = ", which the arms' changing places balances"


@dataclass(frozen=True, slots=True, kw_only=True)
class Aspect:
    """One way in which machines may fail a run: the name of its check, and what is said where it holds and fails."""

    check: str
    sound: str
    remedy: str
    affects: tuple[str, ...] = ESTIMATES
    slows: bool = False  # what it sees can only have made requests slower


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """One thing that was not as it should be, in words, and whose gates it leaves open."""

    aspect: Aspect
    place: str  # the device or host
    trial: int | None
    arms: tuple[str, ...] | None  # None: all; empty: none, because it falls on an arm and the control alike
    value: float
    limit: float
    shift: float | None = None  # by how much it changed a machine's speed, in logarithms; None: unknown
    among_trials: bool = False  # as of the check
    text: str  # a sentence without its full stop


def lost(apart: float) -> float:
    """The share by which the slower of two speeds falls short of the other, from the logarithm of their ratio."""
    return -math.expm1(-abs(apart))


def gathered(found: Iterable[Disturbance], control: str) -> list[Disturbance]:
    """For each place the worst trial, with the number of other trials in which it was so; worst places first.

    What concerns the control concerns all arms: each is compared with it.
    """

    def key(item: Disturbance) -> tuple[str, bool]:
        return item.place, item.arms == ()

    worst = []
    for _, group in groupby(sorted(found, key=key), key):
        items = sorted(group, key=lambda item: -item.value)
        trials = {item.trial for item in items} - {items[0].trial}
        named = [item.arms for item in items]
        arms = None if None in named else tuple(dict.fromkeys(arm for row in named for arm in row or ()))
        # What moved a ratio by nobody knows how much stays so beside what is known, and the largest change counts.
        shifts = [item.shift for item in items]
        known = [shift for shift in shifts if shift is not None]
        shift = max(known) if len(known) == len(shifts) else None
        more = f", and in {counted(len(trials), 'more trial')}" if trials else ""
        scope = None if control in (arms or ()) else arms
        among = all(item.among_trials for item in items)
        worst.append(replace(items[0], shift=shift, arms=scope, among_trials=among, text=items[0].text + more))
    return sorted(worst, key=lambda item: -item.value / item.limit)


def checks_of(aspect: Aspect, found: Sequence[Disturbance], arms: Sequence[str]) -> Iterator[Check]:
    """One check of all arms, or one for each arm whose gates alone are concerned; one that holds where nothing is.

    `arms` begins with the control.
    """
    scopes: list[str | None] = [None, *arms[1:]]
    opened = False
    for arm in scopes:
        own = [item for item in found if (item.arms is None if arm is None else arm in (item.arms or ()))]
        if own:
            opened = True
            yield _check(aspect, False, own, arm)
    if not opened:
        yield _check(aspect, True, found, None)


def _check(aspect: Aspect, ok: bool, own: Sequence[Disturbance], arm: str | None) -> Check:
    reason = f"{sentence([item.text for item in own])}." if own else aspect.sound
    return Check(
        check=aspect.check,
        ok=ok,
        arm=arm,
        value=own[0].value if own else None,
        limit=own[0].limit if own else None,
        reason=reason,
        affects=aspect.affects,
        slows=aspect.slows,
        among_trials=bool(own) and all(item.among_trials for item in own),
        shift=None if not own or any(item.shift is None for item in own) else LEVER * sum(it.shift or 0 for it in own),
        remedy=aspect.remedy,
    )
