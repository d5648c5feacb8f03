"""Whether compile events explain the stalls of an arm: those that look like compiles, and those of unknown cause.

Telemetry counts what compilers do. A pause of the allocator, a first load of a kernel or a compiler that nobody watches
hold up users as long, and one in half an hour moves no p99. So such a stall leaves the gate on the longest one open.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from analysis.arrays import Ints
from analysis.blackbox.agreement import compile_windows, is_explained
from analysis.blackbox.stalls import COMPILE, UNKNOWN, Stall
from analysis.blackbox.view import Outside
from analysis.judging.run_gates import cold_ends
from analysis.judging.validity import UNKNOWN_STALLS, Check
from analysis.run.run import Run
from analysis.wording import counted, digits, sentence

_SLACK_NS = 50_000_000  # by which clocks may differ, and what a request's own account may exceed the events'
_SLACK_SHARE = 0.1
_SHORTEST_COMPILE_S = 0.5  # pauses of garbage collection are shorter; tracing one shape takes 0.7 s or more
_LONGEST = "longest stall"  # the gate that a stall of unknown cause opens
_MOST_PLACES = 4
_REMEDY = "Run again; see the logs of the arm and of the disk."
_UNKNOWN_REMEDY = (
    "See what the arm and its host did then: logs, the allocator, first loads of kernels. If users may wait that long, "
    "raise gates.max_stall_s."
)


def check_explained(run: Run, arm: str, outside: Outside, *, vouched: bool) -> Check:
    """An event explains every compile that held requests up, by the server's account or as seen from outside.

    Where the number of events is not vouched for, a stall of unknown cause may be a compile that no event reports. It
    counts if it began with a first-seen shape and is as long as a compile, although long prompts may take as long.
    """
    requests = _unexplained_requests(run, arm)
    suspected = outside.of_cause(COMPILE) if vouched else outside.of_cause(COMPILE, UNKNOWN)
    stalls = [stall for stall in suspected if may_compile(stall) and not is_explained(stall, run.events)]
    faults = []
    if requests.size:
        longest = float(run.requests.stall_ns[requests].max()) / 1e9
        faults.append(
            f"{counted(requests.size, 'request')} {'was' if requests.size == 1 else 'were'} held up by a compile by "
            f"its server's account (for {digits(longest)} s at most) while no compile event tells of one"
        )
    if stalls:
        longest = max(stall.seconds for stall in stalls)
        faults.append(
            f"{counted(len(stalls), 'stall')} that began with a first-seen shape "
            f"({digits(longest)} s at most) show{'' if len(stalls) > 1 else 's'} from outside and in no compile event"
        )
    return Check(
        check="stalls explained",
        ok=not faults,
        value=float(requests.size + len(stalls)),
        limit=0.0,
        arm=arm,
        reason=f"{sentence(faults)}."
        if faults
        else f"The compile events of {arm} explain every stall that looks like one.",
        affects=("recompile",),
        remedy=_REMEDY,
    )


def may_compile(stall: Stall) -> bool:
    """Return whether the stall looks like a compile, or is as long as one and began with a first-seen shape."""
    return stall.cause == COMPILE or (stall.trigger >= 0 and stall.seconds > _SHORTEST_COMPILE_S)


def check_unknown(run: Run, outside: Outside) -> Check:
    """No stall of the arm alone, as seen from outside, outlasted what a compile may hold up without being in an event.

    What every server with work in flight bore is the host's, and what its prompts may have taken is work: neither is of
    unknown cause.
    """
    limits, cold, ends = run.limits, run.limits.cold, cold_ends(run)
    stalls: list[Stall] = []
    gates: dict[str, None] = {}
    for stall in outside.of_cause(UNKNOWN):
        of_cold = cold is not None and stall.start_ns < ends.get(stall.trial, 0)
        budget = cold if cold is not None and of_cold else limits
        prompts = stall.begun and not stall.beyond_work  # that came about then may have taken as long
        if stall.seconds > budget.max_stall_s and not prompts and not is_explained(stall, run.events):
            stalls.append(stall)
            gates[f"cold {_LONGEST}" if of_cold else _LONGEST] = None
    return Check(
        check=UNKNOWN_STALLS,
        ok=not stalls,
        value=max((stall.seconds for stall in stalls), default=0.0),
        limit=limits.max_stall_s,
        arm=outside.arm,
        reason=_stood_still(run, outside.arm, stalls)
        if stalls
        else f"But for compiles, {outside.arm} did not stand still by itself for more than {limits.max_stall_s:g} s.",
        affects=("recompile",),
        gates=tuple(gates),
        remedy=_UNKNOWN_REMEDY if stalls else "",
    )


def _stood_still(run: Run, arm: str, stalls: Sequence[Stall]) -> str:
    """When and for how long the arm stood still, and how many waited."""
    began_ns = {trial.number: trial.first_ns for trial in run.trials}
    places = [f"{(stall.start_ns - began_ns[stall.trial]) / 1e9:.0f} s into trial {stall.trial}" for stall in stalls]
    if len(places) > _MOST_PLACES:
        places = [*places[: _MOST_PLACES - 1], f"{len(places) - _MOST_PLACES + 1} more"]
    longest = max(stall.seconds for stall in stalls)
    waited = np.unique(np.concatenate([stall.requests for stall in stalls])).size
    return (
        f"{arm} stood still {counted(len(stalls), 'time')} ({', '.join(places)}), up to {digits(longest)} s, while "
        f"{counted(waited, 'request')} waited, and no compile event tells why."
    )


def _unexplained_requests(run: Run, arm: str) -> Ints:
    """The rows of requests whose server reports a longer compile than its events lay over them."""
    requests = run.requests
    held = np.flatnonzero(run.of_arm(arm) & ~requests.broken & (requests.stall_ns > _SLACK_NS))
    by_events = np.zeros(held.size)
    for trial in np.unique(requests.trial[held]).tolist():
        for replica in np.unique(requests.replica[held]).tolist():
            own = (requests.trial[held] == trial) & (requests.replica[held] == replica)
            name = requests.replicas[replica] if replica >= 0 else None
            windows = compile_windows(run.events, arm, trial, name)
            by_events[own] = windows.overlap_ns(requests.start_ns[held[own]], requests.end_ns[held[own]])
    reported = requests.stall_ns[held]
    return np.asarray(held[reported - by_events > np.maximum(_SLACK_NS, _SLACK_SHARE * reported)])
