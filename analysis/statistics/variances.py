"""Variances that add up, each with how well it is known.

References
----------
[1] Satterthwaite, F. E. (1946). An approximate distribution of estimates of variance components. Biometrics Bulletin
    2(6), 110-114.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A variance and how well it is known."""

    variance: float
    degrees: float

    def times(self, factor: float) -> Part:
        """The variance of √factor times that."""
        return Part(variance=factor * self.variance, degrees=self.degrees)


def summed(parts: Sequence[Part]) -> Part:
    """The sum of independent variances, with the degrees of freedom of Satterthwaite [1]: (Σv)² / Σ(v²/ν)."""
    total = sum(part.variance for part in parts)
    uncertain = sum(part.variance**2 / part.degrees for part in parts)
    return Part(variance=total, degrees=total**2 / uncertain if uncertain > 0 else math.inf)
