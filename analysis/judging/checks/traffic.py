"""Whether the traffic was what it claims: on schedule, split by the weights, with a sound control."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from analysis.arrays import Floats, Ints
from analysis.judging.checks.loop import Loop
from analysis.judging.validity import ESTIMATES, Check
from analysis.statistics.distributions import binomial_test, chi_square_sf
from analysis.wording import counted

_RATIO_ALPHA = 0.001  # a sample-ratio alarm is a bug report: rare by chance
_SLOWDOWN_LIMIT = 1.10
_SLOWDOWN_DRAWS = 499
_FEWEST_DURING = 5
_FOLLOWING_NS = 2_000_000  # a client that waited for an answer sends its next request within this
_MOST_FOLLOWING = 0.5
_FOLLOWING_RATIO = 5.0


def check_sample_ratio(counts: Mapping[str, int], weights: Mapping[str, float]) -> Check | None:
    """The splitter sent each arm its share of the sessions (chi-square, p >= 0.001). None where weights do not say."""
    names = [name for name in counts if weights.get(name, 0) > 0]
    total = sum(counts[name] for name in names)
    strays = [name for name in counts if name in weights and weights[name] == 0 and counts[name] > 0]
    if strays and names:
        p_value = 0.0
        reason = f"{strays[0]} has weight 0 and got {counted(counts[strays[0]], 'session')}."
        remedy = "Check the splitter's weights, and that no client pins an arm."
    elif len(names) < 2 or total == 0:
        return None
    else:
        scale = total / sum(weights[name] for name in names)
        due = {name: weights[name] * scale for name in names}
        distance = sum((counts[name] - due[name]) ** 2 / due[name] for name in names)  # Pearson's chi-square test
        p_value = float(chi_square_sf(distance, len(names) - 1))
        got = ", ".join(f"{name} {counts[name]} (expected {due[name]:.0f})" for name in names)
        reason = f"Sessions per arm: {got}" + ("." if p_value >= _RATIO_ALPHA else ": more uneven than chance.")
        remedy = "Look for requests that one arm loses, and check the splitter's weights."
    return Check(
        check="sample ratio",
        ok=p_value >= _RATIO_ALPHA,
        value=p_value,
        limit=_RATIO_ALPHA,
        reason=reason,
        affects=(*ESTIMATES, "error"),
        remedy=remedy,
    )


def check_shares_by_stretch(stretches: Sequence[tuple[Mapping[str, int], Mapping[str, float]]]) -> Check:
    """The splitter sent each arm its share of the sessions in each stretch of weights, given as (sessions by arm,
    weights): exact binomial tests, p >= 0.001 over all of them together (Bonferroni).

    A session that lasts over a change counts in both stretches, as the splitter places it anew.
    """
    worst, words, tests = 1.0, "", 0
    for index, (counts, weights) in enumerate(stretches, start=1):
        total, whole = sum(counts.values()), sum(weights.values())
        if not total or not whole:
            continue
        for arm, count in counts.items():
            tests += 1
            p_value = binomial_test(count, total, weights.get(arm, 0.0) / whole)
            if p_value < worst:
                due = total * weights.get(arm, 0.0) / whole
                worst, words = p_value, f"{arm} got {count} of {total} sessions in stretch {index} (expected {due:.0f})"
    p_value = min(1.0, worst * max(1, tests))
    ok = p_value >= _RATIO_ALPHA
    return Check(
        check="sample ratio",
        ok=ok,
        value=p_value,
        limit=_RATIO_ALPHA,
        reason=f"Over {len(stretches)} stretches of weights, each arm got its share of the sessions."
        if ok
        else f"{words}: more uneven than chance.",
        affects=(*ESTIMATES, "error"),
        remedy="Look for requests that one arm loses, and that no client pins an arm.",
    )


def check_schedules(repeated: Sequence[Sequence[int]], *, mirrored: bool) -> Check:
    """Every trial drove a schedule of its own; `repeated` lists the trials that shared one.

    Under a mirrored design both arms had the schedule, so that it favours neither; elsewhere it decides which requests
    an arm got, and the same chance counts twice.
    """
    shared = ", ".join(" and ".join(map(str, trials)) for trials in repeated)
    return Check(
        check="schedules",
        ok=not repeated,
        value=float(len(repeated)),
        limit=0.0,
        reason=f"Trials {shared} drove the same schedule, of one seed: they say less than trials with one each."
        if repeated
        else "Every trial drove a schedule of its own.",
        affects=() if mirrored else ESTIMATES,
        remedy="Give each run another seed (tailgate run --seed N).",
    )


def check_open_loop(
    open_loop: bool | None,
    scheduled: bool,
    concurrency: int | None = None,
    follows: tuple[float, float] | None = None,
    loops: Sequence[Loop] = (),
    pace: str = "",
) -> Check:
    """Latency counts from a schedule that does not wait for the server.

    `follows` is the result of `starts_after_ends` and `loops` those of `loop_of` for each set of requests: records of
    other tools need not say that their users waited. `pace` says in sentences how another tool sent its requests.
    """
    share, chance = follows or (0.0, 0.0)
    followed = share > _MOST_FOLLOWING and share > _FOLLOWING_RATIO * chance
    waited = any(loop.closed for loop in loops)
    known = all(loop.known for loop in loops)
    ok = scheduled and open_loop is not False and not (open_loop is None and (followed or waited or not known))
    reason = "Requests started on schedule, whatever the server did."
    remedy = "Drive the arms by a schedule and record scheduled_ns."
    if open_loop is False:
        most = "" if concurrency is None else f", at most {counted(concurrency, 'request')} under way to each arm"
        reason = f"The load waited for the server (closed loop{most}), which hides the tail."
    elif not scheduled:
        reason = "Requests carry no scheduled time, so waiting before they were sent may be missing."
    elif not ok and followed:
        reason = (
            f"{100.0 * share:.0f} % of the requests start within 2 ms of the end of another ({100.0 * chance:.2g} % "
            "would by chance): the load waited for the server (closed loop), which hides the tail."
        )
    elif not ok and waited:
        kept = min(loop.kept for loop in loops)
        reason = (
            "Requests start the later the more are in flight, as users do who wait for an answer before they ask again "
            f"(closed loop): a stall of 1 s may take {100.0 * (1.0 - kept):.0f} % of the load, which hides the tail."
        )
    elif not ok:
        reason = (
            "Nothing says whether the load waited for the server, and these requests are too few or too even to tell."
        )
        remedy = "Say open_loop in trial.json if a schedule drove the arms; else record more requests."
    if pace:
        reason = pace if ok or open_loop is False else f"{pace} {reason}"
        remedy = "Have the tool send by a rate, with no limit on requests under way, and keep when each was due."
    return Check(check="open loop", ok=ok, reason=reason, affects=ESTIMATES, remedy=remedy)


def starts_after_ends(start_ns: Ints, end_ns: Ints) -> tuple[float, float]:
    """The share of requests that start within 2 ms of the end of another, and the share that would by chance.

    Shape (n,) each, of one arm. Users who wait for an answer before they ask again start right after ends; a schedule
    does not know of them. (0, 0) of fewer than two requests.
    """
    if len(start_ns) < 2:
        return 0.0, 0.0
    ends = np.sort(end_ns)
    span = max(int(end_ns.max() - start_ns.min()), 1)
    before = np.searchsorted(ends, start_ns, side="right") - 1
    close = int(((before >= 0) & (start_ns - ends[np.maximum(before, 0)] <= _FOLLOWING_NS)).sum())
    covered = _FOLLOWING_NS + int(np.minimum(np.diff(ends), _FOLLOWING_NS).sum())
    return close / len(ends), min(1.0, covered / span)


def check_control_errors(control: str, failed: int, requests: int, limit_pct: float) -> Check:
    """The control itself works: where it fails, the test bed is broken and nothing can be blamed on an arm."""
    share = 100.0 * failed / requests if requests else 0.0
    ok = share <= limit_pct
    return Check(
        check="control errors",
        ok=ok,
        value=share,
        limit=limit_pct,
        reason=f"{failed} of {counted(requests, 'request')} of {control} failed ({share:.3g} %), "
        f"limit {limit_pct:g} %.",
        affects=(*ESTIMATES, "error"),
        remedy=f"Find out why {control} fails, then run again.",
    )


def check_interference(slowdown: float | None, p_value: float | None, *, taking_turns: bool = False) -> Check:
    """The control does not slow down while other arms compile."""
    if slowdown is None or p_value is None:
        return Check(
            check="interference",
            ok=True,
            limit=_SLOWDOWN_LIMIT,
            reason="Too few requests of the control fell into compiles of other arms to see interference.",
            affects=ESTIMATES,
        )
    ok = slowdown <= _SLOWDOWN_LIMIT or p_value > 0.05
    return Check(
        check="interference",
        ok=ok,
        value=slowdown,
        limit=_SLOWDOWN_LIMIT,
        reason=f"While other arms compiled, requests of the control took {slowdown:.2f} times as long"
        + (": they share a machine." if not ok else ", which is within chance." if slowdown > _SLOWDOWN_LIMIT else "."),
        affects=ESTIMATES,
        # Turns keep requests apart, but a compile outlasts its turn.
        remedy="Give each arm its own cores or host, or judge those that compile while serving in a run of their own."
        if taking_turns
        else "Give each arm its own cores or host, or use the switchback design.",
    )


def slowdown_during(
    excess: Floats, start_s: Floats, inside: Floats, *, bin_s: float, rng: np.random.Generator
) -> tuple[float | None, float | None]:
    """How many times longer requests took inside some stretches than outside, and p of no difference.

    `excess` is log(time taken / time expected by length) of requests that started at `start_s` (seconds on a circle
    of len(inside) bins of `bin_s`); `inside` is the share of each bin that lies in the stretches. The null turns the
    stretches around the circle, which keeps how neighbouring requests and stretches depend on each other.
    (None, None) when fewer than five requests started inside or outside.
    """
    bins = len(inside)
    index = np.minimum((start_s / bin_s).astype(np.int64), bins - 1)
    counts = np.bincount(index, minlength=bins).astype(np.float64)
    sums = np.bincount(index, weights=excess, minlength=bins)
    if counts @ inside < _FEWEST_DURING or counts @ (1.0 - inside) < _FEWEST_DURING:
        return None, None

    def effect(weights: Floats) -> float:
        within, without = counts @ weights, counts @ (1.0 - weights)
        if within <= 0 or without <= 0:
            return 0.0
        return float(sums @ weights / within - sums @ (1.0 - weights) / without)

    seen = effect(inside)
    turned = [effect(np.roll(inside, int(turn))) for turn in rng.integers(1, max(bins, 2), size=_SLOWDOWN_DRAWS)]
    as_high = sum(value >= seen - 1e-12 for value in turned)
    return math.exp(seen), (as_high + 1) / (_SLOWDOWN_DRAWS + 1)
