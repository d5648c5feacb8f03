"""Stalls of servers as their clients see them, what explains each, and whether compile events do."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from analysis.arrays import Floats, Ints
from analysis.records.requests import Requests
from analysis.run.compile_events import BACKGROUND, CompileEvent, Windows, windows_of
from analysis.run.partial_stalls import partial_stalls
from analysis.run.prompt_work import PromptWork, copy_took_as_long, prefills
from analysis.run.silences import FLOOR_NS, Server, Silences, servers_of, silences_of

HOST, WORK, PART, UNKNOWN = "host", "work", "part", "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A stretch in which a server with work in flight showed no sign of life for longer than chance explains.

    `cause`: "host" (every other server with work in flight was silent too), "work" (prompts as long took about as long
    elsewhere), "part" (only some of its requests stalled, as where several servers share an address), "unknown".
    """

    arm: str
    trial: int
    replica: str | None
    start_ns: int
    end_ns: int
    cause: str
    requests: Ints  # rows of the requests that were in flight in it
    may_be_work: bool = False  # whether its prompts may have taken as long, for all that is known

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmStalls:
    """The stalls of one arm, in order of time, and how well its servers could be watched."""

    arm: str
    stalls: tuple[Stall, ...]
    detectable_s: float  # the shortest stall that would have shown on every server; NaN where too little is known
    witnesses: int  # other servers, which separate the host's stalls from the arm's own

    def of_cause(self, *causes: str) -> list[Stall]:
        """The stalls with one of the causes."""
        return [stall for stall in self.stalls if stall.cause in causes]


def client_stalls(requests: Requests, arms: Collection[str]) -> dict[str, ArmStalls]:
    """The stalls of each of `arms`."""
    servers = servers_of(requests)
    silences = [silences_of(server) for server in servers]

    # Only stalls need to know what prompts take, and many runs have none.
    @cache
    def prompts() -> list[tuple[Floats, Floats]]:
        return [prefills(requests, server, own) for server, own in zip(servers, silences, strict=True)]

    @cache
    def work(arm: int) -> PromptWork:
        return _work(arm, servers, silences, prompts())

    found: dict[str, list[Stall]] = {arm: [] for arm in arms}
    detectable_s: dict[str, list[float]] = {arm: [] for arm in arms}
    witnesses: dict[str, list[int]] = {arm: [] for arm in arms}
    for number, (server, own) in enumerate(zip(servers, silences, strict=True)):
        arm = requests.arms[server.arm]
        if arm not in found:
            continue
        others = [other for other in servers if other is not server and other.trial == server.trial]
        for index in np.flatnonzero(own.stall).tolist():
            tokens = float(prompts()[number][0][index])
            span = int(own.start_ns[index]), int(own.end_ns[index])
            found[arm].append(_whole_stall(requests, server, others, span, tokens, work(server.arm)))
        found[arm] += _partial_stalls(requests, server, own)
        detectable_s[arm].append(own.detectable_s)
        witnesses[arm].append(len(others))
    return {
        arm: ArmStalls(
            arm=arm,
            stalls=tuple(sorted(found[arm], key=lambda stall: (stall.trial, stall.start_ns, stall.replica or ""))),
            detectable_s=float(np.max(detectable_s[arm])) if detectable_s[arm] else math.nan,
            witnesses=min(witnesses[arm], default=0),
        )
        for arm in arms
    }


def is_explained(stall: Stall, events: Sequence[CompileEvent]) -> bool:
    """Whether compiles of the arm lasted for half of the stall, or for all of it but less than the shortest stall."""
    windows = compile_windows(events, stall.arm, stall.trial, stall.replica)
    start, end = np.array([stall.start_ns]), np.array([stall.end_ns])
    left = (stall.end_ns - stall.start_ns) - float(windows.overlap_ns(start, end)[0])
    return left <= max(FLOOR_NS, 0.5 * (stall.end_ns - stall.start_ns))


def compile_windows(events: Sequence[CompileEvent], arm: str, trial: int, replica: str | None) -> Windows:
    """When the arm compiled, by its events of any phase, and of any kind that may hold a request up; with `replica`, on
    that one or on one not named."""
    return windows_of(
        (event.start_ns, event.end_ns)
        for event in events
        if (event.arm, event.trial) == (arm, trial)
        and (replica is None or event.replica in (None, replica))
        and event.kind != BACKGROUND
    )


def _whole_stall(
    requests: Requests,
    server: Server,
    others: Sequence[Server],
    span: tuple[int, int],
    tokens: float,
    work: PromptWork,
) -> Stall:
    """The stall of the whole server from `span[0]` to `span[1]`, which prompts of so many tokens ended."""
    start_ns, end_ns = span
    seconds = (end_ns - start_ns) / 1e9
    if work.explains(tokens, seconds) or copy_took_as_long(requests, server, others, start_ns, end_ns):
        cause = WORK
    elif _silent_too(others, start_ns, end_ns):
        cause = HOST
    else:
        cause = UNKNOWN
    return Stall(
        **_place(requests, server),
        start_ns=start_ns,
        end_ns=end_ns,
        cause=cause,
        requests=server.rows[(server.sent_ns < end_ns) & (server.end_ns > start_ns)],
        may_be_work=seconds <= work.at_most_s(tokens),
    )


def _partial_stalls(requests: Requests, server: Server, own: Silences) -> list[Stall]:
    """The stalls that only some requests of the server show."""
    silent = own.end_ns - own.start_ns >= FLOOR_NS
    silences = Windows(start_ns=own.start_ns[silent], end_ns=own.end_ns[silent])
    return [
        Stall(**_place(requests, server), start_ns=gap.start_ns, end_ns=gap.end_ns, cause=PART, requests=gap.requests)
        for gap in partial_stalls(requests, server.rows, server.sent_ns, silences)
    ]


def _place(requests: Requests, server: Server) -> dict[str, Any]:
    replica = requests.replicas[server.replica] if server.replica >= 0 else None
    return {"arm": requests.arms[server.arm], "trial": server.trial, "replica": replica}


def _work(
    arm: int, servers: Sequence[Server], silences: Sequence[Silences], prompts: Sequence[tuple[Floats, Floats]]
) -> PromptWork:
    """What prompts take on the arm, by its silences that are no stalls and all those of the other arms."""
    of_arm: dict[int, list[tuple[Floats, Floats]]] = {}
    for server, own, (tokens, seconds) in zip(servers, silences, prompts, strict=True):
        telling = (tokens > 0) & ~(own.stall & (server.arm == arm))
        of_arm.setdefault(server.arm, []).append((tokens[telling], seconds[telling]))
    joined = {
        number: (np.concatenate([tokens for tokens, _ in parts]), np.concatenate([seconds for _, seconds in parts]))
        for number, parts in of_arm.items()
    }
    return PromptWork.of(joined.pop(arm), list(joined.values()))


def _silent_too(others: Sequence[Server], start_ns: int, end_ns: int) -> bool:
    """Whether every other server that had work in flight was silent for half of the stretch: one that continued proves
    that the host did."""
    silent = []
    for other in others:
        inside = other.signs[np.searchsorted(other.signs, start_ns) : np.searchsorted(other.signs, end_ns)]
        edges = np.concatenate(([start_ns], inside, [end_ns]))
        place = int(np.argmax(np.diff(edges)))
        low, high = int(edges[place]), int(edges[place + 1])
        busy = bool(other.in_flight(np.array([low + (high - low) // 2]))[0] > 0)
        if inside.size or busy:
            silent.append(busy and 2 * (high - low) >= end_ns - start_ns)
    return bool(silent) and all(silent)
