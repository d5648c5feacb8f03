"""Whether compile events explain the stalls of an arm: those that its server reports, and those that clients see.

Telemetry counts what compilers do. A pause of the allocator, a first load of a kernel or a compiler that is not watched
delay users as long, and one in half an hour moves no p99. So such stalls leave the gates open that they would fail if
they were compiles.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from analysis.arrays import Ints
from analysis.judging.client_gates import may_compile, stall_values
from analysis.judging.gates import COMPILE_GATES
from analysis.judging.run_gates import cold_ends, part_minutes
from analysis.judging.validity import UNKNOWN_STALLS, Check
from analysis.run.client_stalls import UNKNOWN, ArmStalls, Stall, compile_windows, is_explained
from analysis.run.run import Run
from analysis.wording import counted, digits

_SLACK_NS = 50_000_000  # by which clocks may differ, and what a request's own account may exceed the events'
_SLACK_SHARE = 0.1
_LONGEST = "longest stall"
_SEVERAL = 2  # one short stall may be an accident: it opens no gate by the requests that it met
_MOST_PLACES = 4
_UNKNOWN_REMEDY = (
    "See what the arm and its host did then: logs, the allocator, first loads of kernels. If users may wait that long, "
    "raise gates.max_stall_s."
)


def unexplained_stalls(run: Run, arm: str, seen: ArmStalls, *, vouched: bool) -> list[str]:
    """Return what no compile event explains of the compiles that delayed requests by the server's account, in words.

    Where the number of events is not vouched for, a stall of unknown cause may be a compile that no event reports.
    """
    requests = _unexplained_requests(run, arm)
    suspected = [] if vouched else [stall for stall in seen.of_cause(UNKNOWN) if may_compile(stall)]
    stalls = [stall for stall in suspected if not is_explained(stall, run.events)]
    faults = []
    if requests.size:
        longest = float(run.requests.stall_ns[requests].max()) / 1e9
        faults.append(
            f"{counted(requests.size, 'request')} {'was' if requests.size == 1 else 'were'} delayed by a compile by "
            f"its server's account (for {digits(longest)} s at most) while no compile event reports one"
        )
    if stalls:
        longest = max(stall.seconds for stall in stalls)
        faults.append(
            f"clients saw {counted(len(stalls), 'stall')} ({digits(longest)} s at most) and "
            f"{'it is' if len(stalls) == 1 else 'they are'} in no compile event, although events may be missing"
        )
    return faults


def check_unknown(run: Run, seen: ArmStalls) -> Check:
    """The stalls of the arm alone that no event explains stay within what compiles may cost users.

    What every server with work in flight bore is the host's, and what its prompts take is work: neither is of unknown
    cause.
    """
    limits, ends = run.limits, cold_ends(run)
    unexplained = [stall for stall in seen.of_cause(UNKNOWN) if not is_explained(stall, run.events)]
    served = run.of_arm(seen.arm) & ~run.requests.broken
    parts = [("", limits)] if limits.cold is None else [("steady", limits), ("cold", limits.cold)]
    stalls: list[Stall] = []
    gates: list[str] = []
    for part, budget in parts:
        own = [
            stall
            for stall in unexplained
            if not part or (stall.start_ns < ends.get(stall.trial, 0)) is (part == "cold")
        ]
        requests = served if not part else served & (run.cold if part == "cold" else ~run.cold)
        values = stall_values(own, requests=int(requests.sum()), minutes=part_minutes(run, seen.arm, part))
        # Their number is known: the server counts its compiles.
        opened = [
            f"cold {name}" if part == "cold" else name
            for (name, _, key), value in zip(COMPILE_GATES[1:], values[1:], strict=True)
            if value > getattr(budget, key) and (name == _LONGEST or len(own) >= _SEVERAL)
        ]
        gates += opened
        stalls += own if opened else []
    return Check(
        check=UNKNOWN_STALLS,
        ok=not stalls,
        value=max((stall.seconds for stall in stalls), default=0.0),
        limit=limits.max_stall_s,
        arm=seen.arm,
        reason=_stalled(run, seen.arm, stalls)
        if stalls
        else f"But for compiles, {seen.arm} did not stall by itself for longer than compiles may.",
        affects=("recompile",),
        gates=tuple(gates),
        remedy=_UNKNOWN_REMEDY if stalls else "",
    )


def _stalled(run: Run, arm: str, stalls: Sequence[Stall]) -> str:
    """When and for how long the arm stalled, and how many requests waited."""
    began_ns = {trial.number: trial.first_ns for trial in run.trials}
    places = [f"{(stall.start_ns - began_ns[stall.trial]) / 1e9:.0f} s into trial {stall.trial}" for stall in stalls]
    if len(places) > _MOST_PLACES:
        places = [*places[: _MOST_PLACES - 1], f"{len(places) - _MOST_PLACES + 1} more"]
    longest = max(stall.seconds for stall in stalls)
    waited = np.unique(np.concatenate([stall.requests for stall in stalls])).size
    return (
        f"{arm} stalled {counted(len(stalls), 'time')} ({', '.join(places)}), up to {digits(longest)} s, while "
        f"{counted(waited, 'request')} waited, and no compile event explains it."
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
