"""From a run to what follows from it: every comparison, gate and check made, and the verdict on each arm.

Here the numbers that the run holds meet the modules that judge them. Nothing is written and nothing is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from analysis.arrays import Bools, Floats, Ints
from analysis.blackbox.firstseen import shapes_of
from analysis.blackbox.view import Outside, outside_of
from analysis.judging.bed import BedJudgement, judge_bed
from analysis.judging.blackbox_gates import outside_gates
from analysis.judging.checks.arms import check_answers, check_comparable, check_equal_work, check_token_stream
from analysis.judging.checks.compiled import check_compiled
from analysis.judging.checks.loop import Loop, loop_of
from analysis.judging.checks.machines import check_machines
from analysis.judging.checks.overload import check_overload
from analysis.judging.checks.pairs import check_copies, check_lag_apart
from analysis.judging.checks.pressure import check_pressure
from analysis.judging.checks.records import check_complete, check_counts, check_cut, check_deaths, check_records
from analysis.judging.checks.statistics import (
    check_autocorrelation,
    check_blocks,
    check_cold_starts,
    check_cross,
    check_length,
    check_tail,
)
from analysis.judging.checks.telemetry import check_telemetry
from analysis.judging.checks.traffic import (
    check_control_errors,
    check_generator_lag,
    check_interference,
    check_open_loop,
    check_sample_ratio,
    check_schedules,
    slowdown_during,
    starts_after_ends,
)
from analysis.judging.comparisons import Comparisons, blocks_at, comparisons
from analysis.judging.gates import (
    FAIL,
    INCONCLUSIVE,
    PASS,
    CompileFacts,
    Gate,
    death_gate,
    error_gate,
    goodput_ratio_gate,
    noninferiority_gate,
    parity_gate,
    recompile_gates,
    slo_gate,
)
from analysis.judging.generators import check_generators
from analysis.judging.load_steps import brackets, goodput_gate, is_search
from analysis.judging.memory import memory_gates
from analysis.judging.overload import MOST_COUNTED, Load, load_of
from analysis.judging.planner import (
    POWER,
    comparison_needed_s,
    least_length_s,
    power_of_each,
    share_needed_s,
    starts_needed,
)
from analysis.judging.rates import RateComparison, compare_rates
from analysis.judging.unforeseen import unforeseen_gates
from analysis.judging.validity import LENGTH_CHECKS, Check, apply_checks
from analysis.judging.verdict import Advice, advise, combined, headline
from analysis.judging.wording import counted
from analysis.records.plain_values import mapping
from analysis.run import pressure
from analysis.run.memory import RunMemory, memory_of
from analysis.run.pairs import copies_of, lag_apart, matters_ms
from analysis.run.run import Run
from analysis.run.slo import ShareResult, Units, judge_share, observed, units
from analysis.run.spikes import JIT, RECOMPILE_KINDS, CompileEvent, held_s, normal_e2e_ms, windows_of
from analysis.run.test_bed import TestBed
from analysis.run.trials import SECOND
from analysis.run.work import gates_on_gaps, token_times, work_of
from analysis.settings.gate_limits import CompileBudget
from analysis.settings.slo_targets import SloTarget
from analysis.statistics.compare import Comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What follows from a run. Mappings are by arm."""

    steady: tuple[Comparison, ...]  # those that gate
    beside: tuple[Comparison, ...]  # all others, of every phase
    apart: tuple[Comparison, ...]  # those that gate, of each machine by itself where there are several
    rates: tuple[RateComparison, ...]
    facts: Mapping[str, Mapping[str, CompileFacts]]  # of all that an arm served (""), its cold starts, and "steady"
    outside: Mapping[str, Outside]  # what shows of an arm without its telemetry
    memory: RunMemory
    slo: Mapping[str, tuple[Gate, ...]]  # of every arm, the control included, before the checks; cold targets last
    gates: tuple[Gate, ...]  # of the treatments, after the checks
    checks: tuple[Check, ...]
    bed: BedJudgement
    verdicts: Mapping[str, str]  # of the treatments
    overall: str
    headline: str
    advice: Advice


def judge(run: Run) -> Judgement:
    """The judgement on the run. The same records and seed give an equal one."""
    # A search drives the arms past what they hold, so their latency over the whole run means nothing.
    search = is_search(run)
    compared = Comparisons() if search else comparisons(run)
    rates = () if search else compare_rates(run)
    outside = _outside(run)
    bed, bed_checks = judge_bed(TestBed.of(run), run.arms, run.limits.max_bed_drift)
    checks = [
        *_checks_of_all(run),
        *(check for arm in run.treatments for check in _checks_of(run, arm, compared.gated)),
        *check_telemetry(run, outside),
        *check_compiled(run),
        *bed_checks,
        *_checks_of_machines(run, compared),
    ]
    facts = {arm: {part: _compile_facts(run, arm, part) for part in ("", "cold", "steady")} for arm in run.arms}
    memory = memory_of(run)
    targets = (*run.targets, *run.cold_targets)
    slo = {arm: tuple(_slo_gate(run, arm, target) for target in targets) for arm in run.arms}
    raw: list[Gate] = []
    for arm in run.treatments:
        if search:
            held = {item.arm: item for item in brackets(run)}
            raw.append(goodput_gate(held[arm], held[run.control], margin=run.limits.margin))
        else:
            raw += [_noninferiority_gate(run, item) for item in compared.gated if item.arm == arm]
            raw += slo[arm]
            raw += _goodput_gates(run, [item for item in rates if item.arm == arm])
        raw += _recompile_gates(run, arm, facts[arm], outside[arm])
        raw += unforeseen_gates(run, arm)
        raw += _death_gates(run, arm) if search else _error_gates(run, arm)
        raw += _parity_gates(run, arm)
        raw += memory_gates(memory, arm, run.control, run.limits)
    gates = [_with_needed(run, before, after) for before, after in zip(raw, apply_checks(raw, checks), strict=True)]
    verdicts = {arm: combined([gate.verdict for gate in gates if gate.arm == arm]) for arm in run.treatments}
    return Judgement(
        steady=compared.gated,
        beside=compared.beside,
        apart=compared.apart,
        rates=rates,
        facts=facts,
        outside=outside,
        memory=memory,
        slo=slo,
        gates=tuple(gates),
        checks=tuple(checks),
        bed=bed,
        verdicts=verdicts,
        overall=combined(list(verdicts.values())),
        headline=headline(verdicts, gates, checks, run.control),
        advice=_with_more_trials(run, advise(gates, checks), gates, compared.gated),
    )


def _with_more_trials(run: Run, advice: Advice, gates: Sequence[Gate], steady: Sequence[Comparison]) -> Advice:
    """The advice, which of joined runs also says how many trials more it asks for."""
    if not run.records.joined or advice.needed_s is None or run.seconds <= 0:
        return advice
    have = len(run.trials)
    asked = max(math.ceil(advice.needed_s / run.seconds * have - 1e-9), *(gate.needed_starts or 0 for gate in gates))
    more = f"That is {counted(max(1, asked - have), 'trial')} more, if they are like the {have} that are here."
    if any(item.machine_spread > 0 and item.verdict == INCONCLUSIVE for item in steady):
        more += " Only more machines average out what differs between machines."
    return replace(advice, text=f"{advice.text} {more}")


def _noninferiority_gate(run: Run, item: Comparison) -> Gate:
    power = power_of_each(run.limits)
    starts = starts_needed(item, power=power)
    return noninferiority_gate(
        item, _needed_s(run, item, power=power), needed_starts=starts if starts > item.trials else None
    )


def _needed_s(run: Run, item: Comparison, *, power: float = POWER) -> float | None:
    blocks, overhead_s = run.limits.min_blocks, run.limits.cold_s * len(run.trials)
    return comparison_needed_s(item, block_s=run.block_s, min_blocks=blocks, overhead_s=overhead_s, power=power)


# --- Gates ------------------------------------------------------------------------------------------------------------


def _slo_gate(run: Run, arm: str, target: SloTarget) -> Gate:
    result, needed = judge_target(run, arm, target)
    return slo_gate(arm, target, result, observed(run.requests, _held_to(run, arm, target), target), needed)


def judge_target(run: Run, arm: str, target: SloTarget, *, power: float = POWER) -> tuple[ShareResult, float | None]:
    """The share of the arm's requests that miss the target, and the run length that would decide it.

    Judged over all traffic, or over the cold starts, each of which is one observation: no length decides those.
    """
    counted = units(run.requests, _held_to(run, arm, target), target)
    trial = run.requests.trial[counted.row]
    if target.cold:
        block = np.unique(trial, return_inverse=True)[1]
        return judge_share(counted.missed, block, allowed=target.allowed_share, alpha=run.limits.alpha), None
    return _share(run, counted.missed, blocks_at(run, trial, counted.at_ns), target.allowed_share, power)


def _held_to(run: Run, arm: str, target: SloTarget) -> Bools:
    mask = run.of_arm(arm) & run.usable
    return mask & run.cold if target.cold else mask


def _goodput_gates(run: Run, rates: Sequence[RateComparison]) -> list[Gate]:
    """One where the experiment sets a least share of the control's goodput."""
    least = run.limits.min_goodput_ratio
    if least is None:
        return []
    return [
        goodput_ratio_gate(rate, least, _needed_s(run, _turned(rate, least)) if least > 0 else None)
        for rate in rates
        if rate.rate == "goodput"
    ]


_OF_RATES = ("alpha", "spread", "method", "blocks", "groups", "trials", "requests", "obstacle")


def _turned(rate: RateComparison, least: float) -> Comparison:
    """The rate as a comparison that must stay below a limit: the control's goodput over the arm's, below 1 / least."""
    ratio = 1.0 / rate.ratio if rate.ratio else None
    shared = {name: getattr(rate, name) for name in _OF_RATES}
    return Comparison(quantile=0.5, margin=1.0 / least - 1.0, ratio=ratio, **shared)


def _outside(run: Run) -> dict[str, Outside]:
    # Nothing restarts an external arm between the trials of a run: what it compiled in one it has in the next.
    shapes = {
        arm: shapes_of(
            run.requests,
            arm,
            ladder=run.account(arm).length_ladder,
            lives=run.place if run.account(arm).external else None,
        )
        for arm in run.arms
    }
    return outside_of(run.requests, shapes, control=run.control, rng=run.rng(2))


def _recompile_gates(run: Run, arm: str, facts: Mapping[str, CompileFacts], outside: Outside) -> list[Gate]:
    """The gates on compiles: of all that the arm served, or of its cold starts apart where these have a budget."""
    whole: dict[str, CompileBudget] = {"": run.limits}
    budgets = whole if run.limits.cold is None else {"steady": run.limits, "cold": run.limits.cold}
    gates: list[Gate] = []
    for part, budget in budgets.items():
        if run.account(arm).external:
            minutes = _part_s(run, arm, part) / 60.0 * run.replicas(arm)
            requests = facts[part].requests
            gates += outside_gates(
                outside, budget, requests=requests, minutes=minutes, part=part, cold_ns=_cold_ends(run)
            )
        else:
            gates += recompile_gates(arm, facts[part], budget, part=part)
    return gates


def _part_s(run: Run, arm: str, part: str) -> float:
    """Seconds of the arm's trials that are its cold starts, past them ("steady"), or all ("")."""
    seconds = sum(trial.seconds for trial in run.trials_of(arm))
    cold_s = sum(min(run.limits.cold_s, trial.seconds) for trial in run.trials_of(arm))
    return {"": seconds, "cold": cold_s, "steady": seconds - cold_s}[part]


def _cold_ends(run: Run) -> dict[int, int]:
    return {trial.number: trial.first_ns + int(run.limits.cold_s * SECOND) for trial in run.trials}


def _error_gates(run: Run, arm: str) -> list[Gate]:
    requests = run.requests
    counts = run.of_arm(arm) & ~requests.broken & (requests.ok | requests.failed)
    result, needed = _share(run, requests.failed[counts], run.block[counts], run.limits.max_error_pct / 100.0)
    gates = [error_gate(arm, result, run.limits.max_error_pct, needed)]
    return [*gates, *_death_gates(run, arm)] if run.records.trials else gates


def _death_gates(run: Run, arm: str) -> list[Gate]:
    # Nobody watches the process of an external arm: its death shows in errors.
    account = run.account(arm)
    never_started = not run.trials_of(arm) and not account.deaths
    return [] if account.external or never_started else [death_gate(arm, len(account.deaths))]


def _parity_gates(run: Run, arm: str) -> list[Gate]:
    """One gate where parity was measured or is required, where answers must be equal or are absent, or where the
    weights are quantised differently from the control's.

    Answers in lower precision alone judge nothing.
    """
    answers = run.account(arm).answers
    required = mapping(run.records.experiment.get("parity")).get("full") is True
    exact = any(row.get("error") or row.get("dtype") == "float32" or "cosine" in row for row in answers)
    # Where whole servers are compared, nothing is said of what they compute.
    whole = run.records.experiment.get("compare_models") is True
    apart = "" if whole and not required else run.weights_apart(arm)
    if not (run.account(arm).parity or required or exact or apart):
        return []
    return [parity_gate(arm, run.account(arm).parity, answers, required=required, weights_apart=apart)]


def _share(
    run: Run, missed: Bools, block: Ints, allowed: float, power: float = POWER
) -> tuple[ShareResult, float | None]:
    """The share that `missed`, judged over blocks, and the run length that would decide it."""
    result = judge_share(missed, block, allowed=allowed, alpha=run.limits.alpha)
    needed = share_needed_s(
        result,
        requests_per_s=run.rate(len(missed)),
        block_s=run.block_s,
        min_blocks=run.limits.min_blocks,
        alpha=run.limits.alpha,
        power=power,
    )
    return result, needed


def _compile_facts(run: Run, arm: str, part: str) -> CompileFacts:
    """What compiles did to the arm while it served: in its cold starts, past them ("steady"), or in all."""
    cold_end = _cold_ends(run)

    def within(event: CompileEvent) -> bool:
        return not part or (event.start_ns < cold_end.get(event.trial, 0)) is (part == "cold")

    serving = [event for event in run.serving_events(arm) if within(event)]
    recompiles = [event for event in serving if event.kind in RECOMPILE_KINDS]
    own = run.of_arm(arm) & ~run.requests.broken
    if part:
        own &= run.cold if part == "cold" else ~run.cold
    stalls = run.attribution.stall_ms[own]
    minutes = _part_s(run, arm, part) / 60.0 * run.replicas(arm)
    # An arm that compiles has events of its warm-up at least; none means that its telemetry was lost.
    silent = run.account(arm).compiles and not any(event.arm == arm for event in run.events)
    return CompileFacts(
        known=run.records.events is not None and not silent,
        recompiles=len(recompiles),
        most_in_a_trial=max(
            (sum(event.trial == trial.number for event in recompiles) for trial in run.trials), default=0
        ),
        longest_event_s=max((event.seconds for event in serving if event.stalls), default=0.0),
        longest_stall_s=float(stalls.max()) / 1e3 if stalls.size else 0.0,
        stall_s_per_min=held_s(event for event in serving if event.stalls) / minutes if minutes > 0 else 0.0,
        requests_hit=int(run.attribution.hit[own].sum()),
        requests=int(own.sum()),
        trials=max(1, len(run.trials_of(arm))),
        kernels=sum(event.kind == JIT for event in recompiles),
    )


def _with_needed(run: Run, before: Gate, after: Gate) -> Gate:
    """The gate with the run length that its checks ask for, where it was decided but for them and they want length."""
    opened = before.verdict != INCONCLUSIVE and after.verdict == INCONCLUSIVE
    if not opened or not set(after.blocked_by) <= LENGTH_CHECKS:
        return after
    rate = run.rate(int(run.of_arm(after.arm).sum()))
    floor = least_length_s(run.limits, rate=rate, block_s=run.block_s)
    return replace(after, needed_s=floor + run.limits.cold_s * len(run.trials))


# --- Checks -----------------------------------------------------------------------------------------------------------


def _loops(run: Run) -> list[Loop]:
    """Whether users waited, by each arm's requests and, where a splitter chose the arm, by all. Empty if recorded."""
    if run.reported_open_loop is not None:
        return []
    requests = run.requests
    sets = [run.of_arm(arm) for arm in run.arms]
    if run.design == "split":
        sets.append(np.ones(len(requests), dtype=np.bool_))
    kept = [mask & ~requests.broken for mask in sets]
    return [loop_of(requests.start_ns[mask], requests.end_ns[mask]) for mask in kept]


def _checks_of_all(run: Run) -> Iterable[Check]:
    requests, limits = run.requests, run.limits
    infos = [info for info in run.infos if info]
    counts = {arm: int(run.of_arm(arm).sum()) for arm in run.arms}
    search = is_search(run)
    # A search overloads the arms on purpose, and a closed loop cannot.
    if not search and run.reported_open_loop is not False:
        yield from check_overload({arm: _loads(run, arm) for arm in run.arms}, run.control)
    yield check_records(run.records.problems, int(requests.broken.sum()), requests.repeated, stated=run.records.stated)
    yield check_complete(infos, planned=run.planned_trials, own_names=run.own_names)
    if run.records.joined:
        yield check_schedules(run.repeated_schedules, mirrored=run.design == "mirrored")
    closed = run.reported_open_loop is False and not run.planned
    if run.in_turn:
        # Each arm had requests of its own, so that what a treatment lacks concerns no other.
        for arm, count in counts.items():
            alone = check_counts({arm: count}, {arm: run.planned.get(arm, 0)}, mirrored=False)
            remedy = alone.remedy if run.trials_of(arm) else "Go on with the search: tailgate frontier --after RUN_DIR."
            yield replace(alone, arm=None if arm == run.control else arm, remedy=remedy)
    else:
        yield check_counts(counts, run.planned, mirrored=run.design == "mirrored" and not closed)
    if run.design == "split":
        ratio = check_sample_ratio({arm: run.sessions(arm) for arm in run.arms}, run.weights)
        if ratio is not None:
            yield ratio
    if not search:
        answered = run.of_arm(run.control) & (requests.ok | requests.failed)
        failed = int(requests.failed[answered].sum())
        yield check_control_errors(run.control, failed, int(answered.sum()), limits.max_error_pct)
    if phases := pressure.phases_of(run.records.experiment):
        yield check_pressure(pressure.faults(phases, infos))
    yield check_generator_lag(run.generator_lag_ms, limits.max_generator_lag_ms)
    yield from check_generators(run.records.generators, infos, limit_ms=limits.max_generator_lag_ms)
    scheduled = bool(requests.scheduled.all()) if len(requests) else False
    own = run.of_arm(run.control) & ~requests.broken
    follows = starts_after_ends(requests.start_ns[own], requests.end_ns[own])
    yield check_open_loop(run.reported_open_loop, scheduled, run.concurrency, follows, _loops(run))
    if run.cold_targets and not search:
        yield check_cold_starts(len(run.trials))
    if (run.targets or run.limits.min_goodput_ratio is not None) and not search:
        yield check_length(run.blocks, limits, run.block_s)
    yield check_interference(*_interference(run))
    answers = run.account(run.control).answers
    # a single replica is its own measure
    if len({row.get("replica") for row in answers}) > 1 or any(row.get("error") for row in answers):
        yield check_answers(run.control, answers)
    if infos:
        for arm in (name for name in run.arms if not run.account(name).external):
            yield check_deaths(arm, run.account(arm).deaths, control=arm == run.control, silent=run.account(arm).silent)


def _checks_of(run: Run, arm: str, steady: Sequence[Comparison]) -> Iterable[Check]:
    limits = run.limits
    own = [item for item in steady if item.arm == arm]
    if not is_search(run):
        yield check_blocks(arm, min((item.blocks for item in own), default=0), limits, run.block_s)
        yield check_tail(arm, min((item.requests for item in own), default=0), limits.quantile)
        yield check_autocorrelation(arm, own)
        yield check_cross(arm, own)
    intended = run.records.experiment.get("compare_models") is True
    outside = {name: str(external["kind"]) for name in (arm, run.control) if (external := run.account(name).external)}
    yield check_comparable(
        arm, run.differences(arm), intended=intended, outside=outside, weights_apart=run.weights_apart(arm)
    )
    yield check_equal_work(work_of(run, arm))
    if not run.embeds:
        yield check_token_stream(token_times(run, arm), token_times(run, run.control), judged=gates_on_gaps(run))
    yield check_lag_apart(arm, run.control, lag_apart(run, arm))
    if run.design == "mirrored" and not run.in_turn:
        allowed_ms = matters_ms(run, 0.5)
        if (copies := copies_of(run, arm, allowed_ms=allowed_ms)) is not None:
            yield check_copies(copies, allowed_ms=allowed_ms)
    if is_search(run):
        return
    # The arm of the two that lost more, though the check is on the treatment's gates.
    worst = max((arm, run.control), key=lambda name: _cut_share(run, name))
    usable = run.of_arm(worst) & run.usable
    cut = check_cut(worst, int(run.requests.cut[usable].sum()), int(usable.sum()), limits.quantile)
    yield replace(cut, arm=arm)


def _checks_of_machines(run: Run, compared: Comparisons) -> Iterable[Check]:
    if len(run.machines) < 2 or is_search(run):
        return
    for arm in run.treatments:
        gated, apart = ([item for item in items if item.arm == arm] for items in (compared.gated, compared.apart))
        yield check_machines(arm, gated, apart, list(_missed_on_one(run, arm)))


def _missed_on_one(run: Run, arm: str) -> Iterable[tuple[str, str, str]]:
    """(gate, kind, what was seen) of each share that the arm keeps over all machines and surely misses on one."""
    requests = run.requests
    rows = np.flatnonzero(run.of_arm(arm) & ~requests.broken & (requests.ok | requests.failed))
    answered = Units(missed=requests.failed[rows], row=rows, at_ns=requests.start_ns[rows])
    shares = [("errors", "error", "the error limit", answered, run.limits.max_error_pct / 100.0)]
    for target in run.targets:
        own = units(requests, _held_to(run, arm, target), target)
        shares.append((f"slo {target.key}", "slo", target.key, own, target.allowed_share))
    for gate, kind, limit, own, allowed in shares:
        trial = requests.trial[own.row]
        block, of_machine = blocks_at(run, trial, own.at_ns), run.machines.codes(trial)
        if judge_share(own.missed, block, allowed=allowed, alpha=run.limits.alpha).verdict != PASS:
            continue
        for place, machine in enumerate(run.machines.names):
            mine = of_machine == place
            result = judge_share(own.missed[mine], block[mine], allowed=allowed, alpha=run.limits.alpha)
            if result.verdict == FAIL:
                count = f"{result.missed} of {result.requests}"
                yield gate, kind, f"{limit} is missed on {machine} alone, by {count}, and kept over all"


def _loads(run: Run, arm: str) -> list[Load | None]:
    """What the arm was offered and answered, trial by trial; None where a trial has too few requests."""
    requests = run.requests
    own = run.of_arm(arm) & ~requests.broken
    loads = []
    for trial in run.trials:
        rows = np.flatnonzero(own & (requests.trial == trial.number))
        every = max(1, len(rows) // MOST_COUNTED)
        rows = rows[::every]
        start_s, end_s = ((column[rows] - trial.first_ns) / 1e9 for column in (requests.start_ns, requests.end_ns))
        seconds = trial.seconds - (trial.first_ns - trial.start_ns) / 1e9
        loads.append(load_of(start_s, end_s, requests.ok[rows], requests.shed[rows], seconds=seconds, every=every))
    return loads


def _cut_share(run: Run, arm: str) -> float:
    own = run.of_arm(arm) & run.usable
    return float(run.requests.cut[own].mean()) if own.any() else 0.0


def _interference(run: Run) -> tuple[float | None, float | None]:
    """How much longer the control's requests took while other arms compiled, and the p-value."""
    requests = run.requests
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
        windows = windows_of(
            (event.start_ns, event.end_ns)
            for event in run.events
            if event.serving and event.stalls and event.trial == trial.number and event.arm != run.control
        )
        inside.append(windows.overlap_ns(edges[:-1], edges[1:]) / (bin_s * SECOND))
        rows = own & (requests.trial == trial.number)
        since = np.clip((requests.start_ns[rows] - trial.start_ns) / 1e9, 0.0, bins * bin_s - 1e-6)
        starts.append(since + offset)
        excess.append(np.log(requests.e2e_ms[rows] / expected[rows]))
        offset += bins * bin_s
    if not inside:
        return None, None
    return slowdown_during(
        np.concatenate(excess), np.concatenate(starts), np.concatenate(inside), bin_s=bin_s, rng=run.rng(1)
    )
