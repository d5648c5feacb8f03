"""How often evidence that is analysed every minute errs on made-up servers, and how soon it decides.

A run that is not decided within 40 minutes is open.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import median

import numpy as np

from benchmarks.simulation.kinds import KINDS, Kind, pair, samples
from benchmarks.simulation.promises import ALPHA, AT_MARGIN, MARGIN
from benchmarks.simulation.table import Table
from benchmarks.simulation.weather import BLOCK_S
from tailgate.analysis.arrays import Floats
from tailgate.analysis.judging.paths import AGREEING, Decided, first_decided
from tailgate.analysis.run.slo import judge_share
from tailgate.analysis.statistics.compare import Sample, compare
from tailgate.analysis.statistics.sequential import SEGMENTS, SEPARATION, Evidence, Outcome, groups_for
from tailgate.analysis.statistics.share_evidence import FEWEST_BLOCKS, share_evidence, tail_effects

LONGEST_S = 2400.0
MINUTE_S = 60.0
_BLOCKS = 2  # of 30 s, to a group
LEAST_BLOCKS = 18  # of one analysis
_RUNS = 120

# Minutes until half of the runs are decided: what a mixture of exp(λS - λ²S²/2) over minutes needs, S the swap score at
# each minute's pooled p99, without paying for groups that resemble each other. By kind and ratio.
TO_BEAT = {
    ("calm", 1.0): 15.5,
    ("calm", 1.2): 17.0,
    ("calm", 1.5): 12.5,
    ("calm", 0.8): 13.0,
    ("jams", 1.0): 20.0,
    ("jams", 1.2): 21.0,
    ("jams", 1.5): 13.0,
    ("jams", 0.8): 13.0,
}
HARM, SOON_MINUTES = 2.0, 3.5


def decided(
    kind: Kind, seed: int, *, ratio: float = 1.0, slower: float = 1.0, metric: str = "e2e"
) -> tuple[Outcome, float] | None:
    """Return the verdict on p99 of the metric and its minute; None if it stays open.

    The treatment's latencies are `ratio` times as long, or its steps take `slower` times as long.
    """
    if kind.trials == 1:
        kind = replace(kind, duration_s=LONGEST_S)
    trials = pair(kind, np.random.default_rng([seed, 6]), slower=slower)
    found: Decided | None = None
    for block_s, blocks, separation in ((BLOCK_S, _BLOCKS, 1.0), (BLOCK_S / SEGMENTS, 1, SEPARATION)):
        one, other = samples(trials, f"{metric}_ms", ratio=ratio, block_s=block_s)
        groups = groups_for(one, other, q=0.99, blocks=blocks, exchange="arms", separation=separation)
        evidence = groups.evidence(MARGIN)
        decision = evidence.decision(alpha=ALPHA)
        if decision is not None and decision[0] == "PASS":
            decision = _passed_by_all(evidence, (one, other), parts=round(BLOCK_S / block_s))
        if decision is not None:
            block = int(evidence.last_block[decision[1]])  # counted from ten thousand times the number of its trial
            before_s = (block // 10_000 - 1) * kind.duration_s
            found = first_decided(found, (decision[0], before_s + (block % 10_000 + 1) * block_s))
    return None if found is None else (found[0], found[1] / MINUTE_S)


def _passed_by_all(evidence: Evidence, arms: tuple[Sample, Sample], *, parts: int) -> tuple[Outcome, int] | None:
    """Return the first outcome, where a PASS needs one by a single analysis of all blocks until then too.

    The blocks of the evidence are `parts` to a block of the analysis.
    """
    fails = np.flatnonzero(evidence.may_fail & (evidence.harm >= -math.log(ALPHA)))
    for place in np.flatnonzero(evidence.may_pass & evidence.safe(alpha=ALPHA)):
        if len(fails) and fails[0] <= place:
            break
        seen = [sample.only(sample.block <= evidence.last_block[place]) for sample in arms]
        # Trials are numbered from 1, and their blocks from ten thousand times that.
        one, other = (replace(sample, block=sample.trial * 10_000 + sample.block % 10_000 // parts) for sample in seen)
        item = compare(one, other, qs=(0.99,), margin=MARGIN, alpha=ALPHA)[0]
        if item.p_noninferior is None or item.p_noninferior <= AGREEING * ALPHA:
            return "PASS", int(place)
    return ("FAIL", int(fails[0])) if len(fails) else None


def errors(kind: Kind, seed: int, *, ratio: float = 1.0, slower: float = 1.0, metric: str = "e2e") -> Floats:
    """Return (PASS, FAIL) as 0 or 1: at the margin both are wrong."""
    found = decided(kind, seed, ratio=ratio, slower=slower, metric=metric)
    return np.array([found is not None and found[0] == word for word in ("PASS", "FAIL")], dtype=np.float64)


def objective_errors(
    limit_ms: float, kind: Kind, seed: int, *, allowed: float, minutes: float, sequential: bool
) -> Floats:
    """Return (PASS, FAIL) of an objective on E2E that the allowed share of all requests misses: both are wrong."""
    if kind.trials == 1:
        kind = replace(kind, duration_s=minutes * MINUTE_S)
    one, _ = samples(pair(kind, np.random.default_rng([seed, 8])), "e2e_ms")
    block = np.unique(one.block, return_inverse=True)[1]
    missed = one.values > limit_ms
    verdict: str | None
    if sequential:
        blocks = int(block.max()) + 1
        tail, far = tail_effects(one.values, block, blocks=blocks, allowed=allowed, limit_ms=limit_ms)
        bad, requests = np.bincount(block[missed], minlength=blocks), np.bincount(block, minlength=blocks)
        evidence = share_evidence(bad, requests, allowed=allowed, tail=tail, far=far, least_blocks=FEWEST_BLOCKS)
        found = evidence.decision(alpha=ALPHA)
        verdict = None if found is None else found[0]
    else:
        verdict = judge_share(
            missed,
            block,
            allowed=allowed,
            alpha=ALPHA,
            ms=one.values,
            limit_ms=limit_ms,
            least_blocks=LEAST_BLOCKS,
        ).verdict
    return np.array([verdict == word for word in ("PASS", "FAIL")], dtype=np.float64)


def limit_missed_by(allowed: float, kind: Kind) -> float:
    """Return the E2E in ms that the allowed share of requests exceeds, over many runs together."""
    runs = (samples(pair(kind, np.random.default_rng([seed, 9])), "e2e_ms")[0].values for seed in range(_RUNS))
    return float(np.quantile(np.concatenate(list(runs)), 1.0 - allowed))


def objectives_table(table: Table) -> None:
    """Add the rows of objectives that an arm misses by exactly as much as is allowed, on every kind of server.

    p99 is an [slo]; 0.5 % is `gates.max_error_pct` where requests fail at their deadline.
    """
    for allowed, what in ((0.01, "p99"), (0.005, "errors 0.5 %")):
        for name, kind in KINDS.items():
            limit_ms = limit_missed_by(allowed, kind)
            for how, minutes, most in (
                ("analysed every block", LONGEST_S / MINUTE_S, True),
                ("once after 20 min", 20.0, False),
                ("once after 9 min", 9.0, False),
            ):
                passed, failed = table.means(
                    partial(objective_errors, limit_ms, kind, allowed=allowed, minutes=minutes, sequential=most)
                )
                table.add(f"{what}, {name}, exactly at its limit, {how}: PASS", passed, most=0.08)
                table.add("  the same: FAIL", failed, most=0.08)


def sequential_table(table: Table) -> None:
    """Add all rows."""
    for name, kind in KINDS.items():
        for metric in ("e2e", "ttft"):
            passed, failed = table.means(partial(errors, kind, ratio=1.0 + MARGIN, metric=metric))
            table.add(f"p99 {metric}, {name}, latencies at the margin: PASS or FAIL", passed + failed, most=0.08)
    for (name, metric), slower in AT_MARGIN.items():
        passed, failed = table.means(partial(errors, KINDS[name], slower=slower, metric=metric))
        table.add(f"p99 {metric}, {name}, steps slow up to the margin: PASS", passed, most=0.08)
        table.add("  the same: FAIL", failed)
    for (name, ratio), most in TO_BEAT.items():
        found = table.over_seeds(partial(decided, KINDS[name], ratio=ratio))
        right = "PASS" if ratio <= 1.0 else "FAIL"
        share = float(np.mean([item is not None and item[0] == right for item in found]))
        table.add(f"p99 e2e, {name}, {ratio:g} times: {right}", share)
        table.add("  minutes until half are decided", _minutes(found), most=most)
    few, many = (partial(replace, rate=rate, slots=slots) for rate, slots in ((5.0, 20), (50.0, 200)))
    for words, offered in (("5/s", few), ("50/s", many)):
        for name, ratio in product(("calm", "jams", "drift", "static"), (0.5, HARM)):
            found = table.over_seeds(partial(decided, offered(KINDS[name]), ratio=ratio))
            table.add(
                f"p99 e2e, {name}, {words}, {ratio:g} times: minutes until half are decided",
                _minutes(found),
                most=SOON_MINUTES,
            )


def _minutes(found: list[tuple[Outcome, float] | None]) -> float:
    """Return the median over all runs; an open one has no end."""
    return float(median(np.inf if item is None else item[1] for item in found))
