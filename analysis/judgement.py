"""From a run to what follows from it: every comparison, gate and check made, and the verdict on each arm.

Here the numbers that the run holds meet the modules that judge them. Nothing is written and nothing is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from analysis.compare import Comparison, Sample, compare, decide
from analysis.gates import (
    INCONCLUSIVE,
    CompileFacts,
    Gate,
    death_gate,
    error_gate,
    noninferiority_gate,
    recompile_gates,
    slo_gate,
)
from analysis.generators import check_generators
from analysis.planner import comparison_needed_s, share_needed_s
from analysis.records import METRICS
from analysis.run import SECOND, Run
from analysis.saturation import brackets, goodput_gate, is_search
from analysis.slo import ShareResult, SloTarget, judge_share, misses, observed
from analysis.spikes import RECOMPILE_KINDS, normal_e2e_ms, windows_of
from analysis.validity import (
    LENGTH_CHECKS,
    TAIL_REQUESTS,
    Check,
    apply_checks,
    check_answers,
    check_autocorrelation,
    check_blocks,
    check_comparable,
    check_complete,
    check_control_errors,
    check_counts,
    check_cross,
    check_cut,
    check_deaths,
    check_equal_work,
    check_generator_lag,
    check_interference,
    check_length,
    check_open_loop,
    check_parity,
    check_records,
    check_sample_ratio,
    check_tail,
    slowdown_during,
)
from analysis.verdict import Advice, advise, combined, headline

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What was found of a run. Mappings are by arm."""

    steady: tuple[Comparison, ...]  # on these the gates rest
    everything: tuple[Comparison, ...]  # cold start and compiles included; reported beside
    facts: Mapping[str, CompileFacts]
    slo: Mapping[str, tuple[Gate, ...]]  # of every arm, the control included, before the checks
    gates: tuple[Gate, ...]  # of the treatments, after the checks
    checks: tuple[Check, ...]
    verdicts: Mapping[str, str]  # of the treatments
    overall: str
    headline: str
    advice: Advice


def judge(run: Run) -> Judgement:
    """The judgement on the run. The same records and seed give an equal one."""
    # A search drives the arms past what they hold, so their latency over all of it says nothing.
    search = is_search(run)
    steady = () if search else _comparisons(run, "steady")
    checks = _checks(run, steady)
    facts = {arm: _compile_facts(run, arm) for arm in run.arms}
    slo = {arm: tuple(_slo_gate(run, arm, target) for target in run.targets) for arm in run.arms}
    raw: list[Gate] = []
    for arm in run.treatments if search else ():
        raw += _search_gates(run, arm, facts[arm])
    for arm in run.treatments if not search else ():
        raw += [noninferiority_gate(item, _needed_s(run, item)) for item in steady if item.arm == arm]
        raw += slo[arm]
        raw += recompile_gates(arm, facts[arm], run.limits)
        raw += _error_gates(run, arm)
    gates = [_with_needed(run, before, after) for before, after in zip(raw, apply_checks(raw, checks), strict=True)]
    verdicts = {arm: combined([gate.verdict for gate in gates if gate.arm == arm]) for arm in run.treatments}
    return Judgement(
        steady=steady,
        everything=() if search else _comparisons(run, "all"),
        facts=facts,
        slo=slo,
        gates=tuple(gates),
        checks=tuple(checks),
        verdicts=verdicts,
        overall=combined(list(verdicts.values())),
        headline=headline(verdicts, gates, checks, run.control),
        advice=advise(gates, checks),
    )


# --- Comparisons ------------------------------------------------------------------------------------------------------


def _comparisons(run: Run, phase: str) -> tuple[Comparison, ...]:
    return tuple(
        decide([_comparison(run, arm, metric, phase) for arm in run.treatments for metric in run.limits.metrics])
    )


def _comparison(run: Run, arm: str, metric: str, phase: str) -> Comparison:
    """The undecided comparison of `arm` with the control.

    The steady phase leaves out the cold start and every request in flight while one of the two compiled. Both arms
    lose the same stretches, and under a mirrored design a request and its copy go together.
    """
    values = run.requests.metric_ms(metric)
    samples = []
    for name in (arm, run.control):
        mask = run.of_arm(name) & run.usable & ~np.isnan(values)
        samples.append(run.steady(mask, (arm, run.control)) if phase == "steady" else np.flatnonzero(mask))
    pairs = [run.requests.pair[rows] for rows in samples]
    paired = run.design == "mirrored" and all(len(pair) > 0 and bool((pair >= 0).all()) for pair in pairs)
    if paired:
        shared = np.intersect1d(pairs[0], pairs[1])
        samples = [rows[np.isin(pair, shared)] for rows, pair in zip(samples, pairs, strict=True)]
    treatment, control = (
        Sample(values=values[rows], block=run.block[rows], trial=run.requests.trial[rows]) for rows in samples
    )
    place = (run.arms.index(arm), METRICS.index(metric), ("steady", "all").index(phase))
    result = compare(
        treatment,
        control,
        q=run.limits.quantile,
        margin=run.limits.margin,
        alpha=run.limits.alpha,
        draws=run.limits.draws,
        rng=run.rng(0, *place),
        paired=paired,
    )
    return replace(result, arm=arm, control=run.control, metric=metric, phase=phase)


def _needed_s(run: Run, item: Comparison) -> float | None:
    return comparison_needed_s(item, block_s=run.block_s, min_blocks=run.limits.min_blocks, overhead_s=_overhead_s(run))


def _overhead_s(run: Run) -> float:
    return run.limits.cold_s * len(run.trials)


# --- Gates ------------------------------------------------------------------------------------------------------------


def _slo_gate(run: Run, arm: str, target: SloTarget) -> Gate:
    mask = run.of_arm(arm) & run.usable
    missed, counts = misses(run.requests, target)
    result, needed = _share(run, missed, counts & mask, target.allowed_share)
    return slo_gate(arm, target, result, observed(run.requests, mask, target), needed)


def _search_gates(run: Run, arm: str, facts: CompileFacts) -> list[Gate]:
    """What a saturation search judges: the load held, and what must not happen under any load."""
    found = {item.arm: item for item in brackets(run)}
    gates = [goodput_gate(found[arm], found[run.control], margin=run.limits.margin)]
    gates += recompile_gates(arm, facts, run.limits)
    # Nobody watches the process of an external arm: its death shows in errors.
    return gates if run.external(arm) else [*gates, death_gate(arm, len(run.deaths(arm)))]


def _error_gates(run: Run, arm: str) -> list[Gate]:
    requests = run.requests
    counts = run.of_arm(arm) & ~requests.broken & (requests.ok | requests.failed)
    result, needed = _share(run, requests.failed, counts, run.limits.max_error_pct / 100.0)
    gates = [error_gate(arm, result, run.limits.max_error_pct, needed)]
    if run.records.trials and not run.external(arm):
        gates.append(death_gate(arm, len(run.deaths(arm))))
    return gates


def _share(run: Run, missed: Bools, counts: Bools, allowed: float) -> tuple[ShareResult, float | None]:
    """The share of `missed` among `counts`, judged, and the run length that would decide it."""
    result = judge_share(missed[counts], run.block[counts], allowed=allowed, alpha=run.limits.alpha)
    needed = share_needed_s(
        result,
        requests_per_s=run.rate(int(counts.sum())),
        block_s=run.block_s,
        min_blocks=run.limits.min_blocks,
        alpha=run.limits.alpha,
    )
    return result, needed


def _compile_facts(run: Run, arm: str) -> CompileFacts:
    serving = run.serving_events(arm)
    recompiles = [event for event in serving if event.kind in RECOMPILE_KINDS]
    own = run.of_arm(arm) & ~run.requests.broken
    stalls = run.attribution.stall_ms[own]
    minutes = run.seconds / 60.0 * run.replicas(arm)
    # An arm that compiles has at least its warm-up to tell of; silence means that its telemetry was lost.
    silent = run.compiles(arm) and not any(event.arm == arm for event in run.events)
    return CompileFacts(
        known=run.records.events is not None and not silent,
        seen=not run.external(arm),
        recompiles=len(recompiles),
        most_in_a_trial=max(
            (sum(event.trial == trial.number for event in recompiles) for trial in run.trials), default=0
        ),
        longest_event_s=max((event.seconds for event in serving if event.stalls), default=0.0),
        longest_stall_s=float(stalls.max()) / 1e3 if stalls.size else 0.0,
        stall_s_per_min=run.stall_s(arm) / minutes if minutes > 0 else 0.0,
        requests_hit=int(run.attribution.hit[own].sum()),
        requests=int(own.sum()),
        trials=max(1, len(run.trials)),
    )


def _with_needed(run: Run, before: Gate, after: Gate) -> Gate:
    """The gate with the run length that its checks ask for, where it was decided but for them and they want length."""
    if before.verdict == INCONCLUSIVE or after.verdict != INCONCLUSIVE:
        return after
    if not set(after.blocked_by) <= LENGTH_CHECKS:
        return after
    rate = run.rate(int(run.of_arm(after.arm).sum()))
    tail_s = TAIL_REQUESTS / (1.0 - run.limits.quantile) / rate if rate > 0 else 0.0
    floor = max(run.limits.min_blocks * run.block_s, math.ceil(tail_s / run.block_s) * run.block_s)
    return replace(after, needed_s=floor + _overhead_s(run))


# --- Checks -----------------------------------------------------------------------------------------------------------


def _checks(run: Run, steady: Sequence[Comparison]) -> list[Check]:
    return [*_checks_of_all(run), *(check for arm in run.treatments for check in _checks_of(run, arm, steady))]


def _checks_of_all(run: Run) -> Iterable[Check]:
    requests, limits = run.requests, run.limits
    infos = [info for info in run.infos if info]
    counts = {arm: int(run.of_arm(arm).sum()) for arm in run.arms}
    yield check_records(run.records.problems, int(requests.broken.sum()), requests.repeated)
    yield check_complete(infos)
    closed = run.told_open_loop is False and not run.planned
    yield check_counts(counts, run.planned, mirrored=run.design == "mirrored" and not closed)
    if run.design == "split":
        ratio = check_sample_ratio({arm: run.sessions(arm) for arm in run.arms}, run.weights)
        if ratio is not None:
            yield ratio
    search = is_search(run)
    if not search:
        answered = run.of_arm(run.control) & (requests.ok | requests.failed)
        failed = int(requests.failed[answered].sum())
        yield check_control_errors(run.control, failed, int(answered.sum()), limits.max_error_pct)
    yield check_generator_lag(run.generator_lag_ms, limits.max_generator_lag_ms)
    yield from check_generators(run.records.generators, infos, limit_ms=limits.max_generator_lag_ms)
    scheduled = bool(requests.scheduled.all()) if len(requests) else False
    yield check_open_loop(run.told_open_loop, scheduled, run.concurrency)
    if run.targets and not search:
        yield check_length(run.blocks, limits, run.block_s)
    yield check_interference(*_interference(run))
    answers = run.answers(run.control)
    # a single replica is its own measure
    if len({row.get("replica") for row in answers}) > 1 or any(row.get("error") for row in answers):
        yield check_answers(run.control, answers, control=True)
    if infos:
        for arm in (name for name in run.arms if not run.external(name)):
            yield check_deaths(arm, run.deaths(arm), control=arm == run.control)


def _checks_of(run: Run, arm: str, steady: Sequence[Comparison]) -> Iterable[Check]:
    limits = run.limits
    own = [item for item in steady if item.arm == arm]
    if not is_search(run):
        yield check_blocks(arm, min((item.blocks for item in own), default=0), limits, run.block_s)
        yield check_tail(arm, min((item.requests for item in own), default=0), limits.quantile)
        yield check_autocorrelation(arm, own)
        yield check_cross(arm, own)
    intended = run.records.experiment.get("compare_models") is True
    outside = {name: str(found["kind"]) for name in (arm, run.control) if (found := run.external(name))}
    yield check_comparable(arm, run.differences(arm), intended=intended, outside=outside)
    if outside:
        yield check_equal_work(arm, run.control, run.work(arm))
    if run.parity(arm):
        yield check_parity(arm, run.parity(arm))
    if run.answers(arm):
        yield check_answers(arm, run.answers(arm), control=False)
    if is_search(run):
        return
    # The arm of the two that lost more, though the check is on the treatment's gates.
    worst = max((arm, run.control), key=lambda name: _cut_share(run, name))
    mine = run.of_arm(worst) & run.usable
    cut = check_cut(worst, int(run.requests.cut[mine].sum()), int(mine.sum()), limits.quantile)
    yield replace(cut, arm=arm)


def _cut_share(run: Run, arm: str) -> float:
    own = run.of_arm(arm) & run.usable
    return float(run.requests.cut[own].mean()) if own.any() else 0.0


def _interference(run: Run) -> tuple[float | None, float | None]:
    """How much longer the control's requests took while other arms compiled, and the p-value."""
    requests = run.requests
    own = run.of_arm(run.control) & requests.ok
    expected = normal_e2e_ms(requests, own & (run.attribution.cause == 0))
    if expected is None:
        return None, None
    own &= (expected > 0) & (requests.e2e_ms > 0)
    bin_s = max(0.25, run.seconds / 8000.0)
    inside: list[Floats] = []
    starts, excess = [], []
    offset = 0.0
    for trial in run.trials:
        bins = max(1, math.ceil(trial.seconds / bin_s))
        edges = trial.start_ns + (np.arange(bins + 1) * bin_s * SECOND).astype(np.int64)
        windows = windows_of(
            (event.start_ns, event.end_ns)
            for event in run.events
            if event.serving and event.stalls and event.trial == trial.number and event.arm != run.control
        )
        inside.append(windows.overlap_ns(edges[:-1], edges[1:]) / (bin_s * SECOND))
        mine = own & (requests.trial == trial.number)
        since = np.clip((requests.start_ns[mine] - trial.start_ns) / 1e9, 0.0, bins * bin_s - 1e-6)
        starts.append(since + offset)
        excess.append(np.log(requests.e2e_ms[mine] / expected[mine]))
        offset += bins * bin_s
    if not inside:
        return None, None
    return slowdown_during(
        np.concatenate(excess), np.concatenate(starts), np.concatenate(inside), bin_s=bin_s, rng=run.rng(1)
    )
