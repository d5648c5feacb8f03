"""Distributions by special functions agree with those of scipy.stats."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tailgate.analysis.statistics import distributions

P = st.floats(1e-6, 1.0 - 1e-6)
DEGREES = st.floats(0.5, 1e4)


@settings(max_examples=60)
@given(p=P, value=st.floats(-30, 30), degrees=DEGREES)
def test_continuous_distributions_agree(p, value, degrees):
    pairs = [
        (distributions.t_quantile(p, degrees), stats.t.ppf(p, degrees)),
        (distributions.t_sf(value, degrees), stats.t.sf(value, degrees)),
    ]
    for own, theirs in pairs:
        assert own == pytest.approx(theirs, rel=1e-6, abs=1e-12)


@settings(max_examples=60)
@given(total=st.integers(1, 500), share=st.floats(0.001, 0.999), p=P, data=st.data())
def test_discrete_distributions_agree(total, share, p, data):
    count = data.draw(st.integers(0, total))
    drawn, marked = data.draw(st.integers(0, total)), data.draw(st.integers(0, total))
    test = stats.binomtest(count, total, share)
    quantile = distributions.binomial_quantile(p, total, share)
    # Where the distribution function meets p to the last digits, SciPy may give the next count.
    tie = stats.binom.cdf(quantile, total, share) == pytest.approx(p, rel=1e-12)
    assert quantile == stats.binom.ppf(p, total, share) or tie
    assert distributions.binomial_test(count, total, share) == pytest.approx(test.pvalue, rel=1e-6, abs=1e-12)
    hits = stats.hypergeom.sf(count - 1, total, marked, drawn)
    assert distributions.hypergeometric_sf(count - 1, total, marked, drawn) == pytest.approx(hits, rel=1e-6, abs=1e-12)


def test_infinite_degrees_are_the_normal_distribution():
    assert distributions.t_quantile(0.95, np.inf) == pytest.approx(stats.norm.ppf(0.95))
