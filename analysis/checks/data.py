"""Whether the data can carry the statistics: enough blocks, a tail to speak of, machines of one ratio."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from tailgate.analysis.checks.check import TAIL, TOO_SHORT, Check, Evidence, rule
from tailgate.analysis.judging.gates import FAIL, PASS
from tailgate.analysis.judging.gates.latency import noninferiority_name
from tailgate.analysis.run.run import Run
from tailgate.analysis.run.slo import failures, judge_share, units
from tailgate.analysis.settings.metrics import quantile_label
from tailgate.analysis.statistics.compare import TAIL_REQUESTS, Comparison, tail_requests
from tailgate.analysis.statistics.machines import disagreement
from tailgate.analysis.wording import counted

# Limits are widened for drift. A drift so slow that neighbours are nearly equal cannot be estimated.
MOST_CORRELATION = 0.7
# Few machines show little, so that differences count from here on (as is usual of Cochran's Q).
DISAGREE_ALPHA = 0.1


def _fewer(seen: Evidence, arm: str) -> str:
    return next((item.fewer for item in _of(seen, arm)), "") or arm


def _of(seen: Evidence, arm: str) -> list[Comparison]:
    return [item for item in seen.compared.gated if item.arm == arm]


@rule(
    "blocks",
    sees="Fewer than `gates.min_blocks` steady blocks; for objectives, fewer blocks in the run.",
    rank=TOO_SHORT,
    fixed_by_length=True,
    in_search=False,
)
def blocks(seen: Evidence) -> Iterator[Check]:
    run, limits = seen.run, seen.run.limits
    # Sequential evidence waits by itself for enough blocks.
    for arm in () if limits.sequential else run.treatments:
        usable = {"noninferiority": min((item.blocks for item in _of(seen, arm)), default=0)}
        if run.targets:
            of_arms = [sum(trial.blocks for trial in run.trials_of(name)) for name in run.arms]
            usable["slo"] = min(of_arms) if run.separate else run.blocks
        short = {kind: count for kind, count in usable.items() if count < limits.min_blocks}
        need = f"{limits.min_blocks} usable blocks of {run.block_s:g} s after the cold start (gates.min_blocks)"
        faults = [f"A verdict needs {need}; {_fewer(seen, arm)} has {min(short.values())}"] if short else []
        yield blocks.found(faults, arm=arm, opens=tuple(short))


@rule(
    "tail",
    sees=f"Fewer than {TAIL_REQUESTS:g} requests lie beyond the quantile.",
    opens=("noninferiority",),
    rank=TOO_SHORT,
    fixed_by_length=True,
)
def tail_size(seen: Evidence) -> Iterator[Check]:
    run, quantile, needed = seen.run, seen.run.limits.quantile, tail_requests(seen.run.limits.quantile)
    for arm in run.treatments if run.limits.sequential or not seen.search else ():
        requests = min((item.requests for item in _of(seen, arm)), default=0)
        fault = f"p{100 * quantile:.10g} needs {counted(needed, 'steady request')}; {_fewer(seen, arm)} has {requests}"
        yield tail_size.found([fault] if requests < needed else [], arm=arm)


@rule(
    "cut requests",
    sees="More requests were cut off by the end than lie beyond the quantile.",
    remedy="Let the run drain before it ends, or run longer.",
    opens=("noninferiority", "slo"),
    rank=TAIL,
    at_end=True,
    fixed_by_length=True,
    in_search=False,
)
def cut(seen: Evidence) -> Iterator[Check]:
    """The slowest requests are in flight the longest."""
    run, limit = seen.run, 1.0 - seen.run.limits.quantile
    cut_off = {arm: run.requests.cut[run.of_arm(arm) & run.usable] for arm in run.arms}
    for arm in (arm for arm in run.treatments if arm not in run.ended_arms):
        worst = max((arm, run.control), key=lambda name: float(cut_off[name].mean()) if cut_off[name].size else 0.0)
        count, requests = int(cut_off[worst].sum()), cut_off[worst].size
        fault = (
            f"{count} of {requests} requests of {worst} were still in flight at the end of the run: all of the "
            f"slowest {100.0 * limit:.3g} % may be among them"
        )
        yield cut.found([fault] if count / max(1, requests) > limit + 1e-12 else [], arm=arm)


@rule(
    "block autocorrelation",
    sees=f"Neighbouring groups of blocks correlate by more than {MOST_CORRELATION:g}, as predicted from blocks.",
    remedy="Run longer, so that groups get longer, or run at least six trials (trials.count).",
    opens=("noninferiority",),
    in_search=False,
)
def autocorrelation(seen: Evidence) -> Iterator[Check]:
    for arm in () if seen.run.limits.sequential else seen.run.treatments:
        correlation = most_correlation(_of(seen, arm))
        if correlation is not None:
            fault = (
                f"The difference of {arm} from the control hardly changes from one group of blocks to the next "
                f"(correlation {correlation:.2f}, limit {MOST_CORRELATION:.2f}): a disturbance outlasts a group"
            )
            yield autocorrelation.found([fault] if correlation > MOST_CORRELATION else [], arm=arm)


def most_correlation(items: Sequence[Comparison]) -> float | None:
    """Return the largest correlation of neighbouring groups of blocks; None if there are too few groups."""
    return max((item.autocorrelation for item in items if item.autocorrelation is not None), default=None)


@rule(
    "heterogeneity",
    sees="One machine of joined runs contradicts what all of them decide, beyond chance (Cochran's Q). It opens the "
    "gates that are contradicted.",
    says="The machines disagree: {}.",
    remedy="Find out in what the machines differ (the section on the runs shows each), or judge each by itself.",
    opens=("noninferiority", "slo", "error"),
    in_search=False,
)
def heterogeneity(seen: Evidence) -> Iterator[Check]:
    run = seen.run
    for arm in run.treatments if len(run.machines) > 1 else ():
        by_machine = [item for item in seen.compared.by_machine if item.arm == arm]
        found = [*_missed_on_one(run, arm), *contradicted(_of(seen, arm), by_machine)]
        yield heterogeneity.found(
            [text for *_, text in found],
            arm=arm,
            opens=tuple(dict.fromkeys(kind for _, kind, _ in found)) or None,
            gates=tuple(gate for gate, *_ in found),
        )


def contradicted(gated: Sequence[Comparison], by_machine: Sequence[Comparison]) -> Iterator[tuple[str, str, str]]:
    """Yield (gate, kind, observation) of each decided comparison over all machines that one machine contradicts: it is
    surely on the other side of the margin, or was seen there and machines differ beyond chance (Cochran's Q)."""
    for item in gated:
        own = [one for one in by_machine if (one.metric, one.quantile) == (item.metric, item.quantile)]
        if _contradicted(item, own):
            known = sorted((one.ratio, one.machine) for one in own if one.ratio is not None)
            on_each = ", ".join(f"{ratio:.2f} on {machine}" for ratio, machine in reversed(known))
            label = quantile_label(item.metric, item.quantile)
            text = f"{label} is {item.ratio:.2f} times that of {item.control} over all, and {on_each}"
            yield noninferiority_name(item), "noninferiority", text


def _contradicted(item: Comparison, by_machine: Sequence[Comparison]) -> bool:
    if item.verdict not in (PASS, FAIL):
        return False
    worse = item.verdict == PASS
    other = [one for one in by_machine if one.ratio is not None and (one.ratio > 1.0 + item.margin) is worse]
    own = [one.p_inferior if worse else one.p_noninferior for one in other]
    if any(value is not None and value <= item.alpha for value in own):
        return True
    known = [one for one in by_machine if one.ratio and one.spread is not None]
    spreads = [math.hypot(one.spread or 0.0, one.restart_spread / math.sqrt(max(1, one.trials))) for one in known]
    p_value = disagreement(np.log([one.ratio or 1.0 for one in known]), np.array(spreads)) if other else None
    return p_value is not None and p_value <= DISAGREE_ALPHA


def _missed_on_one(run: Run, arm: str) -> Iterator[tuple[str, str, str]]:
    """Yield (gate, kind, observation) of each share gate that the arm passes overall and surely misses on one
    machine."""
    requests = run.requests
    answered = failures(requests, run.of_arm(arm) & ~requests.broken)
    shares = [("errors", "error", answered, run.limits.max_error_pct / 100.0)]
    for target in run.targets:
        own = units(requests, run.of_arm(arm) & run.usable, target)
        shares.append((f"slo {target.key}", "slo", own, target.allowed_share))
    for gate, kind, own, allowed in shares:
        if not len(own.missed) or own.missed.mean() > allowed:
            continue
        block, of_machine = run.block_of(own.row, own.at_ns), run.machines.codes(requests.trial[own.row])
        for place, machine in enumerate(run.machines.names):
            mine = of_machine == place
            result = judge_share(own.missed[mine], block[mine], allowed=allowed, alpha=run.limits.alpha)
            if result.verdict == FAIL:
                count = f"{result.missed} of {result.requests}"
                yield gate, kind, f"{gate} is missed on {machine} alone, by {count}, and kept over all"
