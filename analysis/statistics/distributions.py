"""Distributions by special functions, where scipy.special has no name for them: importing scipy.stats takes longer
than judging a short run. Each returns what the method of scipy.stats of the same meaning does. Arguments broadcast.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy import special


def t_quantile(p: Any, degrees: Any) -> Any:
    """Return the quantile of Student's t."""
    return special.stdtrit(degrees, p)


def t_sf(value: Any, degrees: Any) -> Any:
    """Return the probability that Student's t exceeds `value`."""
    return special.stdtr(degrees, np.negative(value))


def binomial_quantile(p: float, total: int, share: float) -> int:
    """Return the least count that at most so many of `total` succeed with probability `p` or more."""
    count = int(np.ceil(special.bdtrik(p, total, share)))
    below = max(0, count - 1)
    return below if special.bdtr(below, total, share) >= p - 1e-12 else count


def binomial_test(count: int, total: int, share: float) -> float:
    """Return the two-sided exact p-value: the probability of all counts that are no likelier than `count`."""
    mean, reach = total * share, _reach(total, share)
    least, most = max(0, min(count, int(mean - reach))), min(total, max(count, int(mean + reach)))
    counts = np.arange(least, most + 1.0)
    logs = log_choose(total, counts) + special.xlogy(counts, share) + special.xlog1py(total - counts, -share)
    chances = np.exp(logs)
    return min(1.0, float(chances[chances <= chances[count - least] * (1 + 1e-7)].sum()))


def _reach(total: int, share: float) -> float:
    """Return how far from the mean of `total` draws the counts lie that matter: beyond it lies less than 1e-100."""
    return 40.0 * math.sqrt(total * share * (1.0 - share)) + 40.0


def hypergeometric_sf(count: int, population: int, marked: int, drawn: int) -> float:
    """Return the probability that more than `count` of `drawn` from `population` are among `marked`."""
    share = marked / population
    mean, reach = drawn * share, _reach(drawn, share)
    least = max(count + 1, drawn + marked - population, 0, int(mean - reach))
    hits = np.arange(least, min(marked, drawn, int(mean + reach)) + 1)

    logs = log_choose(marked, hits) + log_choose(population - marked, drawn - hits) - log_choose(population, drawn)
    return min(1.0, float(np.exp(logs).sum()))


def log_choose(total: Any, chosen: Any) -> Any:
    """Return the logarithm of the number of ways to choose so many of `total`."""
    return special.gammaln(total + 1) - special.gammaln(chosen + 1) - special.gammaln(total - chosen + 1)
