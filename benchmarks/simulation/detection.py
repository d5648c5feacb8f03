"""Servers that compile, collect garbage, stall with their host or by themselves: which of their stalls clients see.

Each scenario is a run of two arms whose truth is known. `detection_table` measures how many compiles show as stalls,
how often stalls open the gates on compiles of an arm that makes none, and how often an arm that compiles passes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from benchmarks.simulation.engine import Engine, Pause
from benchmarks.simulation.fleet import SLOTS, TREATMENT, Fleet, recorded
from benchmarks.simulation.records import EPOCH_NS
from benchmarks.simulation.table import Table
from tailgate.analysis.judging.gates import PASS
from tailgate.analysis.judging.gates.compiles import client_gates, may_compile
from tailgate.analysis.records.request_columns import RequestColumns
from tailgate.analysis.records.requests import requests_of
from tailgate.analysis.run.client_stalls import HOST, PART, ArmStalls, client_stalls
from tailgate.analysis.settings.gate_limits import GateLimits

NOISE = replace(SLOTS, cox=0.3, collections_s=20.0, host_stalls=2, private_stalls=1)
CASES = {
    "clean": SLOTS,
    "GC": replace(SLOTS, collections_s=5.0),
    "burst": replace(SLOTS, cox=0.5),
    "host stall": replace(SLOTS, host_stalls=4),
    # every length is a shape of its own, four in ten requests bring a new one, and none compiles
    "dynamic shapes": replace(SLOTS, step=1, cox=0.3, collections_s=20.0, host_stalls=2),
    "unrelated arm stalls": replace(SLOTS, private_stalls=4),
    "unrelated arm stalls, dynamic shapes": replace(SLOTS, step=1, private_stalls=4),
    "compiles of 2 s": replace(SLOTS, new_shapes=6, compile_s=2.0),
    "compiles of 5 s": replace(SLOTS, new_shapes=6, compile_s=5.0),
    "mixed noise": replace(NOISE, new_shapes=6, compile_s=2.0),
    "one compile of 2 s": replace(SLOTS, new_shapes=1, compile_s=2.0),
    "exact shapes, six of 2 s": replace(SLOTS, step=1, new_shapes=6, compile_s=2.0),
    "split, mixed noise": replace(NOISE, new_shapes=6, compile_s=2.0, design="split"),
    "running answers go on, six of 3 s": replace(
        SLOTS, engine=replace(SLOTS.engine, decodes_on=True), new_shapes=6, compile_s=3.0
    ),
    "heavy load, 2 s": replace(SLOTS, rate=8.0, new_shapes=6, compile_s=2.0),
}
_SLOW = Engine(token_s=2.5e-4)
_TOGETHER = replace(_SLOW, together=8)
_STATIC = Engine(kind="static", rows=8, together=4, token_s=3e-4)
# Servers whose long prompts delay the rest. None compiles by itself.
FLEETS = {
    "two replicas": Fleet(engine=_SLOW, replicas=2, rate=3.0),
    "split": Fleet(engine=_SLOW, design="split", rate=1.5),
    "split, two replicas that prefill together": Fleet(engine=_TOGETHER, design="split", replicas=2, rate=3.0),
    "split, the control three times as fast": Fleet(engine=_SLOW, design="split", rate=1.5, faster=3.0),
    "mirrored, the control three times as fast": Fleet(engine=_SLOW, rate=1.5, faster=3.0),
    "split, static batches": Fleet(engine=_STATIC, design="split", rate=0.6),
    "two replicas, static batches": Fleet(engine=_STATIC, replicas=2, rate=1.2),
    "three uneven replicas, bursts": Fleet(engine=_SLOW, replicas=3, rate=4.0, weights=(4.0, 2.0, 1.0), cox=0.4),
    "two replicas, chunked prefill": Fleet(engine=replace(_SLOW, kind="chunked"), replicas=2, rate=3.0),
    "two replicas, prefix caches": Fleet(engine=Engine(token_s=4e-4), replicas=2, rate=3.0, cached=0.6),
    "two replicas, long contexts": Fleet(
        engine=Engine(curve_tokens=8000), replicas=2, rate=2.0, median_tokens=1500.0, spread=1.2
    ),
    "two replicas, each length a shape": Fleet(engine=_SLOW, replicas=2, rate=3.0, step=1),
    "two replicas, unrelated stalls": Fleet(engine=_SLOW, replicas=2, rate=3.0, private_stalls=4),
    "stalls of long prompts": Fleet(engine=Engine(token_s=3e-5), rate=3.0, cliff_tokens=5000),
    "two fast replicas": Fleet(engine=Engine(token_s=3e-5), replicas=2, rate=4.0),
}
# Replicas that do not name themselves: a stall of one is hidden by the answers of the others.
ONE_ADDRESS = {
    f"{name}, one address": replace(FLEETS[name], one_address=True)
    for name in (
        "two replicas",
        "split, two replicas that prefill together",
        "three uneven replicas, bursts",
        "two replicas, chunked prefill",
        "two replicas, prefix caches",
        "two replicas, long contexts",
        "two fast replicas",
    )
}
QUIET = (
    *("clean", "GC", "burst", "host stall", "dynamic shapes"),
    *("unrelated arm stalls", "unrelated arm stalls, dynamic shapes"),
)


def detection_table(table: Table) -> None:
    """Add how many compiles show as stalls, and how the gates on compiles of an external arm judge each case."""

    def runs(name: str, *, tokens: bool = True) -> list[Detected]:
        return table.over_seeds(partial(detect, CASES[name], tokens=tokens))

    def fleets(made: Fleet, *, compiles: int) -> list[Detected]:
        some = replace(made, new_shapes=compiles, compile_s=3.0)
        return table.over_seeds(partial(detect, some))

    compiling = {name: runs(name) for name in CASES if name not in QUIET}
    errors = [error for found in compiling.values() for run in found for error in run.errors_s]
    for name, found in compiling.items():
        table.add(f"compiles seen as stalls: {name}", share_seen(found), least=0.95)
        table.add(f"runs that PASS: {name}", passed(found), most=0.01)
    table.add("onset error in s, median", float(np.median(errors)) if errors else 1e9, most=0.050)
    for name in QUIET:
        most = None if "arm stalls" in name else 0.03
        table.add(f"runs without a compile whose compile gates open: {name}", opened(runs(name)), most=most)
    for name, made in {**FLEETS, **ONE_ADDRESS}.items():
        for compiles in (0, 1, 3, 10):
            table.add(
                f"  runs that PASS with {compiles} compiles of 3 s: {name}", passed(fleets(made, compiles=compiles))
            )
    for name in ("compiles of 2 s", "compiles of 5 s", "mixed noise"):
        table.add(f"  compiles seen as stalls without token times: {name}", share_seen(runs(name, tokens=False)))


def share_seen(runs: Sequence[Detected]) -> float:
    """Return the share of compiles that show as a stall of the arm."""
    return sum(run.seen for run in runs) / sum(run.compiles for run in runs)


def opened(runs: Sequence[Detected]) -> float:
    """Return the share of runs in which a stall leaves the gates on compiles open."""
    return sum(run.suspected for run in runs) / len(runs)


def passed(runs: Sequence[Detected]) -> float:
    """Return the share of runs that pass a limit of no compile at all."""
    return sum(run.passes for run in runs) / len(runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Detected:
    """The stalls of one run, against the truth."""

    compiles: int
    seen: int  # compiles that a stall overlaps
    errors_s: tuple[float, ...]  # of the onset, of each stall that is one
    parts: int
    passes: bool  # the gate on the number of compiles, which allows none
    suspected: bool  # a stall may be a compile


def detect(made: Fleet, seed: int, *, tokens: bool = True) -> Detected:
    """Find the stalls of the treatment of a run of two arms; clients record token times with `tokens`."""
    treatment, table = recorded(made, np.random.default_rng([0, seed]), tokens=tokens)
    seen = client_stalls(requests_of(RequestColumns.of(table)), [TREATMENT])[TREATMENT]
    pauses = [(replica.name, pause) for replica in treatment for pause in replica.served.compiled]
    minutes = made.replicas * made.duration_s / 60.0
    return _held_against(pauses, seen, requests=sum(replica.pair.size for replica in treatment), minutes=minutes)


def _held_against(truth: Sequence[tuple[str, Pause]], seen: ArmStalls, *, requests: int, minutes: float) -> Detected:
    """Compare the arm's own stalls with the compiles of each replica."""
    own = [stall for stall in seen.stalls if stall.cause != HOST]
    count, errors, taken = 0, [], set()
    for name, pause in truth:
        overlaps = [
            min((stall.end_ns - EPOCH_NS) / 1e9, pause.start_s + pause.seconds)
            - max((stall.start_ns - EPOCH_NS) / 1e9, pause.start_s)
            if stall.replica == name
            else -1.0
            for stall in own
        ]
        if max(overlaps, default=-1.0) <= 0.0:
            continue
        count += 1
        index = int(np.argmax(overlaps))
        # Compiles that follow one another at once are one stall, with the onset of the first.
        if index not in taken:
            errors.append(abs((own[index].start_ns - EPOCH_NS) / 1e9 - pause.start_s))
        taken.add(index)
    gates = client_gates(seen, GateLimits(), requests=requests, minutes=minutes)
    return Detected(
        compiles=len(truth),
        seen=count,
        errors_s=tuple(errors),
        parts=len(seen.of_cause(PART)),
        passes=gates[0].verdict == PASS,
        suspected=any(may_compile(stall) for stall in seen.stalls),
    )
