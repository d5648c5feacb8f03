"""Goodput: the share of the arm's requests that meet every objective is at least so many times the control's
(`gates.min_goodput_ratio`).

The interval is that of a ratio of totals over groups of neighbouring time blocks (its log, linearised; Student's t over
the groups as in Ibragimov and Müller 2010), or over trials from six trials on. Requests that miss a limit come in
bunches, so the lower limit, on which a PASS rests, also allows for the bunching of slow requests: see
`analysis.statistics.share_evidence`. Separate runs are compared by Welch's t over their trials.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from analysis.arrays import Floats, Ints
from analysis.judging.gates import FAIL, INCONCLUSIVE, PASS, Gate
from analysis.judging.gates.latency import needed
from analysis.run.run import Run
from analysis.run.slo import limit_used
from analysis.run.variance import start_spread
from analysis.statistics.compare import TRIALS_FOR_T_TEST, Comparison
from analysis.statistics.dependence import groups_of
from analysis.statistics.distributions import t_quantile
from analysis.statistics.share_evidence import BLOCKS_FOR_PASS, bunching, is_far
from analysis.statistics.unpaired import Level, day_part, difference, level_of, share_error
from analysis.statistics.windows import FARTHEST
from analysis.wording import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """The goodput of the arm for each request that it was sent, over the control's. Shares are percent of the requests
    sent that were good; `needed_blocks` is what a PASS needs where this run has fewer."""

    ratio: Comparison  # its spread is the standard error that a PASS rests on
    share_pct: float | None = None
    control_share_pct: float | None = None
    needed_blocks: int | None = None


def goodput_gates(run: Run, arm: str) -> list[Gate]:
    """One gate where the experiment sets a least share of the control's goodput."""
    least = run.limits.min_goodput_ratio
    if least is None:
        return []
    found = goodput_of(run, arm, least)
    # The control's goodput over the arm's must stay below 1 / least.
    ratio = 1.0 / found.ratio.ratio if found.ratio.ratio else None
    turned = replace(found.ratio, ratio=ratio, margin=1.0 / least - 1.0) if least > 0 else None
    length_s = None if turned is None else needed(run, turned, blocks=found.needed_blocks or 0)[0]
    return [goodput_gate(found, least, length_s)]


def goodput_gate(found: Goodput, least: float, needed_s: float | None) -> Gate:
    """Whether the arm surely has at least `least` times the control's goodput."""
    item, verdict = found.ratio, INCONCLUSIVE
    if item.ratio is None:
        reason = f"Goodput cannot be compared: {item.obstacle}."
    else:
        seen = f"Goodput is {item.ratio:.3f} times that of {item.control}"
        shares = f"{found.share_pct:.4g} % of requests are good, {found.control_share_pct:.4g} % of {item.control}'s"
        if item.low is None or item.high is None:
            reason = f"{seen}; {shares}; there are no limits: {item.obstacle or 'so few blocks set none'}."
        else:
            verdict = PASS if item.low >= least else FAIL if item.high < least else INCONCLUSIVE
            missing = ""
            if verdict == PASS and found.needed_blocks is not None:
                verdict = INCONCLUSIVE
                missing = f"; a PASS needs {counted(found.needed_blocks, 'block')}, and this run has {item.blocks}"
            reason = f"{seen} (between {item.low:.3f} and {item.high:.3f}), limit {least:g}; {shares}{missing}."
    return Gate(
        arm=item.arm,
        gate="goodput ratio",
        kind="goodput",
        value=item.ratio,
        limit=least,
        unit="ratio",
        verdict=verdict,
        reason=reason,
        interval=(item.low, item.high),
        needed_s=needed_s if verdict == INCONCLUSIVE else None,
    )


def goodput_of(run: Run, arm: str, least: float) -> Goodput:
    """Compare the goodput of the arm with the control's."""
    empty = Comparison(
        quantile=0.5,
        margin=0.0,
        alpha=run.limits.alpha,
        arm=arm,
        control=run.control,
        metric="goodput",
        method="",
        blocks=0,
        trials=0,
        requests=0,
    )
    if not any(target.quantile is not None and target.metric != "itl" for target in run.goodput_targets):
        return Goodput(ratio=replace(empty, obstacle="nothing in the experiment says what a good request is"))
    used = limit_used(run.requests, run.goodput_targets)
    rows = [np.flatnonzero(run.of_arm(name) & run.usable) for name in (arm, run.control)]
    shares = [100.0 * float((used[own] <= 1.0).mean()) if own.size else None for own in rows]
    if run.separate:
        ratio, degrees = _of_separate_runs(run, empty, used)
    else:
        ratio, degrees = _of_blocks(run, empty, *(_made_and_sent(run, used, part) for part in rows))
    bunched, needed = 0.0, 0
    if ratio.ratio:
        seen = [(used[part], run.block[part]) for part in rows]
        bunched, needed = bunched_error(*seen, least=least, least_blocks=run.limits.min_blocks)
    return Goodput(
        ratio=_with_limits(ratio, degrees, bunched),
        share_pct=shares[0],
        control_share_pct=shares[1],
        needed_blocks=needed if needed > ratio.blocks else None,
    )


_Counts = tuple[Floats, Floats]
"""What one arm made of its requests and what it was sent, by time block."""


def _made_and_sent(run: Run, used: Floats, rows: Ints) -> _Counts:
    columns = (run.block[rows[used[rows] <= 1.0]], run.block[rows])
    made, sent = (np.bincount(column, minlength=run.blocks).astype(np.float64) for column in columns)
    return made, sent


def _of_blocks(run: Run, item: Comparison, own: _Counts, control: _Counts) -> tuple[Comparison, float]:
    """The ratio with the standard error over groups of blocks, or trials; over machines where that is wider. And the
    degrees of freedom of that error."""
    trial = np.repeat([one.number for one in run.trials], [one.blocks for one in run.trials])
    shared = (own[1] > 0) & (control[1] > 0)  # only blocks in which both were sent something compare them
    by_trial = len(np.unique(trial[shared])) >= TRIALS_FOR_T_TEST
    group = np.unique(trial[shared], return_inverse=True)[1] if by_trial else groups_of(trial[shared])
    columns = [column[shared] for column in (*own, *control)]
    sums = [_grouped(column, group) for column in columns]
    ratio, spread, obstacle = log_ratio(*sums)
    groups = len(sums[0])
    if spread is not None and len(run.machines) > 1:
        # What differs by machine does not average out over stretches of time.
        machine = np.unique(run.machines.codes(trial[shared]), return_inverse=True)[1]
        by_machine = [_grouped(column, machine) for column in columns]
        _, wider, _ = log_ratio(*by_machine)
        if wider is not None and wider > spread:
            spread, groups = wider, len(by_machine[0])
    found = replace(
        item,
        ratio=ratio,
        spread=spread,
        obstacle=obstacle,
        method="t over trials" if by_trial else "t over groups of blocks",
        blocks=int(shared.sum()),
        groups=groups,
        trials=len(np.unique(trial[shared])),
        requests=int(min(own[1].sum(), control[1].sum())),
    )
    return found, groups - 1.0


def _with_limits(item: Comparison, degrees: float, bunched: float) -> Comparison:
    """The ratio with its limits; the lower one allows for a standard error of `bunched` at least."""
    if item.ratio is None or item.spread is None:
        return item
    times = float(t_quantile(1.0 - item.alpha, degrees))
    reach = times * max(item.spread, bunched)
    low, high = (None, None) if reach >= FARTHEST else _around(item.ratio, reach, times * item.spread)
    return replace(item, low=low, high=high, spread=max(item.spread, bunched))


def _around(ratio: float, down: float, up: float) -> tuple[float, float]:
    return ratio * math.exp(-down), ratio * math.exp(up)


def _of_separate_runs(run: Run, item: Comparison, used: Floats) -> tuple[Comparison, float]:
    """The ratio with the standard error over the trials of each arm, and the degrees of freedom of that error."""
    own, base = (_level(run, name, used) for name in (item.arm, item.control))
    if own is None or base is None:
        return replace(item, obstacle="one of the arms was sent nothing"), 0.0
    apart = difference(base, own, day_part(run.limits.day_spread))
    found = replace(
        item,
        ratio=math.exp(apart.effect),
        spread=apart.spread,
        method="unpaired t over trials",
        blocks=min(map(run.blocks_of, (item.arm, item.control))),
        trials=min(own.trials, base.trials),
    )
    return found, apart.part.degrees if apart.part is not None else 0.0


def _level(run: Run, arm: str, used: Floats) -> Level | None:
    """The log share of good requests in the arm's trials; None where one of them has no request."""
    logs, traffic = [], []
    for trial in run.trials_of(arm):
        rows = np.flatnonzero(run.of_arm(arm) & run.usable & (run.requests.trial == trial.number))
        good = used[rows] <= 1.0
        if not good.size:
            return None
        logs.append(math.log((float(good.sum()) + 0.5) / (good.size + 0.5)))
        traffic.append(share_error(good, run.block[rows]))
    return level_of(np.array(logs), traffic, restart_spread=start_spread(run, arm)) if logs else None


def _grouped(column: Floats, group: Ints) -> Floats:
    return np.bincount(group, column, minlength=int(group.max()) + 1 if len(group) else 0).astype(np.float64)


def log_ratio(
    made: Floats, sent: Floats, control_made: Floats, control_sent: Floats
) -> tuple[float | None, float | None, str | None]:
    """(ratio, standard error of its log, why there is none), from totals by group.

    The ratio is (made / sent) over the control's. A group's weight in its log is its share of each total, so that the
    spread of those shares is the error, at least that of independent requests with one miss more than was seen: no miss
    in any group is no certainty. One group, or nothing made by the arm, have no error; nothing sent has no ratio.
    """
    totals = [float(column.sum()) for column in (made, sent, control_made, control_sent)]
    if not totals[1] or not totals[3]:
        return None, None, "one of the arms was sent nothing"
    if not totals[2]:
        return None, None, "the control made nothing"
    ratio = totals[0] / totals[1] / (totals[2] / totals[3])
    if not totals[0]:
        return ratio, None, "the arm made nothing"
    groups = len(made)
    if groups < 2:
        return ratio, None, "one stretch of time cannot show how much stretches differ"
    weight = made / totals[0] - sent / totals[1] - control_made / totals[2] + control_sent / totals[3]
    variance = float((weight**2).sum()) * groups / (groups - 1)
    return ratio, math.sqrt(max(variance, _least(totals[0], totals[1]) + _least(totals[2], totals[3]))), None


def bunched_error(
    own: tuple[Floats, Ints], control: tuple[Floats, Ints], *, least: float, least_blocks: int
) -> tuple[float, int]:
    """The least standard error of the log ratio that a PASS may rest on, and the blocks that it needs.

    `own` and `control` are what each request used of its limits, infinite where it failed, and its block (from 0). The
    error is that of independent requests at the share of misses that `least` allows, times the design effect of the
    slow requests of either arm, which had the same traffic. Where the slowest good request is far below the limits,
    misses have another cause: 0 and `least_blocks`.
    """
    used, block = own
    good = used[used <= 1.0]
    if is_far(float(good.max(initial=0.0)), 1.0, blocks=len(np.unique(block))):
        return 0.0, least_blocks
    missed, sent = int((control[0] > 1.0).sum()), len(control[0])
    allowed = min(max(1.0 - least * (sent - missed) / sent, (missed + 1.0) / (sent + 2.0)), 0.5)
    effect = max(bunching(*column, allowed=allowed) for column in (own, control))
    return math.sqrt(effect * allowed / (1.0 - allowed) / len(used)), max(least_blocks, BLOCKS_FOR_PASS)


def _least(made: float, sent: float) -> float:
    """The relative variance of a share of independent requests."""
    missed = min(1.0, (max(sent - made, 0.0) + 1.0) / (sent + 2.0))
    return missed / (1.0 - missed) / sent if missed < 1.0 else math.inf
