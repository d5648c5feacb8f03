"""Whether the traffic was what it claims: on schedule, split by the weights, the same for every arm."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tailgate.analysis.arrays import Bools, Floats
from tailgate.analysis.checks.check import ESTIMATES, Check, Evidence, rule
from tailgate.analysis.checks.complete import allowed_missing, is_recorded_whole
from tailgate.analysis.judging.ramp import ramp_of
from tailgate.analysis.run.attribution import OTHER
from tailgate.analysis.run.compile_events import windows_of
from tailgate.analysis.run.pairs import in_pairs, matters_ms
from tailgate.analysis.run.run import Run
from tailgate.analysis.run.spikes import expected_ms, usual_ms
from tailgate.analysis.run.trials import SECOND
from tailgate.analysis.statistics.distributions import binomial_test

_ON_ITS_WAY_NS = 250_000_000  # the longest way of a request to the splitter, which chooses its arm
_RATIO_ALPHA = 0.001  # a sample-ratio alarm is a bug report: rare by chance
_RAMP_ALPHA = 1e-5  # of a ramp, which asks at every interim analysis
_SLOWDOWN_LIMIT = 1.10
_SLOWDOWN_ALPHA = 0.05
_SLOWDOWN_DRAWS = 499
_FEWEST_DURING = 5
_LONELY = "requests that went to one of the two arms alone"
_APART = "pairs scheduled up to {most} ms apart, limit {limit} ms"


@rule(
    "open loop",
    sees="The load waited for the server, or the records do not say whether it did.",
    remedy="Send requests by a schedule or a rate, with no limit on requests under way, record scheduled_ns, and say "
    '{"complete": true, "open_loop": true} in trial-01/trial.json.',
)
def open_loop(seen: Evidence) -> Iterator[Check]:
    run, requests = seen.run, seen.run.requests
    faults = []
    if run.reported_open_loop is False:
        faults = ["The load waited for the server (closed loop), which hides the tail"]
    elif not len(requests) or not requests.scheduled.all():
        faults = ["Requests carry no scheduled time, so waiting before they were sent may be missing"]
    elif run.reported_open_loop is None:
        faults = ["The records do not say whether the load waited for the server (open_loop in trial.json)"]
    # How another tool sent its requests is in sentences of its own.
    yield open_loop.found([f"{fault}. {run.pace}".rstrip(" .") for fault in faults])


@rule(
    "schedules",
    sees="Trials of joined runs drove one schedule. It opens nothing of mirrored traffic.",
    says="Trials repeat one schedule (the same seed), so they are not independent: {}.",
    remedy="Give each run another seed (tailgate run --set seed=N).",
    at_end=True,
)
def schedules(seen: Evidence) -> Iterator[Check]:
    """A mirrored schedule favours no arm; elsewhere it decides which requests an arm got, and the same chance would
    count twice."""
    run = seen.run
    if run.records.joined:
        alike: dict[tuple[str, int], list[int]] = {}
        for joined in run.records.runs:
            for own in sorted(set(joined.numbers)):
                alike.setdefault((str(joined.experiment.get("seed")), own), []).append(joined.trials[own])
        shared = [" and ".join(map(str, trials)) for trials in alike.values() if len(trials) > 1]
        yield schedules.found(shared, opens=() if run.copied else ESTIMATES)


@rule(
    "sample ratio",
    sees="The splitter's shares of sessions are off in a stretch of its weights (exact binomial tests, p < "
    f"{_RATIO_ALPHA:g} over all; of a ramp p < {_RAMP_ALPHA:.5f}).",
    remedy="Look for requests that one arm loses or that a client pins to an arm, and check the splitter's weights.",
    opens=(*ESTIMATES, "error"),
)
def sample_ratio(seen: Evidence) -> Iterator[Check]:
    run = seen.run
    if run.design == "split":
        alpha = _RATIO_ALPHA if ramp_of(run) is None else _RAMP_ALPHA
        stretches = [
            ({arm: run.sessions(arm, rows) for arm in run.arms}, weights) for weights, rows in weight_stretches(run)
        ]
        faults = share_faults(stretches, alpha)
        yield from [] if faults is None else [sample_ratio.found(faults)]


def weight_stretches(run: Run) -> Iterator[tuple[Mapping[str, float], Bools]]:
    """Yield every stretch of constant splitter weights: the weights, and the requests that surely met them. Requests
    around a change belong to no stretch."""
    requests = run.requests
    # What a client did not stamp when it sent it is taken to have been sent when it was due.
    sent = np.where(requests.sent_ns.known, requests.sent_ns[:], requests.start_ns)
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


def share_faults(
    stretches: Sequence[tuple[Mapping[str, int], Mapping[str, float]]], alpha: float = _RATIO_ALPHA
) -> list[str] | None:
    """Describe the share of an arm that differs most from its weight, if by more than chance; None without a test.

    `stretches` hold (sessions by arm, weights). Exact binomial tests, adjusted for their number (Bonferroni); arms
    without a weight do not count. A session that lasts over a change of weights counts in both stretches, as the
    splitter places it anew.
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
    if not tests:
        return None
    return [f"{words}: more than chance explains"] if worst * tests < alpha else []


@rule(
    "pairs",
    sees="Copies of requests are missing (more than 2, and 0.1 %) or repeated, name no pair, or differ in time, "
    "prompt or length.",
    says="Requests are not copies of the control's: {}.",
    remedy="Send each planned request to every arm at once, and record pair_id and scheduled_ns as they were.",
    opens=(*ESTIMATES, "error"),
)
def pairs(seen: Evidence) -> Iterator[Check]:
    run = seen.run
    recorded = is_recorded_whole(run) or bool((run.requests.pair >= 0).any())
    if run.copied and not run.in_turn and recorded:
        allowed_ms = matters_ms(run, 0.5)
        for arm in (arm for arm in run.treatments if arm not in run.ended_arms):
            yield pairs.found(copy_faults(run, arm, allowed_ms=allowed_ms), arm=arm)


def copy_faults(run: Run, arm: str, *, allowed_ms: float) -> list[str]:
    """List what keeps a request of the arm from having one copy on the control in its trial, due at the same instant
    and equal in content."""
    requests, pairs, farthest_ns, lonely = run.requests, 0, 0, [np.zeros(0, dtype=np.int32)]
    asked = {"prompt tokens": requests.prompt_tokens, "answer tokens asked for": requests.max_tokens}
    asked["phase"] = requests.phase
    if run.account(arm).external or run.account(run.control).external:
        del asked["prompt tokens"]  # external servers count with tokenizers of their own
    counts: Counter[str] = Counter()
    masks = [run.of_arm(name) for name in (arm, run.control)]
    for trial in run.trials:
        arms = [requests.rows(mask, trial.number) for mask in masks]
        for own, others in (arms, arms[::-1]):
            paired, last = in_pairs(requests.pair, own, own)
            counts["rows that name no pair"] += len(own) - len(paired)
            counts["rows that are a second copy on the same arm"] += int((paired != last).sum())
            rows, copies = in_pairs(requests.pair, paired, others)
            counts[_LONELY] += len(paired) - len(rows)
            if len(rows) < len(paired):
                lonely.append(np.unique(requests.pair[paired[~np.isin(paired, rows)]]))
        pairs += len(rows)
        for what, tokens in asked.items():
            one, other = tokens[rows], tokens[copies]
            counts[f"pairs that differ in {what}"] += int(((one >= 0) & (other >= 0) & (one != other)).sum())
        if run.reported_open_loop is not False:  # the copies of a closed loop start when each arm's own user is free
            both = requests.scheduled[rows] & requests.scheduled[copies]
            both &= ~(requests.broken[rows] | requests.broken[copies])
            difference_ns = np.abs(requests.start_ns[rows[both]] - requests.start_ns[copies[both]])
            counts[_APART] += int((difference_ns > allowed_ms * 1e6).sum())
            farthest_ns = max(farthest_ns, int(difference_ns.max(initial=0)))
    counts["pairs in two trials"] = int((np.unique(np.concatenate(lonely), return_counts=True)[1] > 1).sum())
    if counts[_LONELY] <= allowed_missing(pairs + counts[_LONELY]):
        del counts[_LONELY]
    limits = {"most": f"{farthest_ns / 1e6:.4g}", "limit": f"{allowed_ms:.3g}"}
    return [f"{what.format_map(limits)} ({count})" for what, count in counts.items() if count]


@rule(
    "control errors",
    sees="The control fails more than `gates.max_error_pct`. A FAIL of errors does not survive it.",
    remedy="Find out why the control fails, then run again.",
    opens=(*ESTIMATES, "error"),
    keeps=("recompile",),
    in_search=False,
)
def control_errors(seen: Evidence) -> Iterator[Check]:
    """If the control fails itself, the machines are broken, and no error is an arm's."""
    run, limit_pct = seen.run, seen.run.limits.max_error_pct
    answered = run.of_arm(run.control) & (run.requests.ok | run.requests.failed)
    failed, requests = int(run.requests.failed[answered].sum()), int(answered.sum())
    share = 100.0 * failed / requests if requests else 0.0
    fault = f"{failed} of {requests} requests of {run.control} failed ({share:.3g} %), limit {limit_pct:g} %"
    yield control_errors.found([fault] if share > limit_pct else [])


@rule(
    "interference",
    sees=f"The control takes over {_SLOWDOWN_LIMIT:.2f} times as long while other arms compile, more than in the "
    "same windows at other times.",
    remedy="Give each arm its own cores or host, or judge those that compile while serving in a run of their own.",
)
def interference(seen: Evidence) -> Iterator[Check]:
    slowdown, p_value = _slowdown(seen.run)
    if slowdown is not None and p_value is not None:
        fault = (
            f"While other arms compiled, requests of the control took {slowdown:.2f} times as long, limit "
            f"{_SLOWDOWN_LIMIT:.2f}: they share a machine"
        )
        yield interference.found([fault] if slowdown > _SLOWDOWN_LIMIT and p_value <= _SLOWDOWN_ALPHA else [])


def _slowdown(run: Run) -> tuple[float | None, float | None]:
    """Return how much longer the control's requests took while other arms compiled, and the p-value."""
    requests = run.requests
    events = [event for event in run.events if event.serving and event.stalls and event.arm != run.control]
    own = run.of_arm(run.control) & requests.ok & (requests.e2e_ms > 0)
    usual = usual_ms(requests, own & (run.attribution.cause == OTHER)) if events else None
    if usual is None:
        return None, None
    bin_s = max(0.25, run.seconds / 8000.0)
    inside: list[Floats] = []
    starts: list[Floats] = []
    excess: list[Floats] = []
    offset = 0.0
    for trial in run.trials:
        bins = max(1, math.ceil(trial.seconds / bin_s))
        edges = trial.start_ns + (np.arange(bins + 1) * bin_s * SECOND).astype(np.int64)
        windows = windows_of((event.start_ns, event.end_ns) for event in events if event.trial == trial.number)
        inside.append(windows.overlap_ns(edges[:-1], edges[1:]) / (bin_s * SECOND))
        rows = requests.rows(own, trial.number)
        rows = rows[expected_ms(requests, usual, rows) > 0]
        since = np.clip((requests.start_ns[rows] - trial.start_ns) / 1e9, 0.0, bins * bin_s - 1e-6)
        starts.append(since + offset)
        took = np.log(requests.e2e_ms[rows] / expected_ms(requests, usual, rows))
        excess.append(took - took.mean() if took.size else took)  # trials may run on machines of other speeds
        offset += bins * bin_s
    return slowdown_during(*map(np.concatenate, (excess, starts, inside)), bin_s=bin_s, rng=run.rng(1))


def slowdown_during(
    excess: Floats, start_s: Floats, inside: Floats, *, bin_s: float, rng: np.random.Generator
) -> tuple[float | None, float | None]:
    """Return how many times longer requests took inside some stretches than outside, and p of no difference.

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
