"""How long a run must be to decide what is open, and what a run of a given length can decide.

Standard errors shrink with the square root of time; how large they are now is seen in a pilot, or comes from a model
of servers like these. The test at the end resamples a few groups of blocks (or trials) and knows its own error only
that well, so Student's t with groups - 1 degrees of freedom stands where a normal would promise too much. Where a
pilot with few groups measures the spread, the same holds for it (the two-stage argument of Stein 1945).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from scipy import stats

from analysis.judging.checks.statistics import TAIL_REQUESTS
from analysis.run.slo import ShareResult
from analysis.settings.gate_limits import GateLimits
from analysis.statistics.compare import TRIALS_FOR_T_TEST, Comparison
from analysis.statistics.groups import group_count

POWER = 0.80
LONGEST_S = 7 * 24 * 3600.0  # longer than anybody waits for one verdict
MOST_STARTS = 1000  # more trials than anybody makes for one
# A few slow stretches make a tail's spread, so it is known less well than from as many normal differences. In
# simulation (`python -m benchmarks.simulation.planning`) spreads of pilots scatter as with this share of the degrees.
_KNOWN_SHARE = 1.0 / 3.0
_LONGER = 1.5  # a run that left something open is not planned shorter than this times its length


def power_of_each(limits: GateLimits, power: float = POWER) -> float:
    """The power that each gated latency needs, so that all of them pass together with `power` (Bonferroni)."""
    return 1.0 - (1.0 - power) / (len(limits.metrics) * len(limits.quantiles))


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """How much a log ratio varies from run to run: its standard error is `per_unit` / sqrt(units).

    A unit is a time block, or with `by_trial` a whole trial. `degrees` are the degrees of freedom of the pilot that
    measured `per_unit`, None where it comes from a model. Units of one start share its luck, which has the standard
    deviation `restart` and fades with the number of `starts` alone.
    """

    per_unit: float
    by_trial: bool = False
    degrees: float | None = None
    restart: float = 0.0
    starts: int = 1

    @classmethod
    def of(cls, comparison: Comparison) -> Noise | None:
        """The noise that a comparison saw; None where it made no test."""
        if comparison.obstacle is not None or comparison.spread is None:
            return None
        by_trial = comparison.trials >= TRIALS_FOR_T_TEST and comparison.groups == comparison.trials
        units = comparison.trials if by_trial else comparison.blocks
        per_unit, degrees = comparison.spread * math.sqrt(units), max(1, comparison.groups - 1)
        if by_trial:
            return cls(per_unit=per_unit, by_trial=True, degrees=degrees)
        # Label swaps turn the signs of differences from their own mean, which are smaller than those from the true one.
        short = math.sqrt((degrees + 1) / degrees)
        return cls(
            per_unit=per_unit * short,
            degrees=max(1.0, _KNOWN_SHARE * degrees),
            # What differs between machines fades with more of them, as the luck of starts does with more starts.
            restart=math.hypot(comparison.restart_spread, comparison.machine_spread * math.sqrt(comparison.trials)),
            starts=comparison.trials,
        )

    def reach(self, units: int, *, alpha: float, power: float) -> float:
        """The distance from the margin, in log ratio, that so many units resolve with this power."""
        final = (units if self.by_trial else group_count(units)) - 1
        known = final if self.degrees is None else min(final, self.degrees)
        time, luck = (_factor(degrees, alpha=alpha, power=power) for degrees in (known, final))
        # How far the luck of starts goes is no guess of the pilot's.
        return math.hypot(time * self.per_unit / math.sqrt(units), luck * self.restart / math.sqrt(self.starts))

    def margin(self, units: float, *, alpha: float, power: float, ratio: float) -> float | None:
        """The smallest margin that the whole ones of so many units pass with this power; None of fewer than two."""
        whole = int(units + 1e-9)
        return None if whole < 2 else ratio * math.exp(self.reach(whole, alpha=alpha, power=power)) - 1.0

    def starts_for(self, distance: float, *, alpha: float, power: float) -> int:
        """The fewest starts, from `starts` on, whose luck leaves half of the variance at `distance` to time."""
        if self.restart == 0.0 or distance == 0.0:
            return self.starts
        factor = _factor(group_count(10**6) - 1, alpha=alpha, power=power)
        return max(self.starts, math.ceil(2.0 * (factor * self.restart / distance) ** 2 - 1e-9))

    def units_for(self, distance: float, *, alpha: float, power: float, fewest: int, most: int) -> int | None:
        """The fewest units, from `fewest` on, that resolve `distance`; None where even `most` do not."""
        candidates = range(fewest, max(most, fewest) + 1)
        index = bisect_left(candidates, True, key=lambda units: self.reach(units, alpha=alpha, power=power) <= distance)
        return candidates[index] if index < len(candidates) else None


def _factor(degrees: float, *, alpha: float, power: float) -> float:
    """How many standard errors the ratio must lie off the margin for this power, where so many degrees tell them."""
    return float(stats.t.ppf(1.0 - alpha, max(1, degrees)) + stats.t.ppf(power, max(1, degrees)))


def log_distance(margin: float, ratio: float) -> float:
    """How far the ratio lies from the margin, in log scale."""
    return abs(math.log1p(margin) - math.log(ratio))


def comparison_needed_s(
    comparison: Comparison,
    *,
    block_s: float,
    min_blocks: int,
    overhead_s: float = 0.0,
    power: float = POWER,
    ratio: float | None = None,
) -> float | None:
    """The run length, over all trials, at which the comparison is decided with this power.

    `ratio` is the true ratio to plan for; without one, what this run saw. At least `min_blocks` blocks. `overhead_s` is
    time of the run that the comparison leaves out (cold start, compile windows). Where trials are the unit, more trials
    of the same length. In as many starts as `starts_needed` says. A run that left the comparison open is planned half
    as long again at least: its noise is known to have been too much. Its ratio is planned as one standard error from
    the margin at least: what it saw nearer may be chance, and a length that grows without bound tells nothing. None
    when no length helps: nothing to compare, a ratio given on the margin, or more than a week.
    """
    if comparison.obstacle is not None and comparison.needed_blocks is None:
        return None
    floor_s = max(min_blocks, comparison.needed_blocks or 0) * block_s + overhead_s
    noise = Noise.of(comparison)
    true = comparison.ratio if ratio is None else ratio
    if noise is None or true is None:
        return floor_s
    distance = _distance(comparison, ratio)
    if distance == 0:
        return None
    if noise.per_unit == 0 and noise.restart == 0:
        return floor_s
    alpha = _alpha(comparison, true)
    noise = replace(noise, starts=noise.starts_for(distance, alpha=alpha, power=power))
    unit_s, lost_s = _unit_s(comparison, noise, block_s, overhead_s)
    fewest = math.ceil((floor_s - lost_s) / unit_s - 1e-9)
    if ratio is None and _left_open(comparison):
        fewest = max(fewest, math.ceil(_LONGER * (comparison.trials if noise.by_trial else comparison.blocks)))
    units = noise.units_for(
        distance,
        alpha=alpha,
        power=power,
        fewest=max(TRIALS_FOR_T_TEST if noise.by_trial else 2, fewest),
        most=int((LONGEST_S - lost_s) / unit_s),
    )
    return None if units is None else _rounded(units * unit_s + lost_s, block_s)


def starts_needed(comparison: Comparison, *, power: float = POWER, ratio: float | None = None) -> int:
    """How many fresh starts the comparison needs to be decided at all, however long: at least those it had."""
    noise = Noise.of(comparison)
    true = comparison.ratio if ratio is None else ratio
    if noise is None or true is None:
        return comparison.trials
    return noise.starts_for(_distance(comparison, ratio), alpha=_alpha(comparison, true), power=power)


def _distance(comparison: Comparison, ratio: float | None) -> float:
    """Return how far the ratio to plan for lies from the margin: one that was seen, by a standard error at least."""
    if ratio is not None:
        return log_distance(comparison.margin, ratio)
    return max(log_distance(comparison.margin, comparison.ratio or 1.0), comparison.spread or 0.0)


def _alpha(comparison: Comparison, ratio: float) -> float:
    """The level at which a comparison with this true ratio is decided: a FAIL is one of several tests (Bonferroni, the
    first step of Holm's), a PASS is not."""
    return comparison.alpha / comparison.tests if ratio > 1.0 + comparison.margin else comparison.alpha


def _left_open(comparison: Comparison) -> bool:
    """Whether neither side of the margin was shown, or one was that the whole run contradicts."""
    inferior = comparison.p_inferior if comparison.p_inferior_holm is None else comparison.p_inferior_holm
    if comparison.whole is not None and comparison.whole > 1.0 + comparison.margin:
        return (inferior or 0.0) > comparison.alpha
    return min(comparison.p_noninferior or 0.0, inferior or 0.0) > comparison.alpha


def decidable_margin(
    comparison: Comparison,
    *,
    seconds: float,
    block_s: float,
    overhead_s: float = 0.0,
    power: float = POWER,
    ratio: float = 1.0,
) -> float | None:
    """The smallest margin that a run of `seconds` over all trials passes with this power, if `ratio` is the true one.

    None where nothing was compared or the run is too short to compare at all.
    """
    noise = Noise.of(comparison)
    if noise is None:
        return None
    unit_s, lost_s = _unit_s(comparison, noise, block_s, overhead_s)
    return noise.margin((seconds - lost_s) / unit_s, alpha=comparison.alpha, power=power, ratio=ratio)


def _unit_s(comparison: Comparison, noise: Noise, block_s: float, overhead_s: float) -> tuple[float, float]:
    """Seconds of the run that one unit takes, and seconds that are lost once."""
    if noise.by_trial:
        return (comparison.blocks * block_s + overhead_s) / comparison.trials, 0.0
    return block_s, overhead_s


def least_length_s(limits: GateLimits, *, rate: float, block_s: float) -> float:
    """Seconds for enough blocks, and for enough requests beyond the highest quantile at `rate` requests/s."""
    tail_s = TAIL_REQUESTS / (1.0 - limits.quantile) / rate if rate > 0 else 0.0
    return max(limits.min_blocks, math.ceil(tail_s / block_s - 1e-9)) * block_s


def share_needed_s(
    result: ShareResult, *, requests_per_s: float, block_s: float, min_blocks: int, alpha: float, power: float = POWER
) -> float | None:
    """Return the run length at which the share is decided with this power, if it is what this run saw.

    As for a comparison, one nearer to what is allowed than its standard error is planned as that far within it.
    """
    if result.requests == 0 or requests_per_s <= 0 or not 0.0 < result.allowed < 1.0:
        return None
    floor = min_blocks * block_s
    seen = result.missed / result.requests
    error = math.sqrt(result.allowed * (1.0 - result.allowed) * result.design_effect / result.requests)
    if abs(seen - result.allowed) < error:
        seen = max(0.0, result.allowed - error)
    if seen == 0:
        needed: float | None = clean_requests(result.allowed, alpha=alpha)
    else:
        needed = requests_for_share(seen, result.allowed, alpha=alpha, power=power)
    if needed is None:
        return None
    return _rounded(max(needed * result.design_effect / requests_per_s, floor), block_s)


def clean_requests(allowed: float, *, alpha: float) -> int:
    """The fewest requests without a miss that show a share of at most `allowed`: 299 for 1 % at alpha 0.05.

    The exact binomial limit of none in n is 1 - alpha^(1/n). `allowed` lies between 0 and 1, both left out.
    """
    return math.ceil(math.log(alpha) / math.log1p(-allowed) - 1e-9)


def requests_for_share(true: float, allowed: float, *, alpha: float, power: float) -> int | None:
    """Independent requests that separate a true share from the allowed one; None where the two are equal."""
    if true == allowed:
        return None
    reject = float(stats.norm.ppf(1.0 - alpha)) * math.sqrt(allowed * (1.0 - allowed))
    detect = float(stats.norm.ppf(power)) * math.sqrt(true * (1.0 - true))
    return math.ceil(((reject + detect) / (true - allowed)) ** 2)


def _rounded(seconds: float, block_s: float) -> float | None:
    if not math.isfinite(seconds) or seconds > LONGEST_S:
        return None
    return math.ceil(seconds / block_s - 1e-9) * block_s


# --- Without a pilot --------------------------------------------------------------------------------------------------

MODEL_RATE: Final = 4.0  # requests/s to each arm
MODEL_S: Final = 1200.0
# The spread of the log p99 ratio of a typical block at MODEL_RATE over MODEL_S on made-up servers at 40 % load, between
# that of E2E and that of TTFT (`python -m benchmarks.simulation.spreads` measures them). Real ones may have twice that.
MODEL_SPREADS: Final[Mapping[str, float]] = {
    "mirrored, steady": 0.024,  # Poisson arrivals with one rate
    "mirrored": 0.029,
    "split": 0.066,
    "separate": 0.087,
}
# Spreads of other quantiles over that of p99.
_OF_P99: Final[Mapping[float, float]] = {0.5: 0.4, 0.9: 0.5, 0.95: 0.55, 0.99: 1.0, 0.999: 2.0}
MODEL_QUANTILES: Final = tuple(_OF_P99)


def model_noise(
    design: str, *, rate: float, quantile: float, block_s: float, restart_spread: float = 0.0, trials: int = 1
) -> Noise:
    """The noise of a typical block that made-up servers show under `design` at `rate` requests/s to each arm.

    `quantile` is one of MODEL_QUANTILES. A guess to a factor of two, for want of a pilot. Its variance is that of how
    few requests lie beyond the quantile, so it falls with the rate. Both arms start, `trials` times, each with the luck
    `restart_spread`.
    """
    spread = MODEL_SPREADS[design] * _OF_P99[quantile] * math.sqrt(MODEL_RATE / rate)
    return Noise(per_unit=spread * math.sqrt(MODEL_S / block_s), restart=math.sqrt(2.0) * restart_spread, starts=trials)
