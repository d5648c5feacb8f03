"""Non-inferiority: a quantile of a latency is at most `gates.margin` above the control's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tailgate.analysis.checks.applied import blocking
from tailgate.analysis.checks.check import Check
from tailgate.analysis.judging.gates import INCONCLUSIVE, Gate
from tailgate.analysis.judging.paths import Path, shortest_s
from tailgate.analysis.run.run import Run
from tailgate.analysis.statistics.compare import Comparison, tail_requests
from tailgate.analysis.statistics.planning import LONGEST_S, MOST_STARTS, comparison_needed, power_of_each
from tailgate.analysis.wording import duration_text


def latency_gate(run: Run, item: Comparison, path: Path | None = None) -> Gate:
    """Return the gate of a decided comparison; `path` is how its evidence grew in interim analyses."""
    needed_s, starts = _needed(run, item, path) if item.verdict == INCONCLUSIVE else (None, None)
    return Gate(
        arm=item.arm,
        gate=noninferiority_name(item),
        kind="noninferiority",
        value=None if item.low is None and item.high is None else item.ratio,
        limit=1.0 + item.margin,
        unit="ratio",
        verdict=item.verdict,
        reason=item.reason,
        lacks=item.lacks,
        interval=(item.low, item.high),
        low=item.low,
        # The ratio over the run must be within the margin too.
        high=None if item.high is None else max(item.high, item.whole or 0.0),
        lasting=item.lasting,
        needed_s=needed_s,
        needed_starts=None if starts is None or starts > MOST_STARTS else starts,
        path=path,
    )


def noninferiority_name(item: Comparison) -> str:
    """Return the name of the comparison's gate: "noninferiority p99_ttft", "noninferiority p99_9_e2e"."""
    quantile = f"p{100.0 * item.quantile:.10g}".replace(".", "_")
    return f"noninferiority {quantile}_{item.metric}"


def _needed(run: Run, item: Comparison, path: Path | None) -> tuple[float | None, int | None]:
    """Return the run length and the starts that would decide it; None if none would, or no more are needed."""
    if path is not None:
        return whole_s(run, path), None
    if run.separate:
        # More of the same run says nothing of other starts and days; too short a run says nothing at all.
        is_short = item.blocks < run.limits.min_blocks or item.requests < tail_requests(item.quantile)
        return None, None if is_short else item.trials + 1
    seconds, starts = comparison_needed(
        item,
        block_s=run.block_s,
        min_blocks=run.limits.min_blocks,
        overhead_s=run.limits.cold_s * len(run.trials),
        power=power_of_each(run.limits),
    )
    return seconds, starts if starts > item.trials else None


def whole_s(run: Run, path: Path) -> float | None:
    """Return the length of the run that decides the gate, at its recent pace; None if it decides nothing."""
    left_s = path.outlook_s
    return None if left_s is None or left_s > LONGEST_S else run.seconds + left_s


def needed_text(run: Run, needed_s: float) -> str:
    """Say how long the run has to be: `needed_s`, or the shortest that can PASS; empty where it was that long."""
    what, seconds = "both runs to last" if run.separate else "a run of", max(shortest_s(run), needed_s)
    has_s = min(sum(trial.seconds for trial in run.trials_of(arm)) for arm in run.arms)
    return f"A PASS needs {what} about {duration_text(seconds)}." if seconds > has_s else ""


def with_needed(run: Run, before: Gate, after: Gate, checks: Sequence[Check]) -> Gate:
    """Add the run length that the gate's checks require, if they alone open it and a longer run passes them. No length
    is shorter than what lets every gate PASS."""
    opened = before.verdict != INCONCLUSIVE and after.verdict == INCONCLUSIVE and not run.separate
    if opened and all(check.rule.fixed_by_length for check in blocking(after, checks)):
        left_s = max(0.0, shortest_s(run) - run.seconds) or None
        path = after.path and replace(after.path, outcome=None, decided_s=None, outlook_s=left_s)
        return replace(after, needed_s=shortest_s(run), path=path)
    if after.needed_s is None or after.path is not None:
        return after
    return replace(after, needed_s=max(after.needed_s, shortest_s(run)))
