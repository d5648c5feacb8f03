"""Goodput and throughput of each arm beside the control's at the same offered load.

Every rate is what an arm made of the requests that it was sent, so that a split of 9 to 1 is no difference. The
interval is that of a ratio of totals over groups of neighbouring time blocks (its log, linearised; Student's t over the
groups as in Ibragimov and Müller 2010), or over trials from six trials on.

Requests that miss a limit come in bunches, as the misses of an SLO do. The lower limit of a goodput ratio, on which a
PASS rests, therefore also allows for the bunching of slow requests: see `analysis.statistics.share_evidence`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from analysis.arrays import Floats, Ints
from analysis.judging.comparisons import blocks_at
from analysis.run.run import Run
from analysis.run.slo import limit_used
from analysis.statistics.compare import TRIALS_FOR_T_TEST
from analysis.statistics.dependence import groups_of
from analysis.statistics.distributions import t_quantile
from analysis.statistics.share_evidence import BLOCKS_FOR_PASS, bunching, is_far
from analysis.statistics.windows import FARTHEST

RATES = ("goodput", "requests", "output tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class RateComparison:
    """One rate of one arm against the control's. Values are per second of the run.

    `ratio` is the arm's rate for each request that it was sent, over the control's; `low` and `high` are one-sided
    limits at level alpha each, None where the data set none. Shares are percent of the requests sent that were good;
    None for rates that are no share. `needed_blocks` is what a PASS needs where this run has fewer.
    """

    arm: str
    control: str
    rate: str
    value: float
    control_value: float
    share_pct: float | None = None
    control_share_pct: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    spread: float | None = None  # standard error of the log ratio that a PASS rests on
    alpha: float
    blocks: int
    groups: int
    trials: int
    requests: int  # of the arm that was sent fewer
    method: str
    obstacle: str | None = None
    needed_blocks: int | None = None


def compare_rates(run: Run) -> tuple[RateComparison, ...]:
    """Every rate of every treatment; goodput only where the experiment says what a good request is, or gates on it."""
    used = limit_used(run.requests, run.goodput_targets)
    defined = any(target.quantile is not None and target.metric != "itl" for target in run.goodput_targets)
    rated = RATES if defined or run.limits.min_goodput_ratio is not None else RATES[1:]
    rates = [rate for rate in rated if rate != "output tokens" or not run.embeds]
    compared = [_compared(run, arm, rate, used) for arm in run.treatments for rate in rates]
    unknown = "nothing in the experiment says what a good request is"
    return tuple(
        replace(item, ratio=None, low=None, high=None, spread=None, obstacle=unknown)
        if item.rate == "goodput" and not defined
        else item
        for item in compared
    )


def _compared(run: Run, arm: str, rate: str, used: Floats) -> RateComparison:
    own, control = (_counted(run, name, rate, used) for name in (arm, run.control))
    trial = np.repeat([item.number for item in run.trials], [item.blocks for item in run.trials])
    # Only blocks in which both were sent something compare them.
    shared = (own.sent > 0) & (control.sent > 0)
    by_trial = len(np.unique(trial[shared])) >= TRIALS_FOR_T_TEST
    group = np.unique(trial[shared], return_inverse=True)[1] if by_trial else groups_of(trial[shared])
    sums = [_grouped(column[shared], group) for column in (own.made, own.sent, control.made, control.sent)]
    ratio, spread, obstacle = log_ratio(*sums, share=rate != "output tokens")
    count = degrees = len(sums[0])
    low = high = None
    bunched, needed_blocks = 0.0, 0
    if rate == "goodput" and ratio:
        rows = [np.flatnonzero(run.of_arm(name) & run.usable) for name in (arm, run.control)]
        seen = [(used[part], run.block[part]) for part in rows]
        least = 1.0 if run.limits.min_goodput_ratio is None else run.limits.min_goodput_ratio
        bunched, needed_blocks = bunched_error(*seen, least=least, least_blocks=run.limits.min_blocks)
    if ratio is not None and spread is not None:
        if len(run.machines) > 1:
            # What differs by machine does not average out over stretches of time.
            of_machine = run.machines.codes(trial[shared])
            machine = np.unique(of_machine, return_inverse=True)[1]
            columns = (own.made, own.sent, control.made, control.sent)
            sums = [_grouped(column[shared], machine) for column in columns]
            _, wider, _ = log_ratio(*sums, share=rate != "output tokens")
            if wider is not None and wider > spread:
                spread, degrees = wider, len(sums[0])
        times = float(t_quantile(1.0 - run.limits.alpha, degrees - 1))
        reach = times * max(spread, bunched)
        if reach < FARTHEST:
            low, high = ratio * math.exp(-reach), ratio * math.exp(times * spread)
    return RateComparison(
        arm=arm,
        control=run.control,
        rate=rate,
        value=run.rate(int(own.made.sum()), arm),
        control_value=run.rate(int(control.made.sum()), run.control),
        share_pct=_share_pct(own) if rate == "goodput" else None,
        control_share_pct=_share_pct(control) if rate == "goodput" else None,
        ratio=ratio,
        low=low,
        high=high,
        spread=spread if spread is None else max(spread, bunched),
        alpha=run.limits.alpha,
        blocks=int(shared.sum()),
        groups=count,
        trials=len(np.unique(trial[shared])),
        requests=int(min(own.sent.sum(), control.sent.sum())),
        method="t over trials" if by_trial else "t over groups of blocks",
        obstacle=obstacle,
        needed_blocks=needed_blocks if needed_blocks > int(shared.sum()) else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counted:
    """What one arm was sent and what it made of it, by time block."""

    made: Floats
    sent: Floats


def _counted(run: Run, arm: str, rate: str, used: Floats) -> _Counted:
    requests = run.requests
    rows = np.flatnonzero(run.of_arm(arm) & run.usable)
    sent = np.bincount(run.block[rows], minlength=run.blocks).astype(np.float64)
    if rate == "goodput":
        made = np.bincount(run.block[rows[used[rows] <= 1.0]], minlength=run.blocks)
        return _Counted(made=made.astype(np.float64), sent=sent)
    done = rows if rate == "output tokens" else rows[requests.ok[rows]]
    ended = blocks_at(run, requests.trial[done], requests.end_ns[done])
    weights = requests.output_tokens[done] if rate == "output tokens" else None
    return _Counted(made=np.bincount(ended, weights, minlength=run.blocks).astype(np.float64), sent=sent)


def _share_pct(counted: _Counted) -> float | None:
    sent = float(counted.sent.sum())
    return 100.0 * float(counted.made.sum()) / sent if sent else None


def _grouped(column: Floats, group: Ints) -> Floats:
    return np.bincount(group, column, minlength=int(group.max()) + 1 if len(group) else 0).astype(np.float64)


def log_ratio(
    made: Floats, sent: Floats, control_made: Floats, control_sent: Floats, *, share: bool
) -> tuple[float | None, float | None, str | None]:
    """(ratio, standard error of its log, why there is none), from totals by group.

    The ratio is (made / sent) over the control's. A group's weight in its log is its share of each total, so that the
    spread of those shares is the error. Where `share`, what is made is a count of what was sent, and the error is at
    least that of independent requests with one miss more than was seen: no miss in any group is no certainty.
    One group, groups that are all alike, or nothing made by the arm, have no error; nothing sent has no ratio.
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
    if share:
        variance = max(variance, _least(totals[0], totals[1]) + _least(totals[2], totals[3]))
    if variance <= 0:
        return ratio, None, "no stretch of time differs from the others"
    return ratio, math.sqrt(variance), None


def bunched_error(
    own: tuple[Floats, Ints], control: tuple[Floats, Ints], *, least: float, least_blocks: int
) -> tuple[float, int]:
    """Return the least standard error of the log ratio that a PASS may rest on, and the blocks that it needs.

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
