"""What happened to a candidate that no statistics has to wait for: a death, a compile while it serves, a burst of
errors. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tailgate.analysis.records.plain_values import text_of
from tailgate.analysis.run.compile_events import RECOMPILE_KINDS
from tailgate.analysis.wording import counted

_SAME_START_S = 0.1  # by which the starts of one compile may differ, under way and in its event
_BURST_REQUESTS, _BURST_SHARE = 5, 0.2  # of failed requests, and of those that ended meanwhile


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedCompile:
    """A compile of a replica while it served. `end_ns` is None while it goes on, when `kind` is compile or
    graph_capture, whichever it turns out to be."""

    arm: str
    replica: str
    kind: str
    start_ns: int
    end_ns: int | None = None
    shape: str = ""

    def seconds(self, now_ns: int) -> float:
        """Return how long it took, or has taken until now."""
        return max(0.0, ((self.end_ns or now_ns) - self.start_ns) / 1e9)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Alarm:
    """What happened, and when it was over or reached its limit, ns since the epoch."""

    at_ns: int
    why: str


def compile_alarms(
    arm: str, events: Iterable[ServedCompile], *, now_ns: int, stall_limit_s: float, max_recompiles: int
) -> list[Alarm]:
    """Return the compiles of `arm` in one trial that were too long, or too many. `events` are in the order of time.

    A compile under way is an alarm from the instant when it reaches `stall_limit_s`, and counts as a recompile at its
    end. It is left out once its replica has its event: one that started with it, or that ended later.
    """
    ours = [event for event in events if event.arm == arm and event.kind in RECOMPILE_KINDS]

    def has_event(under_way: ServedCompile) -> bool:
        return any(
            event.replica == under_way.replica
            and event.end_ns is not None
            and (event.end_ns >= now_ns or abs(event.start_ns - under_way.start_ns) <= _SAME_START_S * 1e9)
            for event in ours
        )

    found = []
    recompiles = 0
    for event in ours:
        recompiles += event.end_ns is not None
        at_ns, seconds, did = event.end_ns or now_ns, event.seconds(now_ns), ""
        if event.end_ns is None:
            if seconds >= stall_limit_s and not has_event(event):
                at_ns -= round((seconds - stall_limit_s) * 1e9)
                did = f"has been compiling for {seconds:.1f} s"
        elif seconds >= stall_limit_s:
            did = f"compiled for {seconds:.1f} s"
        elif recompiles > max_recompiles:
            did = f"recompiled {counted(recompiles, 'time')}"
        if did:
            shape = f" for {event.shape}" if event.shape else ""
            found.append(Alarm(at_ns=at_ns, why=f"{arm} {did} while serving{shape}"))
    return found


def death_alarms(arm: str, deaths: Iterable[Mapping[str, Any]], *, now_ns: int) -> list[Alarm]:
    """Return an alarm for each dead replica of `arm` in `deaths` of trial.json. One without a time died now."""
    own = ((death, death.get("at_ns")) for death in deaths if death.get("arm") == arm)
    return [
        Alarm(at_ns=at_ns if isinstance(at_ns, int) else now_ns, why=f"{text_of(death, 'replica', arm)} died")
        for death, at_ns in own
    ]


def burst_alarms(arm: str, *, failed: int, finished: int, now_ns: int, meanwhile: str) -> list[Alarm]:
    """Return one alarm if a fifth of the requests that ended `meanwhile` failed, and at least five."""
    if failed < _BURST_REQUESTS or failed <= _BURST_SHARE * finished:
        return []
    return [Alarm(at_ns=now_ns, why=f"{failed} of {finished} requests to {arm} failed {meanwhile}")]
