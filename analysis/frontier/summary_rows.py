"""The frontier of a run as its summary holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from analysis.checks.applied import blocking
from analysis.checks.check import MACHINES, Check
from analysis.frontier.answer import answer, gpus_for, load_ranges
from analysis.frontier.holdings import frontier_of
from analysis.frontier.latencies import drawn_target, step_latencies
from analysis.frontier.search import Left
from analysis.judging.gates import FAIL, INCONCLUSIVE
from analysis.judging.judgement import Judgement
from analysis.judging.load_steps import is_search, steps_of
from analysis.records.plain_values import mapping, number, rows_of
from analysis.run.run import Run
from analysis.run.startup import start_of
from analysis.settings.metrics import gate_label
from analysis.settings.rollout import Rollout
from analysis.wording import digits


def summary_rows(run: Run, judgement: Judgement) -> dict[str, Any] | None:
    """What the summary says of which policy to ship; None where the run made no search.

    Where a check leaves the loads of the search open, no step is used: of the arm that it concerns, or of any.
    """
    if not is_search(run):
        return None
    rollout = Rollout.recorded(mapping(run.records.experiment.get("rollout")))
    found = _blocking(run, judgement)
    disturbed: set[str] = set()
    if run.in_turn:
        disturbed = {check.check for own in found.values() for check in own if check.rule.rank == MACHINES}
        found = {
            arm: [check for check in own if check.rule.rank != MACHINES and not check.rule.by_step]
            for arm, own in found.items()
        }
    by_arm = {arm: {check.check for check in own} for arm, own in found.items()}
    whole = by_arm[run.control]
    # A replica's own load: replicas are taken to add up.
    made = steps_of(run)
    steps = [replace(step, rate=step.rate / run.replicas(step.arm)) for step in made if not by_arm[step.arm]]
    frontier = frontier_of(steps, run.arms, alpha=run.limits.alpha)
    starts = {arm: start_of(run, arm) for arm in run.arms}
    search = mapping(run.records.search)
    untried = [Left(arm=arm, reason="no trial of it was recorded") for arm in run.arms if not run.trials_of(arm)]
    blocked = {arm: sorted(checks) for arm, checks in by_arm.items() if checks and run.trials_of(arm)}
    asked = search.get("gated", True) is not False
    failed = [arm for arm, verdict in judgement.verdicts.items() if verdict == FAIL]
    target = drawn_target(run)
    latencies = [] if target is None else step_latencies(run, target)
    sentences = answer(
        frontier,
        objective=objective_of(run),
        latencies=latencies,
        label="" if target is None else gate_label(target.key),
        starts=starts,
        verdicts={arm: verdict for arm, verdict in judgement.verdicts.items() if asked or arm in failed},
        left=_left(search, "left"),
        dropped=[*_left(search, "dropped"), *untried],
        blocked={} if whole else blocked,
        unproven={
            gate.arm: gate.reason[:1].lower() + gate.reason[1:]
            for gate in judgement.gates
            if gate.kind == "parity" and gate.verdict == INCONCLUSIVE and run.weights_apart(gate.arm)
        },
        disturbed=sorted(disturbed),
        load_rps=rollout.load_rps,
        gpus_per_replica=rollout.gpus_per_replica,
    )
    if whole:
        sentences = [f"Nothing is known of any load, for {', '.join(sorted(whole))}: see the checks.", *sentences]
    arms = []
    for item in frontier.holdings:
        row = asdict(item) | {"start": asdict(starts[item.arm])}
        if rollout.load_rps is not None:
            row["gpus"] = asdict(gpus_for(item, rollout.load_rps, rollout.gpus_per_replica))
        arms.append(row)
    rows: dict[str, Any] = {
        "alpha": frontier.alpha,
        "answer": sentences,
        "highest": frontier.highest,
        "failed": failed,
        "arms": arms,
        "pairs": [asdict(order) for order in frontier.orders],
        "ranges": [asdict(item) for item in load_ranges(frontier, starts, failed=failed)],
        "blocked_by": sorted(whole),
        "blocked": blocked,
        "disturbed_by": sorted(disturbed),
        "objective": objective_of(run),
        "steps": [asdict(step) for step in made],
    }
    if target is not None:
        rows["latency"] = {
            "metric": target.metric,
            "quantile": target.quantile,
            "limit_ms": target.limit,
            "steps": [asdict(item) for item in latencies],
        }
    return rows | ({"search": _search_row(search)} if search else {})


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


def asks_nothing(rows: Mapping[str, Any] | None) -> bool:
    """Return whether the rows are of searches that asked for no verdicts."""
    return mapping(mapping(rows).get("search")).get("gated") is False


def headline_of(rows: Mapping[str, Any] | None) -> str:
    """Return the headline of a search without verdicts: its answer up to the costs; empty for others, and where an arm
    is FAIL."""
    if rows is None or not asks_nothing(rows) or rows["failed"]:
        return ""
    lines = [str(line) for line in rows["answer"]]
    end = next((place for place, line in enumerate(lines) if line.startswith("For more load")), len(lines) - 1)
    return " ".join(lines[: end + 1])


def _left(search: Mapping[str, Any], key: str) -> list[Left]:
    """The arms that the search says it let go, and why."""
    return [Left(arm=str(row.get("arm")), reason=str(row.get("reason"))) for row in rows_of(search.get(key))]


def _search_row(search: Mapping[str, Any]) -> dict[str, Any]:
    """How the search went on, by what it wrote."""
    known = {key: number(search.get(key)) for key in ("budget_s", "spent_s")}
    stop, parity_s = search.get("stop"), number(search.get("parity_s"))
    return {
        **known,
        **({} if parity_s is None else {"parity_s": parity_s}),
        "gated": search.get("gated") is True,
        "stop": stop if isinstance(stop, str) else "",
        "left": [asdict(item) for item in _left(search, "left")],
        "dropped": [asdict(item) for item in _left(search, "dropped")],
    }


def objective_of(run: Run) -> str:
    """What a step must keep to be held, in words: "p99 TTFT ≤ 500 ms"."""
    parts = [
        f"{gate_label(target.key)} ≤ {digits(target.limit)} {'%' if target.quantile is None else 'ms'}"
        for target in run.targets
    ]
    if run.attainment is not None:
        parts.append(f"{digits(100.0 * run.attainment)} % of the requests within every limit")
    return " and ".join(parts) or "its objectives"
