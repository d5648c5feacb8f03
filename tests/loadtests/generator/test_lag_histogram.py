from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.generator.lag_histogram import LagHistogram
from tests.fakes.request_records import MS


@given(st.lists(st.integers(1_000, 3_600_000_000_000), min_size=1, max_size=200), st.floats(0.01, 1))
def test_lag_quantile_is_at_most_one_percent_high_and_never_low(lags: list[int], q: float) -> None:
    histogram = LagHistogram()
    for lag in lags:
        histogram.add(lag)
    exact_ms = float(np.quantile(lags, q, method="inverted_cdf")) / MS
    assert exact_ms * (1 - 1e-9) <= histogram.quantile_ms(q) <= exact_ms * 1.0101
    assert histogram.max_ms == pytest.approx(max(lags) / MS)


def test_lag_of_nothing_is_zero() -> None:
    assert LagHistogram().summary() == {"p50": 0.0, "p99": 0.0, "max": 0.0}
