"""The frontier of a run as its summary holds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from analysis.foresight.costs import Start, span_row, start_of, tokens_of
from analysis.frontier.answer import answer, load_ranges
from analysis.frontier.holdings import Frontier, frontier_of
from analysis.frontier.load_costs import LoadCost, load_costs, shown_loads
from analysis.judging.judgement import Judgement
from analysis.judging.load_steps import is_search, steps_of
from analysis.judging.wording import digits, gate_label
from analysis.records.plain_values import mapping
from analysis.run.run import Run
from analysis.settings.rollout import Rollout


def summary_rows(run: Run, judgement: Judgement) -> dict[str, Any] | None:
    """What the summary says of which policy to ship; None where the run made no search, or has one arm.

    Where a check leaves the loads of the search open, no step of it is used.
    """
    if not is_search(run) or len(run.arms) < 2:
        return None
    rollout = Rollout.from_table(mapping(run.records.experiment.get("rollout")))
    blocked = sorted({check for gate in judgement.gates if gate.gate == "goodput" for check in gate.blocked_by})
    # A replica's own load: replicas are taken to add up.
    steps = [replace(step, rate=step.rate / run.replicas(step.arm)) for step in steps_of(run)]
    frontier = frontier_of([] if blocked else steps, run.arms, alpha=run.limits.alpha)
    starts = {arm: start_of(run, arm) for arm in run.arms}
    sentences = answer(frontier, objective=objective_of(run), starts=starts, verdicts=judgement.verdicts)
    if blocked:
        sentences = [f"Nothing is known of any load, for {', '.join(blocked)}: see the checks.", *sentences]
    costs = load_costs(
        frontier,
        shown_loads(frontier, rollout),
        rollout=rollout,
        tokens={arm: tokens_of(run, arm) for arm in run.arms},
    )
    return frontier_rows(frontier, sentences, starts, costs) | {"blocked_by": blocked}


def objective_of(run: Run) -> str:
    """What a step must keep to be held, in words: "p99 TTFT ≤ 500 ms"."""
    parts = [
        f"{gate_label(target.key)} {'<' if target.strict else '≤'} {digits(target.limit)} "
        f"{'%' if target.quantile is None else 'ms'}"
        for target in run.targets
    ]
    if run.attainment is not None:
        parts.append(f"{digits(100.0 * run.attainment)} % of the requests within every limit")
    return " and ".join(parts) or "its objectives"


def frontier_rows(
    frontier: Frontier, sentences: Sequence[str], starts: dict[str, Start], costs: Sequence[LoadCost]
) -> dict[str, Any]:
    """The frontier as plain values."""
    return {
        "alpha": frontier.alpha,
        "answer": list(sentences),
        "highest": frontier.highest,
        "arms": [asdict(item) | {"start": asdict(starts[item.arm])} for item in frontier.holdings],
        "pairs": [asdict(order) for order in frontier.orders],
        "ranges": [asdict(item) for item in load_ranges(frontier, starts)],
        "costs": [
            {
                "load_rps": cost.load_rps,
                "arm": cost.arm,
                "surely_fewest": cost.surely_fewest,
                **{name: span_row(getattr(cost, name)) for name in ("gpus", "token_gpu_s", "token_price")},
            }
            for cost in costs
        ],
    }
