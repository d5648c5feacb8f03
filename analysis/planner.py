"""How long a run must be to decide what this one leaves open.

Standard errors shrink with the square root of the number of blocks; the block variance of this run says how large
they are now. With two or three blocks that variance is itself a guess, and the figure is wide on purpose.
"""

from __future__ import annotations

import math

from scipy import stats

from analysis.compare import Comparison
from analysis.slo import ShareResult

POWER = 0.80
LONGEST_S = 7 * 24 * 3600.0  # nobody waits longer for one verdict


def comparison_needed_s(
    comparison: Comparison, *, block_s: float, min_blocks: int, overhead_s: float = 0.0
) -> float | None:
    """The run length at which the comparison is decided with 80 % power if the ratio is what this run saw.

    At least `min_blocks` blocks. `overhead_s` is time of the run that the comparison leaves out (cold start, compile
    windows). None when no length helps: nothing to compare, a ratio on the margin, or more than a week.
    """
    if comparison.obstacle is not None and comparison.blocks != 1:
        return None
    floor = min_blocks * block_s
    if comparison.obstacle is not None or comparison.spread is None or comparison.ratio is None:
        return floor + overhead_s
    distance = abs(math.log1p(comparison.margin) - math.log(comparison.ratio))
    blocks = max(comparison.blocks, 2)
    # Student's t stands in for the normal: from two blocks the spread is known to a factor of many.
    factor = float(stats.t.ppf(1.0 - comparison.alpha, blocks - 1) + stats.t.ppf(POWER, blocks - 1))
    if comparison.spread == 0:
        return floor + overhead_s
    if distance == 0:
        return None
    needed = blocks * (factor * comparison.spread / distance) ** 2 * block_s
    return _rounded(max(needed, floor) + overhead_s, block_s)


def share_needed_s(
    result: ShareResult, *, requests_per_s: float, block_s: float, min_blocks: int, alpha: float
) -> float | None:
    """The run length at which the share is decided with 80 % power if it is what this run saw, else as above."""
    if result.requests == 0 or requests_per_s <= 0 or not 0.0 < result.allowed < 1.0:
        return None
    floor = min_blocks * block_s
    seen, allowed = result.missed / result.requests, result.allowed
    if seen == 0:
        needed = math.log(alpha) / math.log1p(-allowed)
    elif seen == allowed:
        return None
    else:
        reject = float(stats.norm.ppf(1.0 - alpha)) * math.sqrt(allowed * (1.0 - allowed))
        detect = float(stats.norm.ppf(POWER)) * math.sqrt(seen * (1.0 - seen))
        needed = ((reject + detect) / (seen - allowed)) ** 2
    return _rounded(max(needed * result.design_effect / requests_per_s, floor), block_s)


def _rounded(seconds: float, block_s: float) -> float | None:
    if not math.isfinite(seconds) or seconds > LONGEST_S:
        return None
    return math.ceil(seconds / block_s - 1e-9) * block_s


def duration_text(seconds: float) -> str:
    """The length in the unit a reader thinks in: "90 seconds", "20 minutes", "3.5 hours"."""
    if seconds < 180:
        return f"{seconds:.0f} seconds"
    if seconds < 2 * 3600:
        return f"{math.ceil(seconds / 60)} minutes"
    return f"{seconds / 3600:.1f} hours"
