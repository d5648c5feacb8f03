"""The frontier of a run as its summary holds it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from analysis.checks.applied import blocking
from analysis.checks.check import MACHINES, Check
from analysis.frontier.answer import still_open, to_ship
from analysis.frontier.holdings import frontier_of
from analysis.judging.gates import FAIL, INCONCLUSIVE, PASS
from analysis.judging.judgement import Judgement
from analysis.judging.load_steps import FEWEST_STARTS, is_search, latency_target, steps_of
from analysis.records.plain_values import mapping, number, rows_of
from analysis.run.run import Run
from analysis.run.startup import startup_row
from analysis.settings.metrics import gate_label
from analysis.wording import digits


def summary_rows(run: Run, judgement: Judgement) -> dict[str, Any] | None:
    """What the summary says of which policy to ship; None where the run made no search.

    Where a check leaves the loads of the search open, no step is used: of the arm that it concerns, or of any.
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
        shipped.insert(0, f"Nothing is known of any load, for {', '.join(whole)}: see the checks.")
    target = latency_target(run)
    label = "" if target is None else gate_label(target.key)
    gated = search.get("gated", True) is not False
    return {
        "headline": " ".join(shipped),
        "answer": [
            *shipped,
            *_of_gates(run, judgement, out, gated=gated),
            *(f"{arm} {reason}." for arm, reason in left.items()),
            *([] if whole else map(_of_blocked, blocked.items())),
            *still_open(frontier, out),
            error_of(frontier.alpha, sorted(disturbed)),
            *([_ended(search)] if search else []),
        ],
        "highest": frontier.highest(),
        "failed": failed,
        "arms": [asdict(item) | {"start_s": startup_row(run, item.arm)["serving_s"]} for item in frontier.holdings],
        "blocked_by": whole,
        "blocked": blocked,
        "objective": objective_of(run),
        "latency": {"label": label, "limit_ms": None if target is None else target.limit},
        "steps": [asdict(step) for step in steps],
        **({"search": {"gated": gated, "stop": str(search.get("stop") or "")}} if search else {}),
    }


def _blocking(run: Run, judgement: Judgement) -> dict[str, list[Check]]:
    """The checks that leave the loads of each arm open: of the control, whose load no gate judges, those that concern
    all arms."""
    own = {gate.arm: blocking(gate, judgement.checks) for gate in judgement.gates if gate.gate == "goodput"}
    whole = [
        check
        for check in judgement.checks
        if check.arm in (None, run.control) and any(check in checks for checks in own.values())
    ]
    return {arm: own.get(arm, []) for arm in run.treatments} | {run.control: whole}


def _of_gates(run: Run, judgement: Judgement, out: Collection[str], *, gated: bool) -> Iterator[str]:
    """What the verdicts say against an arm: where they were asked for, or it fails, or its weights differ."""
    for arm, verdict in judgement.verdicts.items():
        if verdict != PASS and (gated or verdict == FAIL):
            yield f"{arm} is {verdict} by its gates, and nothing here changes that."
    for gate in judgement.gates:
        unproven = gate.kind == "parity" and gate.verdict == INCONCLUSIVE and gate.arm not in out
        if unproven and run.weights_apart(gate.arm):
            yield f"{gate.arm} is not shown to answer as well: {gate.reason[:1].lower()}{gate.reason[1:]}"


def _of_blocked(blocked: tuple[str, list[str]]) -> str:
    arm, checks = blocked
    return f"Nothing is known of {arm}, for {', '.join(checks)}: see the checks."


def error_of(alpha: float, disturbed: list[str]) -> str:
    """Say by which chance any statement on loads is wrong, and which checks saw the machines disturbed."""
    chance = f"true all at once, but for a chance of {digits(100.0 * alpha)} %"
    if not disturbed:
        return f"What is said of loads is {chance}."
    return (
        f"What is said of loads is of machines that were disturbed ({', '.join(disturbed)}: see the checks). Left "
        f"alone it would be {chance}."
    )


def asks_nothing(rows: Mapping[str, Any] | None) -> bool:
    """Return whether the rows are of searches that asked for no verdicts."""
    return mapping(mapping(rows).get("search")).get("gated") is False


def headline_of(rows: Mapping[str, Any] | None) -> str:
    """Return the headline of a search without verdicts; empty for others, and where an arm is FAIL."""
    return str(rows["headline"]) if rows is not None and asks_nothing(rows) and not rows["failed"] else ""


def _ended(search: Mapping[str, Any]) -> str:
    """How the search went on, by what it wrote."""
    spent, budget, parity = (number(search.get(key)) for key in ("spent_s", "budget_s", "parity_s"))
    minutes = ""
    if spent is not None and budget is not None:
        minutes = f" after {digits(spent / 60.0)} of {digits(budget / 60.0)} minutes"
        minutes += f", {digits(parity / 60.0)} of them for parity" if parity is not None else ""
    return (
        f"The search ended{minutes}: {search['stop']}." if search.get("stop") else f"The search was cut off{minutes}."
    )


def objective_of(run: Run) -> str:
    """What a step must keep to be held, in words: "p99 TTFT ≤ 500 ms"."""
    parts = [
        f"{gate_label(target.key)} ≤ {digits(target.limit)} {'%' if target.quantile is None else 'ms'}"
        for target in run.targets
    ]
    if run.attainment is not None:
        parts.append(f"{digits(100.0 * run.attainment)} % of the requests within every limit")
    return " and ".join(parts) or "its objectives"
