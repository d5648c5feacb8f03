"""Which requests a compile held up, for how long, and which latency spikes that explains.

A request is joined to a compile in two ways: by trigger (the event names it) and by overlap in time on the same
arm and replica. Where the server reported how long compiles held it up, that number counts; else the overlap does.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from analysis.arrays import Bools, Floats, Ints
from analysis.records.requests import Requests
from analysis.statistics.quantiles import quantile, quantiles

CAUSES = ("other", "in the backlog of one", "slowed by one", "queued behind a compile", "recompiled")
OTHER, BACKLOG, _SLOWED, _QUEUED, _RECOMPILED = range(5)

# Work on another thread or in another process: other code serves meanwhile.
BACKGROUND = "background_compile"
# Kinds that do not hold the device while they last, where the server does not say which do (trial.json).
_RUNS_ON = frozenset({"eager_fallback", BACKGROUND})
# A kernel that a compiler beside torch's made when it was first called.
JIT = "jit"
# Kinds that say that a shape was not foreseen.
RECOMPILE_KINDS = frozenset({"compile", "recompile", "limit_hit", JIT})

_TOKEN_DELAY_NS = 50_000_000
_FEWEST_QUIET = 8
_MERGE_NS = 1_000_000_000
_MOST_SPIKES = 200
NOBODY = np.zeros(0, dtype=np.int64)  # no request


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileEvent:
    """One row of compile_events."""

    event_id: str
    trial: int
    arm: str
    replica: str | None
    kind: str
    start_ns: int
    end_ns: int
    serving: bool
    stalls: bool  # it held the device while it lasted
    request_ids: tuple[str, ...]
    row: dict[str, object]  # the other columns, as they were

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


def compile_events(
    table: pa.Table | None, requests: Requests, *, stalling: Collection[str] | None = None
) -> tuple[CompileEvent, ...]:
    """The events of `table`, which were placed, in order of time, each id once (a stream that resumed repeats events).

    One without a phase is serving if it ends after the first request. `stalling` are the kinds that hold the device;
    without it, all but an eager fallback do.
    """
    if table is None:
        return ()
    spans = requests.spans()
    events = []
    seen: set[tuple[int, str, str]] = set()
    for position, row in enumerate(table.to_pylist()):
        trial, phase, kind = row["trial"], row["phase"], row["kind"]
        identity = (trial, row["arm"], row["event_id"] or f"event-{position}")
        if identity in seen:
            continue
        seen.add(identity)
        events.append(
            CompileEvent(
                event_id=identity[2],
                trial=trial,
                arm=row["arm"],
                replica=row["replica"] or None,
                kind=kind,
                start_ns=row["start_ns"],
                end_ns=row["end_ns"],
                serving=phase == "serving" if phase else row["end_ns"] > spans.get(trial, (0, 0))[0],
                stalls=kind not in _RUNS_ON if stalling is None else kind in stalling,
                request_ids=tuple(name for name in row["request_ids"] or () if name is not None),
                row=row,
            )
        )
    return tuple(sorted(events, key=lambda event: (event.trial, event.start_ns, event.arm, event.event_id)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Stretches of time that do not touch, in order."""

    start_ns: Ints
    end_ns: Ints

    @property
    def seconds(self) -> float:
        return float((self.end_ns - self.start_ns).sum()) / 1e9

    def overlap_ns(self, start_ns: Ints, end_ns: Ints) -> Floats:
        """How much of each stretch from `start_ns` to `end_ns` lies in the windows."""
        if not self.start_ns.size:
            return np.zeros(len(start_ns))
        base = int(self.start_ns[0])
        edges = np.column_stack((self.start_ns, self.end_ns)).ravel() - base
        passed = np.column_stack((np.zeros(len(self.start_ns), np.int64), self.end_ns - self.start_ns)).ravel()
        held = np.cumsum(passed).astype(np.float64)
        upto = np.interp(np.maximum(end_ns, start_ns) - base, edges, held)
        return np.asarray(upto - np.interp(start_ns - base, edges, held))

    def touch(self, start_ns: Ints, end_ns: Ints) -> Bools:
        """Which stretches from `start_ns` to `end_ns` share an instant with a window."""
        over = np.searchsorted(self.end_ns, start_ns, side="right")
        return np.asarray(over < np.searchsorted(self.start_ns, end_ns, side="left"))


def windows_of(spans: Iterable[tuple[int, int]]) -> Windows:
    """The union of the spans."""
    merged: list[list[int]] = []
    for start, end in sorted(spans):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    table = np.array(merged, dtype=np.int64).reshape(-1, 2)
    return Windows(start_ns=table[:, 0], end_ns=table[:, 1])


def stall_windows(events: Iterable[CompileEvent], *, arm: str, trial: int, replica: str | None = None) -> Windows:
    """When a compile ran on `arm` while it served in `trial`; with `replica`, on that one or on one not named."""
    return windows_of(
        (event.start_ns, event.end_ns)
        for event in events
        if event.serving
        and event.stalls
        and (event.arm, event.trial) == (arm, trial)
        and (replica is None or event.replica in (None, replica))
    )


def held_s(events: Iterable[CompileEvent]) -> float:
    """Seconds in which any of the events lasted, summed over trials and replicas."""
    spans: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for event in events:
        spans.setdefault((event.trial, event.replica or ""), []).append((event.start_ns, event.end_ns))
    return sum((windows_of(spans[place]).seconds for place in sorted(spans)), start=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """How much earlier each request would have ended, and its first token come, had nothing compiled; (n,) each."""

    ms: Floats
    before_first_ms: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """What compiles did to each request, one entry a request."""

    stall_ms: Floats  # time that a compile held the request up
    backlog_ms: Floats  # what it waited beyond that in the queue that compiles had made, see `analysis.run.backlog`
    delay: Delay  # what both come to
    delay_least: Delay
    delay_most: Delay
    unserved: Bools  # it failed or was cut off where a backlog was, so what it would have been is not known
    misfit: Mapping[str, float]  # of each arm with a backlog: how far the replay is from what was seen, as a share
    cause: npt.NDArray[np.int8]  # index into CAUSES
    hit: Bools  # it triggered a compile or waited for one
    event_requests: tuple[Ints, ...]  # for each event, the requests it hit
    event_backlog: tuple[Ints, ...]  # for each event, the requests in its backlog


def attribute(requests: Requests, events: Sequence[CompileEvent]) -> Attribution:
    """The join of all requests to the serving compile events of their own arm and replica; no backlog yet."""
    rows = len(requests)
    usable = ~requests.broken
    relevant = [event for event in events if event.serving and event.stalls]
    nothing = _nothing_compiled(rows, len(events))
    if not relevant and not (usable & (requests.stall_ns > 0)).any():
        return nothing
    overlap, before = np.zeros(rows), np.zeros(rows)
    ends_wait = np.where(requests.first_ns > 0, requests.first_ns, requests.end_ns)
    for arm, trial in sorted({(event.arm, event.trial) for event in relevant if event.arm in requests.arms}):
        of_arm = np.flatnonzero(requests.of_arm(arm) & (requests.trial == trial) & usable)
        for replica in np.unique(requests.replica[of_arm]).tolist():
            own = of_arm[requests.replica[of_arm] == replica]
            name = requests.replicas[replica] if replica >= 0 else None
            windows = stall_windows(relevant, arm=arm, trial=trial, replica=name)
            overlap[own] = windows.overlap_ns(requests.start_ns[own], requests.end_ns[own])
            before[own] = windows.overlap_ns(requests.start_ns[own], ends_wait[own])
    reported = requests.stall_ns
    held = np.flatnonzero(usable & ((reported > 0) | ((reported < 0) & (overlap > 0))))
    # Most requests met no compile, and what is not written to takes no memory.
    stall, stall_before = np.zeros(rows), np.zeros(rows)
    stall[held] = np.where(reported[held] >= 0, reported[held], overlap[held]) / 1e6
    # A reported stall is laid before and after the first token as the overlap is; without overlap, before it.
    share = np.where(overlap[held] > 0, before[held] / np.maximum(overlap[held], 1.0), 1.0)
    wait = (ends_wait[held] - requests.start_ns[held]) / 1e6
    stall_before[held] = np.minimum(stall[held] * share, np.maximum(wait, 0.0))

    triggered = np.zeros(rows, dtype=np.bool_)
    behind = np.zeros(rows, dtype=np.bool_)
    touched = _requests_in_flight(requests, relevant)
    named = _requests_named(requests, relevant)
    hits: dict[int, Ints] = {}
    for number, event in enumerate(relevant):
        triggered[_own_batch(requests, event, named[number])] = True
        # The first token came after the compile began: the request was still waiting for it.
        waiting = touched[number][ends_wait[touched[number]] > event.start_ns]
        behind[waiting] = True
        waited = touched[number][stall[touched[number]] > 0]
        hits[id(event)] = np.union1d(waited, named[number])
    overlapped = overlap > 0
    hit = usable & (triggered | (stall > 0))
    cause = np.full(rows, OTHER, dtype=np.int8)
    cause[usable & (overlapped | hit)] = _SLOWED
    cause[hit & (behind | (~overlapped & (stall_before > 0)))] = _QUEUED
    cause[usable & triggered] = _RECOMPILED
    direct = Delay(ms=stall, before_first_ms=stall_before)
    return replace(
        nothing,
        stall_ms=stall,
        delay=direct,
        delay_least=direct,
        delay_most=direct,
        cause=cause,
        hit=hit,
        event_requests=tuple(hits.get(id(event), NOBODY) for event in events),
    )


def _nothing_compiled(rows: int, events: int) -> Attribution:
    """What is attributed where no compile held up a request. One value for all rows takes no memory."""
    none, never = np.broadcast_to(0.0, rows), np.broadcast_to(False, rows)
    delay = Delay(ms=none, before_first_ms=none)
    return Attribution(
        stall_ms=none,
        backlog_ms=none,
        delay=delay,
        delay_least=delay,
        delay_most=delay,
        unserved=never,
        misfit={},
        cause=np.broadcast_to(np.int8(OTHER), rows),
        hit=never,
        event_requests=(NOBODY,) * events,
        event_backlog=(NOBODY,) * events,
    )


def _requests_in_flight(requests: Requests, events: Sequence[CompileEvent]) -> list[Ints]:
    """For each event, the requests on its arm and replica that were in flight at some moment of it."""
    in_flight: list[Ints] = []
    order: dict[tuple[str, int], tuple[Ints, Ints, Ints]] = {}
    for event in events:
        key = (event.arm, event.trial)
        if key not in order:
            own = np.flatnonzero(requests.of_arm(event.arm) & (requests.trial == event.trial) & ~requests.broken)
            own = own[np.argsort(requests.start_ns[own], kind="stable")]
            order[key] = (own, requests.start_ns[own], np.maximum.accumulate(requests.end_ns[own]))
        own, starts, latest = order[key]
        # Among requests sorted by start, none before `low` is still in flight and none from `high` on has begun.
        low = int(np.searchsorted(latest, event.start_ns, side="right"))
        high = int(np.searchsorted(starts, event.end_ns, side="left"))
        candidates = own[low:high]
        flying = requests.end_ns[candidates] > event.start_ns
        if event.replica in requests.replicas:
            replica = requests.replica[candidates]
            flying &= (replica < 0) | (replica == requests.replicas.index(event.replica or ""))
        in_flight.append(candidates[flying])
    return in_flight


def _requests_named(requests: Requests, events: Sequence[CompileEvent]) -> list[Ints]:
    """For each event, the requests that it names, on its own arm and trial."""
    names = sorted({name for event in events for name in event.request_ids})
    if not names:
        return [NOBODY] * len(events)
    index = pc.index_in(requests.request_ids, value_set=pa.array(names, pa.string()))
    index = np.asarray(pc.fill_null(index, -1).to_numpy(zero_copy_only=False), dtype=np.int64)
    rows_by_name: dict[str, list[int]] = {}
    for row in np.flatnonzero((index >= 0) & ~requests.broken).tolist():
        rows_by_name.setdefault(names[index[row]], []).append(row)
    named = []
    for event in events:
        rows = [
            row
            for name in event.request_ids
            for row in rows_by_name.get(name, ())
            if requests.arms[requests.arm[row]] == event.arm and requests.trial[row] == event.trial
        ]
        named.append(np.unique(np.array(rows, dtype=np.int64)))
    return named


def _own_batch(requests: Requests, event: CompileEvent, named: Ints) -> Ints:
    """Which of the requests that an event names were in the batch that compiled; the others waited for it.

    A prefill batch is known by its id. In the batch of a decode step are the requests that had their first token.
    Where no request has a batch id, an event names its batch alone.
    """
    if not (requests.batch[named] >= 0).any():
        return named
    batch_id = event.row.get("batch_id")
    if isinstance(batch_id, int) and batch_id >= 0:
        same: Ints = named[requests.batch[named] == batch_id]
        if same.size:
            return same
    # The client sees a first token a moment after the server has moved on to the next step.
    slack = min(_TOKEN_DELAY_NS, (event.end_ns - event.start_ns) // 2)
    first = requests.first_ns[named]
    return np.asarray(named[(first > 0) & (first <= event.start_ns + slack)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    """A stretch in which requests took much longer than their length explains, and what share compiles explain."""

    arm: str
    trial: int
    start_ns: int
    end_ns: int
    peak_ms: float
    requests: int
    cause: str
    event_ids: tuple[str, ...]
    explained_pct: float
    direct_pct: float  # of it, while a compile ran
    backlog_pct: float  # of it, in the queue that a compile had made


def find_spikes(
    requests: Requests,
    attribution: Attribution,
    events: Sequence[CompileEvent],
    *,
    control: str,
    machine: Ints | None = None,
) -> list[Spike]:
    """Excursions of E2E on every arm, worst first, at most 200; each attributed.

    What a request should have taken is the arm's own compile-quiet median TTFT plus its median TPOT for each further
    token. A request is an excursion when the excess over that lies beyond what quiet requests show in both senses:
    in ms (upper quartile plus six interquartile ranges, at least half the quiet median) and as a ratio (upper quartile
    plus two interquartile ranges of its log), so that neither a long answer nor a short one is taken for a stall.
    Excursions in flight less than a second apart are one spike. An arm with fewer than eight quiet requests borrows
    the control's baseline. With `machine`, the number of each request's, each machine has baselines of its own.
    """
    spikes: list[Spike] = []
    for name in requests.arms:
        beyond = excursions(requests, attribution, arm=name, control=control, machine=machine)
        for trial in np.unique(requests.trial[beyond.rows]).tolist():
            of_trial = requests.trial[beyond.rows] == trial
            rows, excess = beyond.rows[of_trial], beyond.excess_ms[of_trial]
            spikes.extend(_merged(requests, attribution, events, name, trial, rows, excess))
    spikes.sort(key=lambda spike: (-spike.peak_ms, spike.arm, spike.trial, spike.start_ns))
    return spikes[:_MOST_SPIKES]


@dataclass(frozen=True, slots=True, kw_only=True)
class Excursions:
    """Requests that took much longer than their length explains, and by how much; both of shape (n,)."""

    rows: Ints
    excess_ms: Floats


def excursions(
    requests: Requests, attribution: Attribution, *, arm: str, control: str, machine: Ints | None = None
) -> Excursions:
    """The arm's excursions of E2E as `find_spikes` defines them, request by request."""
    if machine is None:
        return _excursions(requests, attribution, np.ones(len(requests), dtype=np.bool_), arm, control)
    found = [_excursions(requests, attribution, machine == place, arm, control) for place in np.unique(machine)]
    rows = np.concatenate([part.rows for part in found] or [NOBODY])
    order = np.argsort(rows, kind="stable")
    excess = np.concatenate([part.excess_ms for part in found] or [np.zeros(0)])
    return Excursions(rows=rows[order], excess_ms=excess[order])


def _excursions(requests: Requests, attribution: Attribution, among: Bools, arm: str, control: str) -> Excursions:
    quiet = requests.ok & (attribution.cause == OTHER) & among
    baselines = (_baseline(requests, quiet & requests.of_arm(name)) for name in (arm, control))
    baseline = next((known for known in baselines if known is not None), None)
    own = np.flatnonzero(requests.of_arm(arm) & ~np.isnan(requests.e2e_ms) & among)
    if baseline is None:
        return Excursions(rows=own[:0], excess_ms=np.zeros(0))
    expected, took = baseline.expected_ms(requests.output_tokens[own]), requests.e2e_ms[own]
    excess = took - expected
    beyond = (excess > baseline.threshold_ms) & (took > baseline.threshold_ratio * expected)
    return Excursions(rows=own[beyond], excess_ms=excess[beyond])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Baseline:
    ttft_ms: float
    tpot_ms: float
    threshold_ms: float = 0.0
    threshold_ratio: float = 1.0

    def expected_ms(self, output_tokens: Ints) -> Floats:
        return self.ttft_ms + self.tpot_ms * np.maximum(output_tokens - 1, 0).astype(np.float64)


def normal_e2e_ms(requests: Requests, quiet: Bools) -> Floats | None:
    """What each request should take by its length, from the quiet requests; None when fewer than eight are quiet."""
    baseline = _baseline(requests, quiet)
    return None if baseline is None else baseline.expected_ms(requests.output_tokens)


def _baseline(requests: Requests, quiet: Bools) -> _Baseline | None:
    if int(quiet.sum()) < _FEWEST_QUIET:
        return None
    rows = np.flatnonzero(quiet)
    ttft = quantile(requests.ttft_ms[rows], 0.5)
    tpot = quantile(requests.tpot_ms[rows], 0.5)
    e2e = requests.e2e_ms[rows]
    # An answer without tokens, such as a vector, is there at once: its end is its beginning.
    first = quantile(e2e, 0.5) if math.isnan(ttft) else ttft
    shape = _Baseline(ttft_ms=first, tpot_ms=0.0 if math.isnan(tpot) else tpot)
    expected = shape.expected_ms(requests.output_tokens[rows])
    known = (expected > 0) & (e2e > 0)
    lower, upper = quantiles(e2e - expected, (0.25, 0.75))
    low, high = quantiles(np.log(e2e[known] / expected[known]), (0.25, 0.75))
    ratio = 1.0 if math.isnan(low) else math.exp(high + 2.0 * (high - low))
    threshold = max(float(upper + 6.0 * (upper - lower)), 0.5 * quantile(e2e, 0.5))
    return replace(shape, threshold_ms=threshold, threshold_ratio=ratio)


def _merged(
    requests: Requests,
    attribution: Attribution,
    events: Sequence[CompileEvent],
    arm: str,
    trial: int,
    rows: Ints,
    excess: Floats,
) -> list[Spike]:
    order = np.argsort(requests.start_ns[rows], kind="stable")
    rows, excess = rows[order], excess[order]
    latest = np.maximum.accumulate(requests.end_ns[rows])
    breaks = np.flatnonzero(requests.start_ns[rows][1:] > latest[:-1] + _MERGE_NS) + 1
    spikes = []
    own_events = [
        (event, np.union1d(hit, behind))
        for event, hit, behind in zip(events, attribution.event_requests, attribution.event_backlog, strict=True)
        if event.arm == arm and event.trial == trial and hit.size + behind.size
    ]
    for group, over in zip(np.split(rows, breaks), np.split(excess, breaks), strict=True):
        direct = np.minimum(attribution.stall_ms[group], over)
        backlog = np.minimum(attribution.backlog_ms[group], over - direct)
        direct_pct, backlog_pct = (100.0 * float(part.sum() / over.sum()) for part in (direct, backlog))
        explained = direct_pct + backlog_pct
        members = [event.event_id for event, hit in own_events if np.isin(group, hit, assume_unique=True).any()]
        # A compile that explains less than half of the excess is a bystander, not the cause.
        cause = int(attribution.cause[group].max()) if explained >= 50.0 else OTHER
        spikes.append(
            Spike(
                arm=arm,
                trial=trial,
                start_ns=int(requests.start_ns[group].min()),
                end_ns=int(requests.end_ns[group].max()),
                peak_ms=float(requests.e2e_ms[group].max()),
                requests=int(group.size),
                cause=CAUSES[cause],
                event_ids=tuple(members),
                explained_pct=explained,
                direct_pct=direct_pct,
                backlog_pct=backlog_pct,
            )
        )
    return spikes
