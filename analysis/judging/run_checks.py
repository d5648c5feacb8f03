"""The checks of a run: each gets what it asks for of the run. What they decide is in `analysis.judging.checks`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from analysis.arrays import Floats
from analysis.judging.bed import BedJudgement, judge_bed
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
    check_length,
    check_tail,
)
from analysis.judging.checks.telemetry import check_telemetry
from analysis.judging.checks.traffic import (
    check_control_errors,
    check_interference,
    check_open_loop,
    check_sample_ratio,
    check_schedules,
    check_shares_by_stretch,
    slowdown_during,
    starts_after_ends,
)
from analysis.judging.comparisons import Comparisons, blocks_at
from analysis.judging.gates import (
    FAIL,
)
from analysis.judging.gates.objectives import held_to
from analysis.judging.generators import check_generator, known_accounts, lag_of, lost_processes, measured_of
from analysis.judging.load_steps import is_search
from analysis.judging.overload import MOST_COUNTED, Load, load_of
from analysis.judging.ramp_account import ramp_of, share_of_candidate
from analysis.judging.validity import Check
from analysis.records.plain_values import mapping
from analysis.run import pressure
from analysis.run.client_stalls import ArmStalls
from analysis.run.compile_events import windows_of
from analysis.run.pairs import copies_of, lag_apart, matters_ms
from analysis.run.run import Run
from analysis.run.slo import failures, judge_share, units
from analysis.run.spikes import normal_e2e_ms
from analysis.run.test_bed import TestBed
from analysis.run.trials import SECOND
from analysis.run.weight_stretches import weight_stretches
from analysis.run.work import gates_on_gaps, token_times, work_of
from analysis.statistics.compare import Comparison


def checks_of_run(run: Run, compared: Comparisons, stalls: Mapping[str, ArmStalls]) -> tuple[BedJudgement, list[Check]]:
    """Return every check of the run, the same for an interim analysis and for the final one, and the machines' part."""
    shared = run.design != "switchback" and not run.in_turn
    bed, bed_checks = judge_bed(TestBed.of(run), run.arms, run.limits, shared=shared)
    checks = [
        *checks_of_all(run),
        *(check for arm in run.treatments for check in checks_of_arm(run, arm, compared.gated)),
        *check_telemetry(run, stalls),
        *check_compiled(run),
        *bed_checks,
        *checks_of_machines(run, compared),
    ]
    return bed, checks


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


def checks_of_all(run: Run) -> Iterable[Check]:
    requests, limits = run.requests, run.limits
    infos = [info for info in run.infos if info]
    counts = {arm: int(run.of_arm(arm).sum()) for arm in run.arms}
    search = is_search(run)
    # A search overloads the arms on purpose, and a closed loop cannot.
    if not search and run.reported_open_loop is not False:
        yield from check_overload({arm: _loads(run, arm) for arm in run.arms}, run.control)
    problems = [*run.records.problems, *_unrecorded(run)]
    yield check_records(problems, int(requests.broken.sum()), requests.repeated, stated=run.records.stated)
    accounts = known_accounts(run.records.generators)
    lost = lost_processes(accounts, infos)
    yield check_complete(infos, planned=run.planned_trials, own_names=run.own_names, processes=lost)
    if run.records.joined:
        yield check_schedules(run.repeated_schedules, mirrored=run.copied)
    closed = run.reported_open_loop is False and not run.planned
    if run.in_turn:
        # Each arm had requests of its own, so that what a treatment lacks concerns no other.
        for arm, count in counts.items():
            alone = check_counts({arm: count}, {arm: run.planned.get(arm, 0)}, mirrored=False)
            remedy = alone.remedy if run.trials_of(arm) else "Go on with the search: tailgate frontier --after RUN_DIR."
            yield replace(alone, arm=None if arm == run.control else arm, remedy=remedy)
    else:
        alike = run.copied and not run.copied_in_part and not closed
        yield check_counts(counts, run.planned, mirrored=alike, ended=run.ended_arms)
    ramp = ramp_of(run)
    if ramp is not None:
        yield share_of_candidate(run, ramp.candidate)
    elif run.design == "split" and run.records.weights:
        yield check_shares_by_stretch(
            [
                ({arm: run.sessions(arm, stretch.rows) for arm in run.arms}, stretch.weights)
                for stretch in weight_stretches(run)
            ]
        )
    elif run.design == "split":
        ratio = check_sample_ratio({arm: run.sessions(arm) for arm in run.arms}, run.weights)
        if ratio is not None:
            yield ratio
    if not search:
        answered = run.of_arm(run.control) & (requests.ok | requests.failed)
        failed = int(requests.failed[answered].sum())
        yield check_control_errors(run.control, failed, int(answered.sum()), limits.max_error_pct)
    if phases := pressure.phases_of(run.records.experiment):
        yield check_pressure(pressure.faults(phases, infos))
    measured = list(measured_of(accounts, limits.max_generator_lag_ms))
    # What another tool does not keep, the check on its loop says; users are never late.
    if run.generator_lag_ms is not None or not (run.pace or run.of_users):
        measured.append(lag_of(run.generator_lag_ms, limits.max_generator_lag_ms))
    if measured:
        yield check_generator(measured)
    scheduled = bool(requests.scheduled.all()) if len(requests) else False
    own = run.of_arm(run.control) & ~requests.broken
    follows = starts_after_ends(requests.start_ns[own], requests.end_ns[own])
    yield check_open_loop(run.reported_open_loop, scheduled, run.concurrency, follows, _loops(run), run.pace)
    if run.cold_targets and not search:
        yield check_cold_starts(len(run.trials))
    # Evidence that may be looked at waits by itself for enough blocks.
    rates = run.limits.min_goodput_ratio is not None or (run.targets and not limits.sequential)
    if rates and not search:
        blocks = min(map(run.blocks_of, run.arms)) if run.separate else run.blocks
        yield check_length(blocks, limits, run.block_s)
    yield check_interference(*_interference(run), taking_turns=run.design == "switchback")
    answers = run.account(run.control).answers
    # a single replica is its own measure
    if len({row.get("replica") for row in answers}) > 1 or any(row.get("error") for row in answers):
        yield check_answers(run.control, answers)
    if infos:
        for arm in (name for name in run.arms if not run.account(name).external):
            yield check_deaths(arm, run.account(arm).deaths, control=arm == run.control, silent=run.account(arm).silent)


def _unrecorded(run: Run) -> Iterable[str]:
    """The columns that no request of an arm has and that judging rests on: rows that are there twice are found by
    `request_id`, late requests by `sent_ns`, empty answers and other work by `output_tokens`. Bare tables and what
    another tool recorded need not have them."""
    requests = run.requests
    if run.pace or not any(run.infos):
        return
    named = requests.request_ids.is_valid().to_numpy()
    for arm in run.arms:
        own = run.of_arm(arm)
        needed = {"request_id": (own, named), "sent_ns": (own, requests.sent_ns > 0)}
        # Of its users' requests a splitter knows what the server says.
        if not run.embeds and not run.of_users:
            needed["output_tokens"] = (own & requests.ok, ~requests.uncounted)
        for column, (rows, known) in needed.items():
            if rows.any() and not (rows & known).any():
                yield f"no request of {arm} has {column}"


def checks_of_arm(run: Run, arm: str, steady: Sequence[Comparison]) -> Iterable[Check]:
    limits = run.limits
    own = [item for item in steady if item.arm == arm]
    if run.limits.sequential:
        yield check_tail(arm, min((item.requests for item in own), default=0), limits.quantile)
    elif not is_search(run):
        yield check_blocks(arm, min((item.blocks for item in own), default=0), limits, run.block_s)
        yield check_tail(arm, min((item.requests for item in own), default=0), limits.quantile)
        lengths_change = bool(mapping(run.records.experiment.get("traffic")).get("length_scales"))
        yield check_autocorrelation(arm, own, lengths_change=lengths_change)
    intended = run.records.experiment.get("compare_models") is True
    outside = {name: str(external["kind"]) for name in (arm, run.control) if (external := run.account(name).external)}
    yield check_comparable(
        arm, run.differences(arm), intended=intended, outside=outside, weights_apart=run.weights_apart(arm)
    )
    yield check_equal_work(work_of(run, arm))
    if not run.embeds and run.design != "shadow":
        yield check_token_stream(token_times(run, arm), token_times(run, run.control), judged=gates_on_gaps(run))
    if arm in run.ended_arms:
        return  # the control went on without it
    yield check_lag_apart(arm, run.control, lag_apart(run, arm))
    paired = any(run.infos) or bool((run.requests.pair >= 0).any())  # bare tables need not be
    if run.copied and not run.in_turn and paired:
        allowed_ms = matters_ms(run, 0.5)
        yield check_copies(copies_of(run, arm, allowed_ms=allowed_ms), allowed_ms=allowed_ms)
    if is_search(run):
        return
    # The arm of the two that lost more, though the check is on the treatment's gates.
    worst = max((arm, run.control), key=lambda name: _cut_share(run, name))
    usable = run.of_arm(worst) & run.usable
    cut = check_cut(worst, int(run.requests.cut[usable].sum()), int(usable.sum()), limits.quantile)
    yield replace(cut, arm=arm)


def checks_of_machines(run: Run, compared: Comparisons) -> Iterable[Check]:
    if len(run.machines) < 2 or is_search(run):
        return
    for arm in run.treatments:
        gated, apart = ([item for item in items if item.arm == arm] for items in (compared.gated, compared.apart))
        yield check_machines(arm, gated, apart, list(_missed_on_one(run, arm)))


def _missed_on_one(run: Run, arm: str) -> Iterable[tuple[str, str, str]]:
    """(gate, kind, what was seen) of each share that the arm keeps over all machines and surely misses on one."""
    requests = run.requests
    answered = failures(requests, run.of_arm(arm) & ~requests.broken)
    shares = [("errors", "error", "the error limit", answered, run.limits.max_error_pct / 100.0)]
    for target in run.targets:
        own = units(requests, held_to(run, arm, target), target)
        shares.append((f"slo {target.key}", "slo", target.key, own, target.allowed_share))
    for gate, kind, limit, own, allowed in shares:
        trial = requests.trial[own.row]
        block, of_machine = blocks_at(run, trial, own.at_ns), run.machines.codes(trial)
        if not len(own.missed) or own.missed.mean() > allowed:
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
    if not any(event.serving and event.stalls and event.arm != run.control for event in run.events):
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
