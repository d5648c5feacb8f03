"""Whether the traffic was what it claims: on schedule, split by the weights, the same for every arm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from analysis.arrays import Bools, Floats
from analysis.checks.check import ESTIMATES, Check, Evidence, Rule
from analysis.checks.complete import is_recorded_whole
from analysis.judging.ramp_account import ramp_of
from analysis.run.compile_events import windows_of
from analysis.run.pairs import Copies, copies_of, matters_ms
from analysis.run.run import Run
from analysis.run.spikes import normal_e2e_ms
from analysis.run.trials import SECOND
from analysis.statistics.distributions import binomial_test
from analysis.wording import counted

_ON_ITS_WAY_NS = 250_000_000  # the longest way of a request to the splitter, which chooses its arm
_MISSING_SLACK = 2  # copies that may be missing: those under way when recorders stop
_MISSING_SHARE = 0.001
_RATIO_ALPHA = 0.001  # a sample-ratio alarm is a bug report: rare by chance
_RAMP_ALPHA = 1e-5  # of a ramp, which asks at every interim analysis
_SLOWDOWN_LIMIT = 1.10
_SLOWDOWN_ALPHA = 0.05
_SLOWDOWN_DRAWS = 499
_FEWEST_DURING = 5


# --- Schedules and shares ---------------------------------------------------------------------------------------------


def _open_loop(seen: Evidence) -> Iterable[Check]:
    """Latency must count from a schedule that does not wait for the server."""
    run, requests = seen.run, seen.run.requests
    scheduled = len(requests) > 0 and bool(requests.scheduled.all())
    reason, remedy = "", OPEN_LOOP.remedy
    if run.reported_open_loop is False:
        most = (
            "" if run.concurrency is None else f", at most {counted(run.concurrency, 'request')} under way to each arm"
        )
        reason = f"The load waited for the server (closed loop{most}), which hides the tail."
    elif not scheduled:
        reason = "Requests carry no scheduled time, so waiting before they were sent may be missing."
    elif run.reported_open_loop is None:
        reason = "The records do not say whether the load waited for the server (open_loop in trial.json)."
        remedy = 'If a schedule drove the arms, say {"complete": true, "open_loop": true} in trial-01/trial.json.'
    ok = not reason
    if run.pace:  # in sentences, how another tool sent its requests
        reason = run.pace if ok or run.reported_open_loop is False else f"{run.pace} {reason}"
        remedy = "Have the tool send by a rate, with no limit on requests under way, and keep when each was due."
    yield OPEN_LOOP.row(ok, reason, remedy=remedy)


OPEN_LOOP = Rule(
    name="open loop",
    find=_open_loop,
    sound="Requests started on schedule, whatever the server did.",
    remedy="Drive the arms by a schedule and record scheduled_ns.",
)


def _schedules(seen: Evidence) -> Iterable[Check]:
    """Under a mirrored design both arms had the schedule, so that it favours neither; elsewhere it decides which
    requests an arm got, and the same chance counts twice."""
    run = seen.run
    if not run.records.joined:
        return
    shared = ", ".join(" and ".join(map(str, trials)) for trials in run.repeated_schedules)
    reason = f"Trials {shared} drove the same schedule, of one seed: they say less than trials with one each."
    count = len(run.repeated_schedules)
    opens = () if run.copied else ESTIMATES
    yield SCHEDULES.row(not count, reason if count else "", opens=opens)


SCHEDULES = Rule(
    name="schedules",
    find=_schedules,
    sound="Every trial drove a schedule of its own.",
    remedy="Give each run another seed (tailgate run --seed N).",
    at_end=True,
)


def _sample_ratio(seen: Evidence) -> Iterable[Check]:
    run = seen.run
    if run.design == "split":
        alpha = _RATIO_ALPHA if ramp_of(run) is None else _RAMP_ALPHA
        stretches = [
            ({arm: run.sessions(arm, rows) for arm in run.arms}, weights) for weights, rows in weight_stretches(run)
        ]
        yield from sample_ratio(stretches, alpha)


def weight_stretches(run: Run) -> Iterator[tuple[Mapping[str, float], Bools]]:
    """The stretches of every trial in which the splitter's weights stayed as they were: the weights, and the requests
    for which the splitter surely had them. Those around a change are in none."""
    requests = run.requests
    # What a client did not stamp when it sent it is taken to have been sent when it was due.
    sent = np.where(requests.sent_ns > 0, requests.sent_ns, requests.start_ns)
    for trial in run.trials:
        usable = ~requests.broken & (requests.trial == trial.number)
        changes = [change for change in run.records.weights if change.trial == trial.number]
        if not changes:
            yield run.weights, usable
        for index, change in enumerate(changes):
            rows = usable.copy()
            if index:  # before the first change there was none
                rows &= sent >= (change.done_ns or change.at_ns)
            if index + 1 < len(changes):
                rows &= sent < changes[index + 1].at_ns - _ON_ITS_WAY_NS
            yield dict(change.weights), rows


def sample_ratio(
    stretches: Sequence[tuple[Mapping[str, int], Mapping[str, float]]], alpha: float = _RATIO_ALPHA
) -> Iterable[Check]:
    """The splitter sent each arm its share of the sessions in each stretch of weights, given as (sessions by arm,
    weights): exact binomial tests, adjusted for their number (Bonferroni). Nothing where weights do not say.

    A session that lasts over a change of weights counts in both stretches, as the splitter places it anew.
    """
    worst, words, tests = 1.0, "", 0
    for number, (sessions, weights) in enumerate(stretches, start=1):
        counts = {arm: count for arm, count in sessions.items() if arm in weights}
        total, whole = sum(counts.values()), sum(weights[arm] for arm in counts)
        for arm, count in counts.items() if total and whole and len(counts) > 1 else ():
            tests += 1
            share = weights[arm] / whole
            p_value = binomial_test(count, total, share)
            if p_value < worst:
                worst, words = p_value, f"{arm} got {count} of {total} sessions (expected {total * share:.0f})"
                words += f" in stretch {number} of the weights" if len(stretches) > 1 else ""
    p_value = min(1.0, worst * tests)
    if tests:
        ok = p_value >= alpha
        yield SAMPLE_RATIO.row(ok, "" if ok else f"{words}: farther than chance.", value=p_value, limit=alpha)


SAMPLE_RATIO = Rule(
    name="sample ratio",
    find=_sample_ratio,
    sound="Each arm got its share of the sessions.",
    remedy="Look for requests that one arm loses or that a client pins to an arm, and check the splitter's weights.",
    opens=(*ESTIMATES, "error"),
)


# --- The same for every arm -------------------------------------------------------------------------------------------


def _pairs(seen: Evidence) -> Iterable[Check]:
    run = seen.run
    recorded = is_recorded_whole(run) or bool((run.requests.pair >= 0).any())
    if run.copied and not run.in_turn and recorded:
        allowed_ms = matters_ms(run, 0.5)
        for arm in (arm for arm in run.treatments if arm not in run.ended_arms):
            yield copies(copies_of(run, arm, allowed_ms=allowed_ms), allowed_ms)


def copies(found: Copies, allowed_ms: float) -> Check:
    """Every request of the arm has one copy on the control, due at the same instant and equal in content."""
    faults = []
    if found.lonely > max(_MISSING_SLACK, int(_MISSING_SHARE * (found.pairs + found.lonely))):
        faults.append(f"{counted(found.lonely, 'request')} went to one of {found.arm} and {found.control} alone")
    if found.repeated:
        faults.append(f"{counted(found.repeated, 'row')} are a second copy on the same arm")
    if found.unpaired:
        faults.append(f"{counted(found.unpaired, 'row')} name{'s' if found.unpaired == 1 else ''} no pair")
    if found.other_trial:
        faults.append(f"{counted(found.other_trial, 'pair')} lie in two trials")
    if found.other_instant:
        faults.append(
            f"{counted(found.other_instant, 'pair')} of {found.pairs} were scheduled up to "
            f"{found.farthest_ms:.4g} ms apart, limit {allowed_ms:.3g} ms"
        )
    for what, count in found.unequal.items():
        if count:
            faults.append(f"{counted(count, 'pair')} of {found.pairs} differ in {what}")
    reason = f"{'; '.join(faults)}: they are not copies of the same requests." if faults else ""
    return PAIRS.row(not faults, reason, value=found.farthest_ms, limit=allowed_ms, arm=found.arm)


PAIRS = Rule(
    name="pairs",
    find=_pairs,
    sound="Every request has a copy on the control, due at the same instant.",
    remedy="Send each planned request to every arm at once, and record pair_id and scheduled_ns as they were.",
    opens=(*ESTIMATES, "error"),
)


def _control_errors(seen: Evidence) -> Iterable[Check]:
    """Where the control itself fails, the machines are broken, and errors cannot be attributed to an arm."""
    run, control, limit_pct = seen.run, seen.run.control, seen.run.limits.max_error_pct
    answered = run.of_arm(control) & (run.requests.ok | run.requests.failed)
    failed, requests = int(run.requests.failed[answered].sum()), int(answered.sum())
    share = 100.0 * failed / requests if requests else 0.0
    yield CONTROL_ERRORS.row(
        share <= limit_pct,
        f"{failed} of {counted(requests, 'request')} of {control} failed ({share:.3g} %), limit {limit_pct:g} %.",
        value=share,
        limit=limit_pct,
        remedy=f"Find out why {control} fails, then run again.",
    )


CONTROL_ERRORS = Rule(
    name="control errors",
    find=_control_errors,
    sound="The control works.",
    opens=(*ESTIMATES, "error"),
    keeps=("recompile",),
    in_search=False,
)


# --- Interference -----------------------------------------------------------------------------------------------------


def _interference(seen: Evidence) -> Iterable[Check]:
    slowdown, p_value = _slowdown(seen.run)
    # Turns keep requests apart, but a compile outlasts its turn.
    yield interference(slowdown, p_value, taking_turns=seen.run.design == "switchback")


def interference(slowdown: float | None, p_value: float | None, *, taking_turns: bool = False) -> Check:
    """The control does not slow down while other arms compile."""
    if slowdown is None or p_value is None:
        reason = "Too few requests of the control fell into compiles of other arms to see interference."
        return INTERFERENCE.row(True, reason, limit=_SLOWDOWN_LIMIT)
    ok = slowdown <= _SLOWDOWN_LIMIT or p_value > _SLOWDOWN_ALPHA
    so = ": they share a machine" if not ok else ", which is within chance" if slowdown > _SLOWDOWN_LIMIT else ""
    return INTERFERENCE.row(
        ok,
        f"While other arms compiled, requests of the control took {slowdown:.2f} times as long{so}.",
        value=slowdown,
        limit=_SLOWDOWN_LIMIT,
        remedy="Give each arm its own cores or host, or judge those that compile while serving in a run of their own."
        if taking_turns
        else INTERFERENCE.remedy,
    )


INTERFERENCE = Rule(
    name="interference",
    find=_interference,
    sound="The control did not slow down while other arms compiled.",
    remedy="Give each arm its own cores or host, or use the switchback design.",
)


def _slowdown(run: Run) -> tuple[float | None, float | None]:
    """How much longer the control's requests took while other arms compiled, and the p-value."""
    requests = run.requests
    events = [event for event in run.events if event.serving and event.stalls and event.arm != run.control]
    if not events:
        return None, None
    own = run.of_arm(run.control) & requests.ok
    # What is normal on one machine may be slow on another.
    of_machine = run.machines.codes(requests.trial)
    expected = np.zeros(len(requests))
    for place in range(len(run.machines)):
        on_it = of_machine == place
        normal = normal_e2e_ms(requests, own & on_it & (run.attribution.cause == 0))
        if normal is None:
            return None, None
        expected[on_it] = normal[on_it]
    own &= (expected > 0) & (requests.e2e_ms > 0)
    bin_s = max(0.25, run.seconds / 8000.0)
    inside: list[Floats] = []
    starts, excess = [], []
    offset = 0.0
    for trial in run.trials:
        bins = max(1, math.ceil(trial.seconds / bin_s))
        edges = trial.start_ns + (np.arange(bins + 1) * bin_s * SECOND).astype(np.int64)
        windows = windows_of((event.start_ns, event.end_ns) for event in events if event.trial == trial.number)
        inside.append(windows.overlap_ns(edges[:-1], edges[1:]) / (bin_s * SECOND))
        rows = own & (requests.trial == trial.number)
        since = np.clip((requests.start_ns[rows] - trial.start_ns) / 1e9, 0.0, bins * bin_s - 1e-6)
        starts.append(since + offset)
        excess.append(np.log(requests.e2e_ms[rows] / expected[rows]))
        offset += bins * bin_s
    return slowdown_during(*map(np.concatenate, (excess, starts, inside)), bin_s=bin_s, rng=run.rng(1))


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

    effect_seen = effect(inside)
    turned = [effect(np.roll(inside, int(turn))) for turn in rng.integers(1, max(bins, 2), size=_SLOWDOWN_DRAWS)]
    as_high = sum(value >= effect_seen - 1e-12 for value in turned)
    return math.exp(effect_seen), (as_high + 1) / (_SLOWDOWN_DRAWS + 1)
