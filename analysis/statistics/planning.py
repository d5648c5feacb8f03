"""How long a run must be to decide what is open, and what a run of a given length can decide.

Standard errors shrink with the square root of time, from what this run shows. Student's t stands for the few groups of
blocks (or trials) of the test at the end and of the pilot (Stein 1945, two stages).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from scipy.special import ndtri

from tailgate.analysis.settings.gate_limits import GateLimits
from tailgate.analysis.settings.slo_targets import SloTarget
from tailgate.analysis.statistics.compare import TRIALS_FOR_T_TEST, Comparison, tail_requests
from tailgate.analysis.statistics.dependence import group_count
from tailgate.analysis.statistics.distributions import t_quantile
from tailgate.analysis.statistics.sequential import SOONEST_BLOCKS
from tailgate.analysis.statistics.share_evidence import BLOCKS_FOR_PASS, FEWEST_BLOCKS

POWER = 0.80
LONGEST_S = 7 * 24 * 3600.0  # no plan is longer
MOST_STARTS = 1000  # no advice names more trials
_ARRIVING = 0.9  # share of the planned requests that surely come: arrivals are random
# A few slow stretches make a tail's spread, so it is known less well than from as many normal differences. In
# simulation (`python benchmarks/judging.py planning`) spreads of pilots scatter as with this share of the degrees.
_KNOWN_SHARE = 1.0 / 3.0
_LONGER = 1.5  # a run that left something open is not planned shorter than this times its length


def power_of_each(limits: GateLimits) -> float:
    """Return the power that each gated latency needs, so that all pass together with POWER (Bonferroni)."""
    return 1.0 - (1.0 - POWER) / (len(limits.metrics) * len(limits.quantiles))


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """How much a log ratio varies from run to run: its standard error is `per_unit` / sqrt(units).

    A unit takes `unit_s` of the run: a time block, or with `by_trial` a whole trial. `lost_s` of the run are compared
    by no unit. `degrees` are those of the pilot that measured `per_unit`. Units of one start share what differs between
    starts, which has the standard deviation `restart` and fades with the number of `starts` alone.
    """

    per_unit: float
    unit_s: float
    degrees: float
    lost_s: float = 0.0
    by_trial: bool = False
    restart: float = 0.0
    starts: int = 1

    @classmethod
    def of(cls, comparison: Comparison, *, block_s: float, overhead_s: float = 0.0) -> Noise | None:
        """Return the noise of a comparison, without `overhead_s` of the run; None if it made no test."""
        if comparison.obstacle is not None or comparison.spread is None:
            return None
        degrees = max(1, comparison.groups - 1)
        if comparison.trials >= TRIALS_FOR_T_TEST and comparison.groups == comparison.trials:
            return cls(
                per_unit=comparison.spread * math.sqrt(comparison.trials),
                unit_s=(comparison.blocks * block_s + overhead_s) / comparison.trials,
                by_trial=True,
                degrees=degrees,
                starts=comparison.trials,
            )
        # The ratio was fitted to these groups, and they vary less around it than around the true one.
        short = math.sqrt((degrees + 1) / degrees)
        return cls(
            per_unit=comparison.spread * math.sqrt(comparison.blocks) * short,
            unit_s=block_s,
            lost_s=overhead_s,
            degrees=max(1.0, _KNOWN_SHARE * degrees),
            # What differs between machines fades with more of them, as start-to-start variance does with more starts.
            restart=math.hypot(comparison.restart_spread, comparison.machine_spread * math.sqrt(comparison.trials)),
            starts=comparison.trials,
        )

    def reach(self, units: int, *, alpha: float, power: float) -> float:
        """Return the distance from the margin, in log ratio, that so many units resolve with this power."""
        final = (units if self.by_trial else group_count(units)) - 1
        time, start = (_factor(degrees, alpha=alpha, power=power) for degrees in (min(final, self.degrees), final))
        # Start-to-start variance is no guess of the pilot's.
        return math.hypot(time * self.per_unit / math.sqrt(units), start * self.restart / math.sqrt(self.starts))

    def needed(
        self, distance: float, *, alpha: float, power: float, least_s: float, fewest: float
    ) -> tuple[float | None, int]:
        """Return the seconds of the shortest run that resolves `distance`, and its starts. None beyond a week, or if
        `distance` is 0.

        The starts are the fewest whose variance leaves half of the distance to time. The run lasts at least `least_s`,
        and `fewest` units.
        """
        starts = self.starts
        if distance == 0.0:
            return None, starts
        if self.restart > 0.0:
            factor = _factor(group_count(10**6) - 1, alpha=alpha, power=power)
            starts = max(starts, math.ceil(2.0 * (factor * self.restart / distance) ** 2 - 1e-9))
        noise = replace(self, starts=starts)
        first = math.ceil(max((least_s - self.lost_s) / self.unit_s, fewest) - 1e-9)
        candidates = range(first, int((LONGEST_S - self.lost_s) / self.unit_s) + 1)
        index = bisect_left(
            candidates, True, key=lambda units: noise.reach(units, alpha=alpha, power=power) <= distance
        )
        return (candidates[index] * self.unit_s + self.lost_s if index < len(candidates) else None), starts


def _factor(degrees: float, *, alpha: float, power: float) -> float:
    """Return how many standard errors off the margin the ratio must lie, by Student's t with so many degrees."""
    return float(t_quantile(1.0 - alpha, max(1, degrees)) + t_quantile(power, max(1, degrees)))


def comparison_needed(
    comparison: Comparison,
    *,
    block_s: float,
    min_blocks: int,
    power: float,
    overhead_s: float = 0.0,
) -> tuple[float | None, int]:
    """Return the run length in seconds, over all trials, and the fresh starts that decide the comparison.

    The true ratio is taken to be what this run saw and left open, and one standard error from the margin at least; the
    run to come is half as long again at least. `overhead_s` is time of the run that the comparison leaves out. Where
    trials are the unit, more trials of the same length. No length: nothing to compare, or more than a week.
    """
    if comparison.obstacle is not None and comparison.needed_blocks is None:
        return None, comparison.trials
    least_s = max(min_blocks, comparison.needed_blocks or 0) * block_s + overhead_s
    noise = Noise.of(comparison, block_s=block_s, overhead_s=overhead_s)
    if noise is None or comparison.ratio is None:
        return least_s, comparison.trials
    distance = max(abs(math.log1p(comparison.margin) - math.log(comparison.ratio)), comparison.spread or 0.0)
    fewest = _LONGER * (comparison.trials if noise.by_trial else comparison.blocks)
    # A FAIL is one of several tests (Bonferroni, the first step of Holm's), a PASS is not.
    tests = comparison.tests if comparison.ratio > 1.0 + comparison.margin else 1
    return noise.needed(distance, alpha=comparison.alpha / tests, power=power, least_s=least_s, fewest=fewest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What the gates of one kind take of each arm: requests (None: no number decides them), and blocks.

    The first `cold_s` seconds of a trial do not count.
    """

    gates: str
    requests: int | None
    blocks: int
    cold_s: float = 0.0

    def trial_s(self, *, rate: float, block_s: float, trials: int) -> float:
        """Return how long each of the trials sends `rate` requests/s to an arm until it has enough."""
        sent_s = (self.requests or 0) / (_ARRIVING * rate) if rate > 0 else 0.0
        blocks = max(self.blocks, math.ceil(sent_s / block_s - 1e-9))
        return math.ceil(blocks / trials) * block_s + self.cold_s


def needs(limits: GateLimits, targets: Sequence[SloTarget]) -> Iterator[Need]:
    """Yield what each kind of estimates takes. With interim analyses these are the blocks of a large effect."""
    names = [f"p{100 * quantile:g} {metric.upper()}" for metric in limits.metrics for quantile in limits.quantiles]
    least = min(limits.min_blocks, FEWEST_BLOCKS) if limits.sequential else limits.min_blocks
    steady = SOONEST_BLOCKS if limits.sequential else least
    tail = tail_requests(limits.quantile)
    yield Need(gates=f"latency ({', '.join(names)})", requests=tail, blocks=steady, cold_s=limits.cold_s)
    for target in targets:
        blocks = least if target.quantile is None or limits.sequential else max(least, BLOCKS_FOR_PASS)
        yield Need(gates=f"slo {target.key}", requests=_clean(target.allowed_share, limits), blocks=blocks)
    yield Need(gates="errors", requests=_clean(limits.max_error_pct / 100.0, limits), blocks=least)


def _clean(allowed: float, limits: GateLimits) -> int | None:
    """Return how many requests without a miss show that no more than the allowed share misses."""
    if 0.0 < allowed < 1.0:
        return requests_for_share(0.0, allowed, alpha=limits.alpha)
    return 1 if allowed else None


def shortest_trial_s(
    limits: GateLimits, targets: Sequence[SloTarget], *, rate: float, block_s: float, trials: int = 1
) -> float:
    """Return the shortest traffic of each trial, in whole minutes, with which every estimate can PASS."""
    found = [need for need in needs(limits, targets) if need.requests is not None]
    return 60.0 * math.ceil(max(need.trial_s(rate=rate, block_s=block_s, trials=trials) for need in found) / 60.0)


def least_share(design: str, weights: Sequence[float]) -> float:
    """Return the share of the requests that the arm with the fewest gets."""
    if design == "mirrored":
        return 1.0
    if design != "split":
        return 1.0 / max(1, len(weights))
    return min(weights, default=0.0) / total if (total := sum(weights)) > 0 else 0.0


def share_needed_s(
    missed: int,
    requests: int,
    *,
    allowed: float,
    design_effect: float,
    requests_per_s: float,
    block_s: float,
    min_blocks: int,
    alpha: float,
) -> float | None:
    """Return the run length at which a share of misses is decided, if it is what this run saw.

    One nearer to what is allowed than its standard error is planned as that far within it.
    """
    if requests == 0 or requests_per_s <= 0 or not 0.0 < allowed < 1.0:
        return None
    seen = missed / requests
    error = math.sqrt(allowed * (1.0 - allowed) * design_effect / requests)
    if abs(seen - allowed) < error:
        seen = max(0.0, allowed - error)
    needed = requests_for_share(seen, allowed, alpha=alpha)
    if needed is None:
        return None
    seconds = max(math.ceil(needed * design_effect / requests_per_s / block_s - 1e-9), min_blocks) * block_s
    return seconds if seconds <= LONGEST_S else None


def requests_for_share(true: float, allowed: float, *, alpha: float) -> int | None:
    """Return how many independent requests separate a true share from the allowed one with POWER; None if equal.

    Without any miss the exact binomial limit of none in n is 1 - alpha^(1/n): 299 requests show 1 % at alpha 0.05.
    """
    if true == allowed:
        return None
    if true == 0.0:
        return math.ceil(math.log(alpha) / math.log1p(-allowed) - 1e-9)
    reject = float(ndtri(1.0 - alpha)) * math.sqrt(allowed * (1.0 - allowed))
    detect = float(ndtri(POWER)) * math.sqrt(true * (1.0 - true))
    return math.ceil(((reject + detect) / (true - allowed)) ** 2)
