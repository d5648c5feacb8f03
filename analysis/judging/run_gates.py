"""The gates of a run, each made from what the run holds and what its experiment allows; none is checked yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from analysis.arrays import Bools, Ints
from analysis.checks.applied import blocking
from analysis.checks.check import Check
from analysis.judging.client_gates import client_gates
from analysis.judging.comparisons import blocks_at
from analysis.judging.gates import (
    INCONCLUSIVE,
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
from analysis.judging.greedy_parity import NEAR_TIE, GreedyParity, greedy_gate, judge_asked
from analysis.judging.paths import Path, share_path, share_tests
from analysis.judging.rates import RateComparison
from analysis.records.plain_values import mapping, number
from analysis.run.client_stalls import ArmStalls
from analysis.run.compile_events import JIT, RECOMPILE_KINDS, CompileEvent, held_s
from analysis.run.run import Run
from analysis.run.slo import ShareResult, Units, failures, judge_share, observed, units
from analysis.run.trials import SECOND
from analysis.settings.gate_limits import CompileBudget
from analysis.settings.slo_targets import SloTarget
from analysis.statistics.compare import Comparison
from analysis.statistics.planning import (
    LONGEST_S,
    MOST_STARTS,
    POWER,
    comparison_needed_s,
    least_length_s,
    power_of_each,
    share_needed_s,
    starts_needed,
)


def latency_gate(run: Run, item: Comparison, path: Path | None = None) -> Gate:
    """The gate that the decided comparison makes; `path` is how its evidence grew, in a run that is looked at."""
    if path is not None:
        return noninferiority_gate(item, _whole_s(run, path), path=path)
    if run.separate:
        # More of the same run says nothing of other starts and days; too short a run says nothing at all.
        short = item.obstacle is None and item.blocks < run.limits.min_blocks
        least_s = least_length_s(run.limits, rate=run.rate(item.requests, item.arm), block_s=run.block_s)
        needed_s = least_s + run.limits.cold_s if short else None
        return noninferiority_gate(item, needed_s, needed_starts=None if short else _within_reach(item.needed_trials))
    power = power_of_each(run.limits)
    starts = starts_needed(item, power=power)
    more = _within_reach(starts) if starts > item.trials else None
    return noninferiority_gate(item, _needed_s(run, item, power=power), needed_starts=more)


def _within_reach(starts: int | None) -> int | None:
    """The number of starts, or None where a ratio lies so near its margin that nobody makes as many."""
    return None if starts is None or starts > MOST_STARTS else starts


def _needed_s(run: Run, item: Comparison, *, power: float = POWER, blocks: int = 0) -> float | None:
    blocks, overhead_s = max(blocks, run.limits.min_blocks), run.limits.cold_s * len(run.trials)
    return comparison_needed_s(item, block_s=run.block_s, min_blocks=blocks, overhead_s=overhead_s, power=power)


def _whole_s(run: Run, path: Path) -> float | None:
    """How long the run would be that decides the gate, at the pace of late; None where it decides nothing."""
    left_s = path.outlook_s
    return None if left_s is None or left_s > LONGEST_S else run.seconds + left_s


def objective_gate(run: Run, arm: str, target: SloTarget) -> Gate:
    """Whether the arm keeps the target."""
    seen = observed(run.requests, held_to(run, arm, target), target)
    if not run.limits.sequential or target.cold:
        result, needed_s = judge_target(run, arm, target)
        return slo_gate(arm, target, result, seen, needed_s)
    counted = units(run.requests, held_to(run, arm, target), target)
    block = blocks_at(run, run.requests.trial[counted.row], counted.at_ns)
    result, path = share_path(run, counted, block, allowed=target.allowed_share)
    return _with_path(slo_gate(arm, target, result, seen, _whole_s(run, path)), path)


def _with_path(gate: Gate, path: Path) -> Gate:
    """Return the gate with how its evidence grew, and when it decided: limits may have widened since."""
    after = "" if path.decided_s is None else f": decided after {path.decided_s / 60.0:.1f} minutes"
    return replace(gate, path=path, reason=f"{gate.reason.removesuffix('.')}{after}.")


def judge_target(run: Run, arm: str, target: SloTarget) -> tuple[ShareResult, float | None]:
    """The share of the arm's requests that miss the target, and the run length that would decide it.

    Judged over all traffic, or over the cold starts, each of which is one observation: no length decides those.
    """
    counted = units(run.requests, held_to(run, arm, target), target)
    trial = run.requests.trial[counted.row]
    if target.cold:
        block = np.unique(trial, return_inverse=True)[1]
        return _judge(run, counted, block, allowed=target.allowed_share, least_blocks=None), None
    return _share(run, arm, counted, blocks_at(run, trial, counted.at_ns), target.allowed_share)


def held_to(run: Run, arm: str, target: SloTarget) -> Bools:
    """The requests of the arm that the target speaks of."""
    mask = run.of_arm(arm) & run.usable
    return mask & run.cold if target.cold else mask


def goodput_gates(run: Run, rates: Sequence[RateComparison]) -> list[Gate]:
    """One where the experiment sets a least share of the control's goodput."""
    least = run.limits.min_goodput_ratio
    if least is None:
        return []
    return [
        goodput_ratio_gate(rate, least, _goodput_needed_s(run, rate, least) if least > 0 else None)
        for rate in rates
        if rate.rate == "goodput"
    ]


def _goodput_needed_s(run: Run, rate: RateComparison, least: float) -> float | None:
    return _needed_s(run, _turned(rate, least), blocks=rate.needed_blocks or 0)


_OF_RATES = ("alpha", "spread", "method", "blocks", "groups", "trials", "requests", "obstacle")


def _turned(rate: RateComparison, least: float) -> Comparison:
    """The rate as a comparison that must stay below a limit: the control's goodput over the arm's, below 1 / least."""
    ratio = 1.0 / rate.ratio if rate.ratio else None
    shared = {name: getattr(rate, name) for name in _OF_RATES}
    return Comparison(quantile=0.5, margin=1.0 / least - 1.0, ratio=ratio, **shared)


def compile_gates(run: Run, arm: str, facts: Mapping[str, CompileFacts], stalls: ArmStalls) -> list[Gate]:
    """The gates on compiles: of all that the arm served, or of its cold starts apart where these have a budget."""
    whole: dict[str, CompileBudget] = {"": run.limits}
    budgets = whole if run.limits.cold is None else {"steady": run.limits, "cold": run.limits.cold}
    account = run.account(arm)
    gates: list[Gate] = []
    for part, budget in budgets.items():
        reported = recompile_gates(arm, facts[part], budget, part=part)
        if not account.external:
            gates += reported
            continue
        gates += client_gates(
            stalls,
            budget,
            requests=facts[part].requests,
            minutes=part_minutes(run, arm, part),
            part=part,
            cold_ns=cold_ends(run),
            timed=account.is_timed,
            reported=reported if account.tells_compiles else None,
            log=account.log_tells,
            blind_spots=account.log_spots,
        )
    return gates


def part_minutes(run: Run, arm: str, part: str) -> float:
    """Minutes of all replicas of the arm together, in its cold starts, past them ("steady"), or in all ("")."""
    seconds = sum(trial.seconds for trial in run.trials_of(arm))
    cold_s = sum(min(run.limits.cold_s, trial.seconds) for trial in run.trials_of(arm))
    return {"": seconds, "cold": cold_s, "steady": seconds - cold_s}[part] / 60.0 * run.replicas(arm)


def cold_ends(run: Run) -> dict[int, int]:
    return {trial.number: trial.first_ns + int(run.limits.cold_s * SECOND) for trial in run.trials}


def error_gates(run: Run, arm: str) -> list[Gate]:
    counted = failures(run.requests, run.of_arm(arm) & ~run.requests.broken)
    allowed, block = run.limits.max_error_pct / 100.0, run.block[counted.row]
    if run.limits.sequential:
        result, path = share_path(run, counted, block, allowed=allowed)
        gates = [_with_path(error_gate(arm, result, run.limits.max_error_pct, _whole_s(run, path)), path)]
    else:
        result, needed = _share(run, arm, counted, block, allowed)
        gates = [error_gate(arm, result, run.limits.max_error_pct, needed)]
    return [*gates, *death_gates(run, arm)] if run.records.trials else gates


def death_gates(run: Run, arm: str) -> list[Gate]:
    # Nobody watches the process of an external arm: its death shows in errors.
    account = run.account(arm)
    never_started = not run.trials_of(arm) and not account.deaths
    return [] if account.external or never_started else [death_gate(arm, len(account.deaths))]


def parity_gates(run: Run, arm: str) -> list[Gate]:
    """One gate where parity was measured or is required, where answers must be equal or are absent, or where the
    weights are quantised differently from the control's.

    Answers in lower precision alone judge nothing. External arms are judged by what they were asked beside the load.
    """
    if asked := run.account(arm).asked_in:
        found = greedy_parities(run, arm)
        lost = [f"trial {number}" for number in asked if not _asked_both(run, arm, number)]
        return [greedy_gate(arm, found, lost=f"The answers of {', '.join(lost)} are not there." if lost else "")]
    answers = run.account(arm).answers
    required = mapping(run.records.experiment.get("parity")).get("full") is True
    exact = any(row.get("error") or row.get("dtype") == "float32" or "cosine" in row for row in answers)
    # Where whole servers are compared, nothing is said of what they compute.
    whole = run.records.experiment.get("compare_models") is True
    apart = "" if whole and not required else run.weights_apart(arm)
    if not (run.account(arm).parity or required or exact or apart):
        return []
    return [parity_gate(arm, run.account(arm).parity, answers, required=required, weights_apart=apart)]


def greedy_parities(run: Run, arm: str) -> list[GreedyParity]:
    """What the external arm answered before the load and after it beside the control; empty where it was not asked."""
    account, control = run.account(arm), run.account(run.control)
    if not account.asked_in or arm == run.control:
        return []
    near_tie = number(mapping(run.records.experiment.get("parity")).get("near_tie")) or NEAR_TIE
    documents = [(control.asked.get(trial), account.asked.get(trial)) for trial in account.asked_in]
    return judge_asked(arm, documents, near_tie=near_tie, alpha=run.limits.alpha)


def _asked_both(run: Run, arm: str, trial: int) -> bool:
    return all(trial in run.account(name).asked for name in (arm, run.control))


def _share(run: Run, arm: str, counted: Units, block: Ints, allowed: float) -> tuple[ShareResult, float | None]:
    """Return the share that missed, judged over blocks, and the run length that would decide it."""
    result = _judge(run, counted, block, allowed=allowed, least_blocks=run.limits.min_blocks)
    needed = share_needed_s(
        result.missed,
        result.requests,
        allowed=result.allowed,
        design_effect=result.design_effect,
        requests_per_s=_rate(run, arm, len(counted.row)),
        block_s=run.block_s,
        min_blocks=max(run.limits.min_blocks, result.needed_blocks or 0),
        alpha=run.limits.alpha / (share_tests(run) if result.missed > allowed * result.requests else 1),
    )
    return result, needed


def _judge(run: Run, counted: Units, block: Ints, *, allowed: float, least_blocks: int | None) -> ShareResult:
    return judge_share(
        counted.missed,
        block,
        allowed=allowed,
        alpha=run.limits.alpha,
        ms=counted.ms,
        limit_ms=counted.limit_ms,
        least_blocks=least_blocks,
        tests=share_tests(run),
    )


def _rate(run: Run, arm: str, count: int) -> float:
    """`count` of the arm's per second of the run, or of the arm's own runs where each had some by itself."""
    return run.rate(count, arm if run.separate else None)


def compile_facts(run: Run, arm: str, part: str) -> CompileFacts:
    """What compiles did to the arm while it served: in its cold starts, past them ("steady"), or in all."""
    cold_end = cold_ends(run)

    def within(event: CompileEvent) -> bool:
        return not part or (event.start_ns < cold_end.get(event.trial, 0)) is (part == "cold")

    serving = [event for event in run.serving_events(arm) if within(event)]
    recompiles = [event for event in serving if event.kind in RECOMPILE_KINDS]
    own = run.of_arm(arm) & ~run.requests.broken
    if part:
        own &= run.cold if part == "cold" else ~run.cold
    stalls = run.attribution.stall_ms[own]
    minutes = part_minutes(run, arm, part)
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


def with_needed(run: Run, before: Gate, after: Gate, checks: Sequence[Check]) -> Gate:
    """The gate with the run length that its checks ask for, where it was decided but for them and they want length."""
    opened = before.verdict != INCONCLUSIVE and after.verdict == INCONCLUSIVE
    if not opened or not all(check.rule.mended_by_length for check in blocking(after, checks)):
        return after
    rate = _rate(run, after.arm, int(run.of_arm(after.arm).sum()))
    floor = least_length_s(run.limits, rate=rate, block_s=run.block_s)
    return replace(after, needed_s=floor + run.limits.cold_s * len(run.trials))
