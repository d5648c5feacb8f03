"""Groups of neighbouring time blocks, the unit of a comparison below six trials.

What lasts longer than a block makes neighbours alike, and a test that takes them for independent calls noise
significant. A few long groups are nearly independent whatever the noise does on a shorter scale [1].

References
----------
[1] Ibragimov, R. and Müller, U. K. (2010). t-statistic based correlation and heterogeneity robust inference.
"""

from __future__ import annotations

import numpy as np

from analysis.arrays import Ints

FEWEST_GROUPS = 8
MOST_GROUPS = 10
_BLOCKS_PER_GROUP = 4


def group_count(blocks: int) -> int:
    """Return into how many groups so many blocks of one trial are put; see `groups_of`."""
    return min(blocks, max(FEWEST_GROUPS, min(MOST_GROUPS, blocks // _BLOCKS_PER_GROUP)))


def groups_of(trials: Ints) -> Ints:
    """Return the group of each block, in order of time: neighbours of one trial. Shape (blocks,).

    `trials` is the trial of each block, rising. Four blocks make a group, but there are at least eight groups, else no
    test has power, and at most ten, since more gain little and longer groups gain trust. Below eight blocks each is its
    own group.
    """
    blocks = len(trials)
    groups = group_count(blocks)
    group = np.empty(blocks, dtype=np.int64)
    used = 0
    for trial in np.unique(trials):
        own = np.flatnonzero(trials == trial)
        share = max(1, min(len(own), round(groups * len(own) / blocks)))
        group[own] = used + np.arange(len(own)) * share // len(own)
        used += share
    return group
