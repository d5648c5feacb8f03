"""Whether a warm arm stays quiet: requests of any admissible size that join and leave, and a trace in real time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.inprocess import InProcess, Line
from benchmarks.measure import Session, latencies, throughput, tokens_in_window
from benchmarks.traffic import Request, Rows
from servers.clock import now_ns
from servers.compiler.events import CompileEvent

# Turns of the engine loop between two aims for how many requests should be in flight.
_TURNS_AN_AIM = 25
_CANCELLED_SHARE = 0.05


def churn(target: InProcess, requests: Sequence[Request], rng: np.random.Generator) -> Session:
    """Serve all of `requests` while the number in flight wanders between none and twice the slots.

    Some are cancelled on the way, so that rows are freed at any moment and not only at an end.
    """
    pending = list(reversed(requests))
    slots = target.arm.engine.slots
    turns = 0
    aim = 1

    def feed(line: Line) -> bool:
        nonlocal turns, aim
        if turns % _TURNS_AN_AIM == 0:
            aim = int(rng.integers(1, 2 * slots + 1))
        turns += 1
        while pending and len(line.live) < aim and rng.random() < 0.7:
            line.send(pending.pop())
            if rng.random() < _CANCELLED_SHARE:
                line.cancel(list(line.live)[int(rng.integers(len(line.live)))])
        return bool(pending)

    return target.run(feed)


def noise(events: Sequence[CompileEvent]) -> str:
    """What the compiler did while serving, for people; empty when it was quiet.

    Every kind of event counts: a step that fell back to eager code is a missing graph too.
    """
    if not events:
        return ""
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(Counter(event.kind for event in events).items()))
    seconds = sum(event.end_ns - event.start_ns for event in events) / 1e9
    first = events[0]
    why = f": {first.reason.splitlines()[0]}" if first.reason else ""
    return f"{counts} while serving, {seconds:.3g} s; the first at {first.shape or 'no step'}{why}"


def quietness(session: Session) -> dict[str, Any]:
    """The compile events of a session as values of a row; `failed` when there are any, or when requests failed."""
    lost = {status: count for status, count in session.failed.items() if status != "CANCELLED"}
    row: dict[str, Any] = {
        "requests": len(session.answers),
        "steps": sum(output.step is not None for output in session.outputs),
        "output_tokens": session.output_tokens,
        "events": dict(Counter(event.kind for event in session.events)),
        "event_s": sum(event.end_ns - event.start_ns for event in session.events) / 1e9,
        "event_shapes": [f"{event.kind} {event.shape}" for event in session.events[:20]],
    }
    reasons = [noise(session.events)]
    if lost:
        reasons.append("requests ended " + ", ".join(f"{status} ({count})" for status, count in lost.items()))
    reason = "; ".join(item for item in reasons if item)
    return row | ({"failed": reason} if reason else {})


def saturate(target: InProcess, rows: Rows, *, seconds: float, rng: np.random.Generator) -> float:
    """Output tokens per second that the arm gives with a full queue, drawn from `rows`, over the last four fifths."""
    slots = target.arm.engine.slots
    backlog = min(2 * slots, slots + target.arm.engine.max_queue)
    start_ns = now_ns()
    end_ns = start_ns + int(seconds * 1e9)

    def feed(line: Line) -> bool:
        if now_ns() >= end_ns:
            for name in list(line.live):
                line.cancel(name)
            return False
        room = backlog - len(line.live)
        if room > 0:
            for request in rows.take(rng.integers(0, len(rows), size=room)).requests(target.vocab_size, rng):
                line.send(request)
        return True

    session = target.run(feed)
    begin_ns = start_ns + (end_ns - start_ns) // 5
    return tokens_in_window(session.outputs, begin_ns, end_ns) / ((end_ns - begin_ns) / 1e9)


def replay(target: InProcess, requests: Sequence[Request]) -> dict[str, Any]:
    """Serve a schedule in real time; its compile events, latencies and rates as values of a row."""
    session, lags = target.replay(requests)
    offered_s = requests[-1].offset_ns / 1e9
    return {
        **quietness(session),
        "offered_requests_s": len(requests) / offered_s if offered_s else None,
        "output_tokens_s": throughput(session),
        **latencies(session.answers.values()),
        "p99_lag_ms": float(np.quantile(lags, 0.99)),
    }
