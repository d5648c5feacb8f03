"""How ramps end on simulated servers: equal candidates, slow ones, and ones that stall.

Traffic goes to two servers by the ramp's weights; the candidate has fewer requests and an emptier queue until it has
half of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.simulation.engine import Served
from benchmarks.simulation.kinds import Kind, on_slots, sample
from benchmarks.simulation.promises import ALPHA, MARGIN
from benchmarks.simulation.table import Table
from benchmarks.simulation.weather import BLOCK_S, answers, arrivals, lasting_noise
from tailgate.analysis.arrays import Floats
from tailgate.analysis.judging.ramp import Standing, decide
from tailgate.analysis.settings.ramp_limits import RampLimits
from tailgate.analysis.statistics.sequential import groups_for

LIMITS = RampLimits()
_INTERIM_S = 60.0
_QS, _STEP_QS = (0.99,), (0.5, 0.9)
_METRICS = ("ttft_ms", "e2e_ms")

# A server that holds all of the traffic: at 100 % it is as busy as "calm" is.
SERVER = Kind(rate=16.0, slots=64, cox=0.1, shared=0.06, private=0.03, duration_s=LIMITS.longest_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a ramp ended: "promoted", "rollback" or "stay", at which step, after how many seconds; what was exposed."""

    action: str
    step: int
    seconds: float
    exposed: int


def ramp(seed: int, *, ratio: float = 1.0, stall_every_s: float = 0.0, stall_s: float = 2.0) -> Ended:
    """Run one ramp. The candidate's work takes `ratio` times as long.

    A compile of `stall_s` comes every `stall_every_s` on average and shows when it ends.
    """
    rng = np.random.default_rng([seed, 11])
    times = arrivals(SERVER, rng)
    noise = lasting_noise(SERVER, SERVER.shared, rng)
    work = answers(SERVER.work_s, len(times), rng) * np.exp(
        noise[times.astype(int)] + rng.standard_normal(len(times)) * SERVER.jitter
    )
    own = [np.exp(lasting_noise(SERVER, SERVER.private, rng)) for _ in range(2)]
    draw = rng.uniform(size=len(times))
    gaps = rng.exponential(stall_every_s, 200) if stall_every_s else np.zeros(0)
    alarm_s = float(gaps[0]) + stall_s if stall_every_s else math.inf
    to_candidate = np.zeros(len(times), dtype=np.bool_)
    began = 0.0
    for step, percent in enumerate(LIMITS.steps):
        # As if the step went on to the end: what comes later changes nothing that was.
        to_candidate[times >= began] = (draw < percent / 100.0)[times >= began]
        arms = [
            on_slots(times[mine], work[mine] * noise_of[times[mine].astype(int)] * slow, SERVER.slots)
            for mine, noise_of, slow in ((to_candidate, own[1], ratio), (~to_candidate, own[0], 1.0))
        ]
        failed_s, safe_s, passed_s = _times(arms)
        at = began
        while True:
            at += _INTERIM_S
            exposed = int((to_candidate & (times < at)).sum())
            if alarm_s <= at:  # an alarm does not wait for an interim analysis
                return Ended(action="rollback", step=step, seconds=alarm_s, exposed=exposed)
            standing = Standing(
                failed="a gate" if failed_s <= at else None,
                safe=safe_s <= at,
                passed=passed_s <= at,
                requests=int((to_candidate & (times >= began) & (times < at)).sum()),
            )
            action, _ = decide(standing, LIMITS, step=step, step_s=at - began)
            if action in ("rollback", "promoted") or at >= SERVER.duration_s:
                return Ended(action=action, step=step, seconds=at, exposed=exposed)
            if action == "advance":
                began = at
                break
    raise AssertionError("the last step ends by itself")


def _times(arms: list[Served]) -> tuple[float, float, float]:
    """Return when a gate fails, when the steps' gates have all passed, and when the others have; infinite: never."""
    gates = len(_METRICS) * (len(_QS) + len(_STEP_QS))
    failed: list[float] = []
    times: dict[bool, list[float]] = {True: [], False: []}
    for metric in _METRICS:
        samples = sample(arms[:1], metric), sample(arms[1:], metric)
        for q in (*_QS, *_STEP_QS):
            margin = MARGIN if q in _QS else LIMITS.step_margin
            evidence = groups_for(*samples, q=q, blocks=2, exchange="requests").evidence(margin)
            decision = evidence.decision(alpha=ALPHA, gates=gates)
            at = math.inf if decision is None else (evidence.last_block[decision[1]] % 10_000 + 1.0) * BLOCK_S
            passes = decision is not None and decision[0] == "PASS"
            times[q in _QS].append(at if passes else math.inf)
            failed.append(math.inf if passes else at)
    return min(failed), max(times[False]), max(times[True])


def outcomes(seed: int, *, ratio: float = 1.0, stall_every_s: float = 0.0) -> Floats:
    """Return (promoted, rolled back, rolled back or held at 5 % or less, hours, requests exposed)."""
    ended = ramp(seed, ratio=ratio, stall_every_s=stall_every_s)
    early = LIMITS.steps[ended.step] <= 5.0
    return np.array(
        [
            ended.action == "promoted",
            ended.action == "rollback",
            ended.action == "rollback" and early,
            ended.seconds / 60.0,
            ended.exposed,
        ],
        dtype=np.float64,
    )


def ramps_table(table: Table) -> None:
    """Add all rows."""
    worse = (("promoted", None, 0.05), ("rolled back", None, None), ("at 5 % or less", 0.8, None))
    equal = (("promoted", None, None), ("rolled back", None, 0.05))
    for name, ratio, stall_every_s, rows in (
        ("equal arms", 1.0, 0.0, equal),
        ("0.8 times", 0.8, 0.0, equal),
        ("1.5 times", 1.5, 0.0, worse),
        ("a 2 s compile every 5 minutes", 1.0, 300.0, worse),
    ):
        found = np.array(table.over_seeds(partial(outcomes, ratio=ratio, stall_every_s=stall_every_s)))
        for place, (what, least, most) in enumerate(rows):
            table.add(f"ramp, {name}: {what}", float(found[:, place].mean()), least=least, most=most)
        table.add("  minutes until it ended, half of the ramps", float(np.median(found[:, 3])))
        table.add("  requests exposed, half of the ramps", float(np.median(found[:, 4])))
