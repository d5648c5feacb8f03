"""What happened to a candidate that no statistics has to wait for: a death, a compile while it serves, a burst of
errors. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from analysis.nouns import counted
from analysis.records.plain_values import text_of
from analysis.run.spikes import RECOMPILE_KINDS

_BURST_REQUESTS, _BURST_SHARE = 5, 0.2  # of failed requests, and of those that ended meanwhile


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedCompile:
    """A compile event of an arm while it served."""

    arm: str
    kind: str
    seconds: float
    end_ns: int
    shape: str


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Alarm:
    """What happened, and when it was over, ns since the epoch."""

    at_ns: int
    why: str


def compile_alarms(
    arm: str, events: Iterable[ServedCompile], *, stall_limit_s: float, max_recompiles: int
) -> list[Alarm]:
    """Compiles of `arm` in one trial that were too long, or too many. `events` are in the order of time."""
    found = []
    recompiles = 0
    for event in events:
        if event.arm != arm or event.kind not in RECOMPILE_KINDS:
            continue
        recompiles += 1
        shape = f" for {event.shape}" if event.shape else ""
        if event.seconds >= stall_limit_s:
            found.append(
                Alarm(at_ns=event.end_ns, why=f"{arm} compiled for {event.seconds:.1f} s while serving{shape}")
            )
        elif recompiles > max_recompiles:
            found.append(
                Alarm(at_ns=event.end_ns, why=f"{arm} recompiled {counted(recompiles, 'time')} while serving{shape}")
            )
    return found


def death_alarms(arm: str, deaths: Iterable[Mapping[str, Any]], *, now_ns: int) -> list[Alarm]:
    """Replicas of `arm` that died, by `deaths` of trial.json. One that does not say when died now."""
    found = []
    for death in deaths:
        if death.get("arm") == arm:
            at_ns = death.get("at_ns")
            why = f"{text_of(death, 'replica', arm)} died"
            found.append(Alarm(at_ns=at_ns if isinstance(at_ns, int) else now_ns, why=why))
    return found


def burst_alarms(arm: str, *, failed: int, finished: int, now_ns: int, meanwhile: str) -> list[Alarm]:
    """One alarm where a fifth of the requests that ended `meanwhile` failed, five at least; else none."""
    if failed < _BURST_REQUESTS or failed <= _BURST_SHARE * finished:
        return []
    return [Alarm(at_ns=now_ns, why=f"{failed} of {finished} requests to {arm} failed {meanwhile}")]
