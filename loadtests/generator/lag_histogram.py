"""How late a load process was, as a histogram that stays small however long it runs."""

from __future__ import annotations

import math
from array import array

import numpy as np


class LagHistogram:
    """Lags in bins 1 % wide from a microsecond up: bounded memory for any run. A quantile is its bin's upper edge."""

    _BINS = 2400  # 1 us * 1.01^2400 is about 6 hours
    _AT_ONCE = 4096  # logarithms of many at once cost a tenth of one by one

    def __init__(self) -> None:
        self._counts = np.zeros(self._BINS, dtype=np.int64)
        self._new = array("q")
        self._max_ns = 0

    def add(self, lag_ns: int) -> None:
        """One more lag; a negative one counts as 0."""
        self._new.append(lag_ns)
        if len(self._new) >= self._AT_ONCE:
            self._count()

    @property
    def max_ms(self) -> float:
        """The largest lag (ms); 0.0 when there is none."""
        self._count()
        return self._max_ns / 1e6

    def quantile_ms(self, q: float) -> float:
        """The lag (ms) that a share `q` does not exceed, at most 1 % too high; 0.0 when there is none."""
        self._count()
        seen = np.cumsum(self._counts)
        if not seen[-1]:
            return 0.0
        position = int(np.searchsorted(seen, max(1, math.ceil(q * int(seen[-1])))))
        return float(min(self.max_ms, math.exp(position / 100.5) / 1e3))

    def summary(self) -> dict[str, float]:
        """{"p50", "p99", "max"} in ms."""
        quantiles = {"p50": self.quantile_ms(0.50), "p99": self.quantile_ms(0.99), "max": self.max_ms}
        return {key: round(value, 4) for key, value in quantiles.items()}

    def _count(self) -> None:
        if not self._new:
            return
        lags, self._new = np.frombuffer(self._new, dtype=np.int64), array("q")
        self._max_ns = max(self._max_ns, int(lags.max()))
        positions = (np.log(np.maximum(lags / 1e3, 1e-3)) * 100.5).astype(np.int64) + 1
        positions = np.where(lags <= 1000, 0, np.minimum(positions, self._BINS - 1))
        self._counts += np.bincount(positions, minlength=self._BINS)
