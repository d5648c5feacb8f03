"""Stalls of servers as their clients see them, what explains each, and what they say of compiles in a log."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pyarrow as pa

from tailgate.analysis.arrays import Bools, Floats, Ints
from tailgate.analysis.records.requests import Requests
from tailgate.analysis.run.attribution import attribute
from tailgate.analysis.run.compile_events import BACKGROUND, CompileEvent, Windows, windows_of
from tailgate.analysis.run.run import Run
from tailgate.analysis.run.silences import (
    FLOOR_NS,
    TOGETHER_NS,
    Server,
    Silences,
    held_first_tokens,
    partial_stalls,
    servers_of,
    silences_of,
)

HOST, WORK, PART, UNKNOWN = "host", "work", "part", "unknown"
_KNOWN = frozenset({HOST, WORK})

_NO_COMPILE = frozenset({"limit_hit", "eager_fallback"})
# A line of a log is written when the compile begins or ends, may arrive late, and its time may be in whole seconds.
_NEAR_NS = 1_000_000_000

_BEHIND_NS = 20_000_000  # after a silence: one late packet of a batch must not hide its longest prompt
_LONG_NS = 50_000_000  # a silence that may show how long prompts take
_FEWEST_PROMPTS = 30  # silences that show how long prompts take
_AS_LONG = 0.75  # of a silence: what takes so much of it takes about as long
_SURE = 2.0  # standard errors of the time for each token


@dataclass(frozen=True, slots=True)
class Stall:
    """A stretch in which a server with work in flight showed no sign of life for longer than chance explains.

    `cause`: "work" (the prompts that ended it take about as long), "host" (every other server with work in flight was
    silent too), "part" (only some of its requests stalled, as where several servers share an address), "unknown".
    held_s: how long the server began no answer meanwhile, if longer.
    """

    arm: str
    trial: int
    replica: str | None
    start_ns: int
    end_ns: int
    cause: str
    requests: Ints  # rows of the requests that were in flight in it
    held_s: float = 0.0

    @property
    def seconds(self) -> float:
        return max((self.end_ns - self.start_ns) / 1e9, self.held_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmStalls:
    """The stalls of one arm, in order of time, and how well its servers could be watched."""

    arm: str
    stalls: tuple[Stall, ...]
    detectable_s: float  # the shortest that 9 of 10 requests would have shown on every server; NaN: unknown

    def of_cause(self, *causes: str) -> list[Stall]:
        """Return the stalls with one of the causes."""
        return [stall for stall in self.stalls if stall.cause in causes]


def client_stalls(requests: Requests, arms: Collection[str], unjudged: Requests | None = None) -> dict[str, ArmStalls]:
    """Find the stalls of each of `arms`. Those of `unjudged` only show whether their host stalled."""
    seen: dict[str, list[ArmStalls]] = {arm: [] for arm in arms}
    with ThreadPoolExecutor(2) as processors:
        for trial in np.unique(requests.trial).tolist():
            pa.default_memory_pool().release_unused()  # also frees NumPy's memory, whose arrays are large here
            servers = servers_of(requests, trial)
            own = [server for server in servers if requests.arms[server.arm] in seen]
            servers += [] if unjudged is None else servers_of(unjudged, trial)
            for found in processors.map(partial(_of_server, requests, servers), own):
                seen[found.arm].append(found)
            del own, servers  # before those of the next trial
    pa.default_memory_pool().release_unused()
    joined = {}
    for arm, parts in seen.items():
        stalls = [stall for part in parts for stall in part.stalls]
        stalls.sort(key=lambda stall: (stall.trial, stall.start_ns, stall.replica or ""))
        worst_s = float(np.max([part.detectable_s for part in parts])) if parts else math.nan
        joined[arm] = ArmStalls(arm=arm, stalls=tuple(stalls), detectable_s=worst_s)
    return joined


def _of_server(requests: Requests, servers: Sequence[Server], server: Server) -> ArmStalls:
    own, others = silences_of(server), [other for other in servers if other is not server]
    arm, replica = requests.arms[server.arm], requests.replicas[server.replica] if server.replica >= 0 else None
    parts = ((start_ns, end_ns, PART, rows) for start_ns, end_ns, rows in partial_stalls(requests, server, own))
    stretches = *parts, *_with_causes(requests, others, server, own)
    stalls = [Stall(arm, server.trial, replica, *stretch) for stretch in stretches]
    for stretch in _with_causes(requests, others, server, held_first_tokens(requests, server)):
        held = Stall(arm, server.trial, replica, *stretch)
        within = [item for item in stalls if item.start_ns < held.end_ns and item.end_ns > held.start_ns]
        if held.cause != UNKNOWN or any(2 * item.seconds >= held.seconds for item in within if item.cause in _KNOWN):
            continue
        unknown = (item for item in within if item.cause not in _KNOWN)
        longest = max(unknown, key=lambda item: item.seconds, default=replace(held, cause=PART))
        rows, held_s = np.union1d(longest.requests, held.requests), max(longest.held_s, held.seconds)
        stalls = [*(i for i in stalls if i is not longest), replace(longest, requests=rows, held_s=held_s)]
    return ArmStalls(arm=arm, stalls=tuple(stalls), detectable_s=own.detectable_s)


def _with_causes(
    requests: Requests, others: Sequence[Server], server: Server, silences: Silences
) -> Iterator[tuple[int, int, str, Ints]]:
    """Yield (from, to, cause, requests in flight) of the silences that are stalls."""
    if not silences.stall.any():
        return
    work, sent, ended = _explained_by_prompts(requests, server, silences), server.sent_ns, server.end_ns(requests)
    for index in np.flatnonzero(silences.stall).tolist():
        start_ns, end_ns = int(silences.start_ns[index]), int(silences.end_ns[index])
        cause = WORK if work[index] else HOST if _silent_too(others, start_ns, end_ns) else UNKNOWN
        yield start_ns, end_ns, cause, server.rows[(sent < end_ns) & (ended > start_ns)]


def is_explained(stall: Stall, events: Sequence[CompileEvent]) -> bool:
    """Return whether the arm compiled for half of the stall, or for all but less than the shortest stall."""
    windows = compile_windows(events, stall.arm, stall.trial, stall.replica)
    start, end = np.array([stall.start_ns]), np.array([stall.end_ns])
    left = (stall.end_ns - stall.start_ns) - float(windows.overlap_ns(start, end)[0])
    return left <= max(FLOOR_NS, 0.5 * (stall.end_ns - stall.start_ns))


def compile_windows(events: Sequence[CompileEvent], arm: str, trial: int, replica: str | None) -> Windows:
    """Return when the arm, or its `replica` or an unnamed one, compiled in a way that may delay a request."""
    return windows_of(
        (event.start_ns, event.end_ns)
        for event in events
        if (event.arm, event.trial) == (arm, trial)
        and (replica is None or event.replica in (None, replica))
        and event.kind != BACKGROUND
    )


def with_lengths(run: Run) -> Run:
    """Give a logged compile without a length the length of the stall that its line lies in.

    One that lies in no stall delayed no request for long enough to show, and keeps no length.
    """
    external = {arm for arm in run.arms if run.account(arm).external}
    unreported = [
        event.arm in external and event.serving and event.start_ns == event.end_ns and event.kind not in _NO_COMPILE
        for event in run.events
    ]
    if not any(unreported):
        return run
    seen = client_stalls(run.requests, external, run.unjudged)
    events = tuple(
        _timed(event, seen[event.arm].stalls) if without else event
        for event, without in zip(run.events, unreported, strict=True)
    )
    events = tuple(sorted(events, key=lambda event: (event.trial, event.start_ns, event.arm, event.event_id)))
    return replace(run, events=events, attribution=attribute(run.requests, events))


def _timed(event: CompileEvent, stalls: Sequence[Stall]) -> CompileEvent:
    near = (
        stall
        for stall in stalls
        if stall.trial == event.trial
        and (event.replica is None or stall.replica in (None, event.replica))
        and stall.cause != HOST
        and stall.start_ns - _NEAR_NS <= event.start_ns <= stall.end_ns + _NEAR_NS
    )
    longest = max(near, key=lambda stall: stall.seconds, default=event)
    return replace(event, start_ns=longest.start_ns, end_ns=longest.end_ns)


def _silent_too(others: Sequence[Server], start_ns: int, end_ns: int) -> bool:
    """Return whether every other server with work in flight was silent for half of the stretch: one that continued
    proves that the host did."""
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


def _explained_by_prompts(requests: Requests, server: Server, silences: Silences) -> Bools:
    """Mask silences that lasted about as long as the prompts whose first tokens ended them take, by the server's
    silences that are no stalls (`_prompts_ns`). Prompts that were sent during a silence had no part in it."""
    starts, ends = silences.start_ns, silences.end_ns
    explained = np.zeros(starts.size, np.bool_)
    long = np.flatnonzero(ends - starts >= _LONG_NS)
    if not long.size:
        return explained
    done = server.done_ns(requests)
    ended = np.searchsorted(ends[long] - TOGETHER_NS, done, side="right") - 1
    behind = (ended >= 0) & (done <= ends[long][ended] + _BEHIND_NS)
    behind &= server.sent_ns <= starts[long][ended] + TOGETHER_NS
    prompts = np.maximum(requests.prompt_tokens[server.rows[behind]], 0)
    tokens = np.bincount(ended[behind], weights=prompts, minlength=long.size).astype(np.float64)
    took = (ends - starts)[long].astype(np.float64)
    telling = (tokens > 0) & ~silences.stall[long]
    if telling.sum() >= _FEWEST_PROMPTS:
        explained[long] = (tokens > 0) & (_AS_LONG * took <= _prompts_ns(tokens, tokens[telling], took[telling]))
    return explained


def _prompts_ns(tokens: Floats, seen_tokens: Floats, took_ns: Floats) -> Floats:
    """Predict how long prompts of so many tokens take, if prompts of `seen_tokens` took `took_ns`.

    It fits a line with the least time per token that the data allow, since the time of short prompts is mostly that of
    a step and predicts little of long ones, and scales it by how much longer the slowest tenth of the longer half took.
    """
    spread = seen_tokens - seen_tokens.mean()
    squares = float(spread @ spread)
    slope = 0.0
    if squares > 0:
        slope = float(spread @ took_ns) / squares
        rest = took_ns - took_ns.mean() - slope * spread
        slope = max(0.0, slope - _SURE * float(rest.std()) / math.sqrt(squares))

    def line_ns(some: Floats) -> Floats:
        return np.asarray(np.maximum(took_ns.mean() + slope * (some - seen_tokens.mean()), took_ns.min()))

    longer = seen_tokens >= np.median(seen_tokens)
    slowest = float(np.quantile(took_ns[longer] / line_ns(seen_tokens[longer]), 0.9))
    return np.asarray(slowest * line_ns(tokens))
