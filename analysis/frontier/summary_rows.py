"""The frontier of a run as its summary holds it: which policy to ship at which load, also as sentences.

What is said without "open" or "as seen" follows from a frontier, whose statements are all true at once but for a chance
of `alpha`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from tailgate.analysis.checks.applied import blocking
from tailgate.analysis.checks.check import MACHINES, Check
from tailgate.analysis.frontier.holdings import Frontier, frontier_of
from tailgate.analysis.judging.gates import FAIL, INCONCLUSIVE, PASS
from tailgate.analysis.judging.judgement import Judgement
from tailgate.analysis.judging.load_steps import FEWEST_STARTS, Holding, is_search, latency_target, steps_of
from tailgate.analysis.records.plain_values import mapping, number, rows_of
from tailgate.analysis.run.run import Run
from tailgate.analysis.run.startup import startup_row
from tailgate.analysis.settings.gate_limits import asks_for_verdicts
from tailgate.analysis.settings.metrics import gate_label, task_of
from tailgate.analysis.settings.ramp_limits import Rollout
from tailgate.analysis.wording import digits, listed


def summary_rows(run: Run, judgement: Judgement) -> dict[str, Any] | None:
    """Return the summary's rows on which policy to ship; None if the run made no search.

    If a check leaves the loads of the search open, no step is used: of the arm that it concerns, or of any.
    """
    if not is_search(run):
        return None
    found = _blocking(run, judgement)
    disturbed: set[str] = set()
    if run.in_turn:
        disturbed = {check.check for own in found.values() for check in own if check.rule.rank == MACHINES}
        found = {
            arm: [check for check in own if check.rule.rank != MACHINES and not check.rule.by_step]
            for arm, own in found.items()
        }
    by_arm = {arm: sorted({check.check for check in own}) for arm, own in found.items()}
    whole = by_arm[run.control]
    # A replica's own load: replicas are taken to add up.
    steps = [replace(step, rate=step.rate / run.replicas(step.arm)) for step in steps_of(run)]
    frontier = frontier_of([step for step in steps if not by_arm[step.arm]], run.arms, alpha=run.limits.alpha)
    search = mapping(run.records.search)
    left = {arm: "was not tried: no trial of it was recorded" for arm in run.arms if not run.trials_of(arm)}
    left |= {str(row.get("arm")): str(row.get("reason")) for row in rows_of(search.get("left"))}
    blocked = {arm: checks for arm, checks in by_arm.items() if checks and run.trials_of(arm)}
    out = {arm for arm in left if arm not in run.arms or frontier.of(arm).starts < FEWEST_STARTS}
    out |= set() if whole else set(blocked)
    failed = [arm for arm, verdict in judgement.verdicts.items() if verdict == FAIL]
    shipped = to_ship(frontier, objective_of(run), out=out, failed=failed)
    if whole:
        shipped.insert(0, f"No load is known, because checks failed: {', '.join(whole)}.")
    rollout = Rollout.recorded(mapping(run.records.experiment.get("rollout")))
    target = latency_target(run)
    gated = not search or asks_for_verdicts(run.limits, task_of(run.records.experiment))
    return {
        "headline": " ".join(shipped) if not gated and not failed else "",
        "answer": [
            *shipped,
            *gpus_for_the_load(frontier, rollout, out),
            *_of_gates(run, judgement, out, gated=gated),
            *(f"{arm} {reason}." for arm, reason in left.items()),
            *(
                f"No load is known for {arm}, because checks failed: {', '.join(checks)}."
                for arm, checks in blocked.items()
                if not whole
            ),
            *still_open(frontier, out),
            error_of(frontier.alpha, sorted(disturbed)),
            *([_ended(search)] if search else []),
        ],
        "gated": gated,
        "arms": [asdict(item) | {"start_s": startup_row(run, item.arm)["serving_s"]} for item in frontier.holdings],
        "objective": objective_of(run),
        "latency": "" if target is None else gate_label(target.key),
        "limit_ms": None if target is None else target.limit,
        "steps": [asdict(step) for step in steps],
    }


def _blocking(run: Run, judgement: Judgement) -> dict[str, list[Check]]:
    """Return the checks that leave the loads of each arm open; those of the control, which no gate judges, on all."""
    own = {gate.arm: blocking(gate, judgement.checks) for gate in judgement.gates if gate.gate == "goodput"}
    whole = [
        check
        for check in judgement.checks
        if check.arm in (None, run.control) and any(check in checks for checks in own.values())
    ]
    return {arm: own.get(arm, []) for arm in run.treatments} | {run.control: whole}


def _of_gates(run: Run, judgement: Judgement, out: Collection[str], *, gated: bool) -> Iterator[str]:
    """Yield what the verdicts hold against an arm: if gates were set, if it fails, or if its weights differ."""
    for arm, verdict in judgement.verdicts.items():
        if verdict != PASS and (gated or verdict == FAIL):
            yield f"{arm} is {verdict} by its gates, whatever load it holds."
    for gate in judgement.gates:
        unproven = gate.kind == "parity" and gate.verdict == INCONCLUSIVE and gate.arm not in out
        if unproven and run.quantisation_difference(gate.arm):
            yield f"Whether {gate.arm} answers as well is open: {gate.reason[:1].lower()}{gate.reason[1:]}"


def error_of(alpha: float, disturbed: list[str]) -> str:
    """Say by which chance any statement on loads is wrong, and which checks saw the machines disturbed."""
    confidence = f"hold together with {digits(100.0 * (1.0 - alpha))} % confidence."
    if not disturbed:
        return f"All statements on loads {confidence}"
    why = f"The machines were disturbed ({', '.join(disturbed)}: see the checks)."
    return f"{why} On undisturbed machines all statements on loads would {confidence}"


def _ended(search: Mapping[str, Any]) -> str:
    """Describe how the search ended, from its own record."""
    spent, budget = (number(search.get(key)) for key in ("spent_s", "budget_s"))
    minutes = ""
    if spent is not None and budget is not None:
        minutes = f" after {digits(spent / 60.0)} of {digits(budget / 60.0)} minutes"
    return f"The search {f'ended{minutes}: {stop}' if (stop := search.get('stop')) else f'was cut off{minutes}'}."


def objective_of(run: Run) -> str:
    """Describe what a step must keep to be held: "p99 TTFT ≤ 500 ms"."""
    parts = [
        f"{gate_label(target.key)} ≤ {digits(target.limit)} {'%' if target.quantile is None else 'ms'}"
        for target in run.targets
    ]
    return " and ".join(parts) or "its objectives"


def to_ship(frontier: Frontier, objective: str, *, out: Collection[str], failed: Collection[str]) -> list[str]:
    """Say which arm holds which load, and what to ship if one replica is not enough, a sentence each.

    It claims nothing about the arms in `out`, and offers those in `failed` for no load.
    """
    control, *treatments = frontier.holdings
    floor = control.low_rps
    sentences = [f"{control.arm} is not shown to hold any load."]
    if floor is not None:
        sentences = [
            f"Up to {digits(floor)} requests/s a replica of {control.arm} holds {objective}: compiling is not needed."
        ]
    offered = [item for item in treatments if item.arm not in failed]
    further = [(item.low_rps, item.arm) for item in offered if (item.low_rps or 0.0) > (floor or 0.0)]
    if further:
        (best_rps, best), *others = sorted(further, key=lambda pair: -(pair[0] or 0.0))
        start = "Up to" if floor is None else f"From {digits(floor)} to"
        more = "".join(f", {arm} to {digits(rps or 0.0)}" for rps, arm in others)
        what = objective if floor is None else "it"
        sentences.append(f"{start} {digits(best_rps or 0.0)} {best} holds {what}{more}.")
    elif names := " or ".join(item.arm for item in offered if item.arm not in out):
        sentences.append(f"No higher load is shown to be held by {names}.")
    ends = [item.high_rps for item in frontier.holdings]
    if None not in ends:
        sentences.append(f"Above {digits(max(end for end in ends if end is not None))} requests/s none does.")
    arms = [arm for arm in frontier.arms if arm not in out]
    if len(arms) < 2:
        return sentences
    best_arm = frontier.highest(out)
    if best_arm is None:
        rest = [arm for arm in arms if not any(frontier.surely_more(other, arm) for other in arms)]
        return [*sentences, f"For more load than one replica holds, the choice is open between {listed(rest)}."]
    factors = [order.least or 0.0 for order in frontier.orders if order.more == best_arm and order.less in arms]
    factor = f", {digits(min(factors))} times or more" if min(factors) > 1.0 else ""
    every = "every other arm that stayed in the search" if out else "every other arm"
    if best_arm in failed:
        return [*sentences, f"{best_arm} surely holds more than {every}{factor}, and is {FAIL} by its gates."]
    return [*sentences, f"For more load than one replica holds, {best_arm}: it surely holds more than {every}{factor}."]


def gpus_for_the_load(frontier: Frontier, rollout: Rollout, out: Collection[str]) -> list[str]:
    """Say in a sentence how many GPUs each arm needs for the rollout's load; [] if it names no load."""
    load = rollout.load_rps
    if load is None:
        return []

    def needed(rps: float | None) -> str:
        return digits(float(max(1, math.ceil(load / rps - 1e-9)) * rollout.gpus_per_replica)) if rps else "–"

    known = (item for item in frontier.holdings if item.arm not in out and (item.low_rps or item.high_rps))
    texts = [f"{needed(item.high_rps)} to {needed(item.low_rps)} with {item.arm}" for item in known]
    return [f"{digits(load)} requests/s over all replicas need GPUs: {listed(texts)}."] if texts else []


def still_open(frontier: Frontier, out: Collection[str]) -> list[str]:
    """Say at which loads nothing is known of each arm, and which pairs are ordered if not all are."""
    loads: dict[str, list[str]] = {}
    for item in frontier.holdings:
        if item.arm not in out:
            loads.setdefault(_open_loads(item), []).append(item.arm)
    among = [order for order in frontier.orders if not {order.more, order.less} & set(out)]
    ordered = [f"{order.more} above {order.less}" for order in among if order.surely]
    known = f"Order by load held, where it is certain: {', '.join(ordered)}" if ordered else "No two arms are ordered"
    return [
        f"Open: {'; '.join(f'{listed(arms)} {text}' for text, arms in loads.items())}.",
        *([f"{known} ({len(ordered)} of {len(among)} pairs)."] if len(ordered) < len(among) else []),
    ]


def _open_loads(item: Holding) -> str:
    low, high = item.low_rps, item.high_rps
    if item.steps and item.starts < FEWEST_STARTS:
        return "at every load (one start decides nothing)"
    thin = " (its steps had too few requests for the objective: make them longer)" if item.thin else ""
    if low is None:
        return f"at every load{thin}" if high is None else f"below {digits(high)} requests/s{thin}"
    if high is None:
        return f"above {digits(low)} requests/s (no step was missed: search higher)"
    return f"from {digits(low)} to {digits(high)} requests/s"
