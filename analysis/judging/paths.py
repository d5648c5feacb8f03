"""How the evidence on each gate grew, and when it decided, in runs with interim analyses.

A path errs with a chance of alpha at most over all analyses together (`analysis.statistics.sequential`,
`analysis.statistics.share_evidence`). A FAIL is for good; a PASS stands unless what came after contradicts it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from analysis.arrays import Floats, Ints
from analysis.run.run import Run
from analysis.run.slo import ShareResult, Units
from analysis.run.variance import start_spread
from analysis.settings.gate_limits import MIN_BLOCKS
from analysis.settings.metrics import quantile_label
from analysis.statistics.compare import Comparison, Sample, limits_text
from analysis.statistics.sequential import APART, FEWEST_GROUPS, Exchange, Groups, Outcome, groups_for
from analysis.statistics.share_evidence import FEWEST_BLOCKS, share_evidence, share_limits, tail_effects
from analysis.wording import counted

GROUP_BLOCKS = 2
SEGMENTS = 3  # to a block: what a large effect is seen in
SOONEST_BLOCKS = 6
_STARTS = 1.645  # standard deviations
METHOD = "betting on groups of blocks"
_RECENT = 0.5  # of the path: what tells how fast evidence grows
_FEWEST_FOR_HOPELESS, _FAR = 10, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """One gate after each group of blocks, of shape (groups,): the seconds that had been judged, the value, its limits,
    and the evidence of harm and of safety as decimal logarithms of e-values. Shares are percent."""

    at_s: Floats
    value: Floats
    low: Floats
    high: Floats
    harm: Floats
    safety: Floats
    limit: float  # of the value
    needed: float  # of evidence of harm, as a decimal logarithm
    needed_safety: float
    outcome: Outcome | None
    decided_s: float | None
    wait_s: float = 0.0  # until a PASS has the blocks that it needs

    @property
    def outlook_s(self) -> float | None:
        """Return how many seconds more would decide it at its recent pace: 0 if it is decided, None if none would."""
        if self.outcome is not None:
            return 0.0
        left = [
            max(seconds, wait_s)
            for evidence, needed, wait_s in (
                (self.harm, self.needed, 0.0),
                (self.safety, self.needed_safety, self.wait_s),
            )
            if (seconds := _left_s(self.at_s, evidence, needed)) is not None
        ]
        # Evidence that is there already lacks something else.
        return min((seconds for seconds in left if seconds > 0), default=self.wait_s or None)

    def hopeless(self, left_s: float) -> bool:
        """Whether `left_s` seconds more will hardly decide it, as even the pace that luck may have hidden would not."""
        if self.outcome is not None or self.may_fail(left_s):
            return False
        return not self._may_reach(self.safety, self.needed_safety, left_s)

    def may_fail(self, left_s: float) -> bool:
        """Whether `left_s` seconds more may still make it fail."""
        return self.outcome is None and self._may_reach(self.harm, self.needed, left_s)

    def _may_reach(self, evidence: Floats, needed: float, left_s: float) -> bool:
        groups = len(self.at_s)
        steps = np.diff(evidence[np.isfinite(evidence)])
        if groups < _FEWEST_FOR_HOPELESS or len(steps) < 2:
            return True
        left = left_s / (float(self.at_s[-1]) / groups)
        # After as many groups again, the sum of steps like those so far strays by no more than this.
        most = left * float(steps.mean()) + _FAR * float(steps.std(ddof=1)) * (
            math.sqrt(left) + left / math.sqrt(len(steps))
        )
        return float(evidence[-1]) + most >= needed


def _left_s(at_s: Floats, evidence: Floats, needed: float) -> float | None:
    known = np.isfinite(evidence)
    if int(known.sum()) < 2:
        return None
    times, values = at_s[known], evidence[known]
    first = int(len(times) * (1.0 - _RECENT))
    first = min(first, len(times) - 2)
    pace = float((values[-1] - values[first]) / (times[-1] - times[first]))
    return max(0.0, (needed - float(values[-1])) / pace) if pace > 0 else None


def with_evidence(
    run: Run,
    item: Comparison,
    samples: tuple[Sample, Sample],
    segments: tuple[Sample, Sample] | None = None,
    *,
    gates: int,
) -> tuple[Comparison, Path]:
    """Return the comparison as the evidence decides it, one of `gates` gates of which any may fail by chance.

    `segments` are the samples by `SEGMENTS` to a block, where a large effect may decide sooner.
    """
    exchange = exchange_of(run, item.arm, item.control)
    groups = groups_for(
        *samples,
        q=item.quantile,
        blocks=GROUP_BLOCKS,
        restart_spread=start_spread(run, item.arm),
        exchange=exchange,
    )
    evidence = groups.evidence(item.margin)
    low, high = groups.limits(alpha=item.alpha)
    decision = evidence.decision(alpha=item.alpha, gates=gates, to_the_end=True)
    at_s = judged_s(run, evidence.last_block)
    decided = None if decision is None else Decided(decision[0], float(at_s[decision[1]]))
    # Starts that differ by as much as the nulls lie apart would decide by themselves.
    if segments is not None and _STARTS * math.sqrt(2.0) * start_spread(run, item.arm) < math.log(APART):
        sooner = groups_for(*segments, q=item.quantile, blocks=1, exchange=exchange, apart=APART)
        decided = first_decided(decided, _decided_sooner(run, item, sooner, gates=gates))
        low, high = _narrowed(low, high, at_s, *_limits_sooner(run, sooner, alpha=item.alpha))
    low, high = _as_decided(low, high, decided, at_s, limit=1.0 + item.margin)
    path = Path(
        at_s=at_s,
        value=evidence.whole,
        low=low,
        high=high,
        harm=evidence.harm / math.log(10.0),
        safety=evidence.safety / math.log(10.0),
        limit=1.0 + item.margin,
        needed=math.log10(gates / item.alpha),
        needed_safety=-math.log10(item.alpha),
        outcome=None if decided is None else decided.outcome,
        decided_s=None if decided is None else decided.at_s,
        wait_s=max(0.0, run.limits.cold_s + FEWEST_GROUPS * GROUP_BLOCKS * run.block_s - run.seconds),
    )
    known = len(groups) > 0
    whole = float(evidence.whole[-1]) if known else item.whole
    seen = replace(
        item,
        low=float(low[-1]) if known and low[-1] > 0 else None,
        high=float(high[-1]) if known and math.isfinite(high[-1]) else None,
        whole=whole,
        p_noninferior=None,
        p_inferior=None,
        autocorrelation=None,
        method=METHOD,
        groups=len(groups),
        obstacle=None if known else item.obstacle,
        # Of shares that differ, a block's own quantile is that of the larger one.
        ratio=item.ratio if exchange == "arms" else whole,
        verdict=path.outcome or "INCONCLUSIVE",
    )
    return replace(seen, reason=_reason(seen, path)), path


@dataclass(frozen=True, slots=True)
class Decided:
    """What was decided, after how many seconds of judged traffic."""

    outcome: Outcome
    at_s: float


def _decided_sooner(run: Run, item: Comparison, groups: Groups, *, gates: int) -> Decided | None:
    """Return what a large effect decides, from `SOONEST_BLOCKS` blocks on: a disturbance of one arm lasts for less."""
    evidence = groups.evidence(item.margin)
    decision = evidence.since(_blocks_seen(evidence.last_block) >= SOONEST_BLOCKS).decision(
        alpha=item.alpha, gates=gates, to_the_end=True
    )
    if decision is None or not evidence.lasts(decision[0], alpha=item.alpha, gates=gates):
        return None
    at_s = judged_s(run, evidence.last_block // SEGMENTS)
    return Decided(decision[0], float(at_s[decision[1]]))


def _blocks_seen(last_segment: Ints) -> Ints:
    """Return how many blocks hold groups of segments, up to each group: shape (groups,)."""
    return np.asarray(np.unique(last_segment // SEGMENTS, return_inverse=True)[1] + 1)


def _limits_sooner(run: Run, groups: Groups, *, alpha: float) -> tuple[Floats, Floats, Floats]:
    """Return the times from `SOONEST_BLOCKS` blocks on and the limits of the ratio at each, by groups of segments."""
    low, high = groups.limits(alpha=alpha)
    counted = _blocks_seen(groups.last_block) >= SOONEST_BLOCKS
    return judged_s(run, groups.last_block // SEGMENTS)[counted], low[counted], high[counted]


def _narrowed(
    low: Floats, high: Floats, at_s: Floats, times: Floats, lows: Floats, highs: Floats
) -> tuple[Floats, Floats]:
    """Return the limits at `at_s`, narrowed by those of the last of `times` until then."""
    latest = np.searchsorted(times, at_s, side="right") - 1
    known = latest >= 0
    low, high = low.copy(), high.copy()
    low[known] = np.maximum(low[known], lows[latest[known]])
    high[known] = np.minimum(high[known], highs[latest[known]])
    return low, high


def first_decided(one: Decided | None, other: Decided | None) -> Decided | None:
    """Return what was decided first; a PASS does not stand beside a FAIL."""
    known = [item for item in (one, other) if item is not None]
    failed = [item for item in known if item.outcome == "FAIL"]
    return min(failed or known, key=lambda item: item.at_s, default=None)


def _as_decided(
    low: Floats, high: Floats, decided: Decided | None, at_s: Floats, *, limit: float
) -> tuple[Floats, Floats]:
    """Return the limits with the side that is decided, which holds from then on."""
    if decided is None:
        return low, high
    after = at_s >= decided.at_s
    if decided.outcome == "PASS":
        return low, np.where(after, np.minimum(high, limit), high)
    return np.where(after, np.maximum(low, limit), low), high


def exchange_of(run: Run, arm: str, control: str) -> Exchange:
    """Return what a test may exchange: whole arms if both had equal shares of the traffic throughout, else requests."""
    weights = run.weights
    equal = run.design != "split" or weights.get(arm) == weights.get(control)
    return "arms" if equal and not run.records.weights else "requests"


def _reason(item: Comparison, path: Path) -> str:
    label = quantile_label(item.metric, item.quantile)
    if item.ratio is None or not len(path.at_s):
        return f"{label} cannot be compared: {item.obstacle or 'no group of blocks is whole'}."
    bound = 1.0 + item.margin
    of = "" if item.ratio == item.whole else " of a typical block"
    seen = f"{label}{of} is {item.ratio:.2f} times that of {item.control}"
    if path.outcome is None and len(path.at_s) < FEWEST_GROUPS:
        return f"{seen} in {counted(len(path.at_s), 'group')} of blocks; a verdict needs {FEWEST_GROUPS} or more."
    limits = limits_text(item.low, item.high, "no limits yet")
    seen = f"{seen} ({limits}, whenever the run is analysed)"
    if path.decided_s is None:
        return f"{seen}, which leaves the limit of {bound:.2f} open."
    side = "above" if path.outcome == "FAIL" else "below"
    return f"{seen}, {side} the limit of {bound:.2f}: decided after {path.decided_s / 60.0:.1f} minutes."


def share_tests(run: Run) -> int:
    """Return how many shares may FAIL: the objectives and the errors of each treatment."""
    return max(1, len(run.treatments)) * (len(run.targets) + 1)


def share_path(run: Run, counted: Units, block: Ints, *, allowed: float) -> tuple[ShareResult, Path]:
    """Return whether the share of `counted` that missed keeps within what is allowed, by the evidence block by block.

    `block` is that of each request or gap.
    """
    requests = np.bincount(block, minlength=run.blocks)
    bad = np.bincount(block[counted.missed], minlength=run.blocks)
    tail, far = np.ones(run.blocks), np.ones(run.blocks, dtype=np.bool_)
    if counted.limit_ms is not None and len(counted.ms) and 0.0 < allowed < 1.0:
        tail, far = tail_effects(counted.ms, block, blocks=run.blocks, allowed=allowed, limit_ms=counted.limit_ms)
    evidence = share_evidence(bad, requests, allowed=allowed, tail=tail, far=far)
    tests = share_tests(run)
    alpha, asked = run.limits.alpha, run.limits.min_blocks
    # Few blocks are enough by default; who asks for more gets them.
    least = min(asked, FEWEST_BLOCKS) if asked <= MIN_BLOCKS else asked
    decision = evidence.decision(alpha=alpha, gates=tests, least_blocks=least, to_the_end=True)
    early = decision is not None and decision[0] == "PASS" and evidence.blocks[decision[1]] < asked
    if early and not evidence.within(alpha=alpha)[-1]:
        # What passed on few blocks must still pass by all of them.
        decision = evidence.decision(alpha=alpha, gates=tests, least_blocks=asked, to_the_end=True)
    low, high = share_limits(bad, requests, evidence, alpha=alpha, tests=tests)
    at_s = judged_s(run, np.arange(run.blocks))
    decided = None if decision is None else Decided(decision[0], float(at_s[decision[1]]))
    low, high = _as_decided(low, high, decided, at_s, limit=allowed)
    blocks = int(evidence.blocks[-1]) if run.blocks else 0
    needed = int(evidence.needed_blocks(least)[-1]) if run.blocks else 0
    lacks = decision is None and blocks < needed
    path = Path(
        at_s=at_s,
        value=100.0 * evidence.share,
        low=100.0 * low,
        high=100.0 * high,
        harm=evidence.harm / math.log(10.0),
        safety=evidence.safety / math.log(10.0),
        limit=100.0 * allowed,
        needed=math.log10(tests / run.limits.alpha),
        needed_safety=-math.log10(run.limits.alpha),
        outcome=None if decided is None else decided.outcome,
        decided_s=None if decided is None else decided.at_s,
        wait_s=(needed - blocks) * run.block_s if lacks else 0.0,
    )
    result = ShareResult(
        missed=int(bad.sum()),
        requests=int(requests.sum()),
        allowed=allowed,
        low=float(low[-1]) if len(low) else 0.0,
        high=float(high[-1]) if len(high) else 1.0,
        design_effect=float(evidence.design_effect[-1]) if len(evidence.design_effect) else 1.0,
        verdict=path.outcome or "INCONCLUSIVE",
        blocks=blocks,
        needed_blocks=needed if lacks and evidence.within(alpha=run.limits.alpha)[-1] else None,
    )
    return result, path


def judged_s(run: Run, block: Ints) -> Floats:
    """How many seconds had been judged at the end of each block, over all trials until then."""
    ends = np.zeros(max(run.blocks, int(block.max(initial=-1)) + 1))
    before = 0.0
    for trial in run.trials:
        own = np.minimum((np.arange(trial.blocks) + 1) * run.block_s, trial.seconds)
        own[-1:] = trial.seconds
        ends[trial.first_block : trial.first_block + trial.blocks] = before + own
        before += trial.seconds
    return np.asarray(ends[block])
