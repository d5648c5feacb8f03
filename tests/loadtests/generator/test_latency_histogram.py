"""Latencies by bucket: every answer once, however old, in the bucket that ends at or above it."""

from __future__ import annotations

import bisect

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.generator.arm_tally import ArmTally
from loadtests.generator.latency_histogram import BOUNDS_S, LatencyHistogram
from tests.fakes.request_records import MS, record


def test_boundaries_rise_and_cover_a_compile_that_takes_minutes() -> None:
    for metric, bounds_s in BOUNDS_S.items():
        assert list(bounds_s) == sorted(set(bounds_s)), metric
    assert (BOUNDS_S["ttft"][0], BOUNDS_S["ttft"][-1]) == (0.001, 640.0)
    assert BOUNDS_S["e2e"][:3] == (0.01, 0.02, 0.04)
    assert BOUNDS_S["e2e"][-1] == 655.36


@given(st.lists(st.floats(-1.0, 1000.0), max_size=50))
def test_a_latency_is_in_the_first_bucket_that_reaches_it(latencies: list[float]) -> None:
    histogram = LatencyHistogram(BOUNDS_S["ttft"])
    for part in (latencies[:20], latencies[20:]):
        histogram.add(np.array(part, dtype=np.float64))
    expected = [0] * (len(BOUNDS_S["ttft"]) + 1)
    for latency in latencies:
        expected[bisect.bisect_left(BOUNDS_S["ttft"], max(0.0, latency))] += 1
    summary = histogram.summary()
    assert summary["counts"] == expected
    assert summary["sum_s"] == pytest.approx(sum(max(0.0, latency) for latency in latencies), abs=1e-5)


def test_an_arm_counts_answers_that_its_quantiles_have_forgotten() -> None:
    tally = ArmTally()
    for number in range(20_000):
        if number == 5_000:
            tally.histograms()
        tally.add(record(number))
    histograms = tally.histograms()
    assert {sum(row["counts"]) for row in histograms.values()} == {20_000}
    assert tally.histograms() == histograms
    # 11 ms to the first token, 101 ms in all, 45 ms between its three tokens
    for metric, bound in (("ttft", 0.02), ("e2e", 0.16), ("tpot", 0.05)):
        row = histograms[metric]
        assert row["counts"][row["bounds_s"].index(bound)] == 20_000
    assert histograms["tpot"]["sum_s"] == pytest.approx(900.0)


def test_what_an_answer_does_not_have_is_in_no_bucket() -> None:
    tally = ArmTally()
    tally.add(record(0, status="UNAVAILABLE"))
    tally.add(record(1, first_token_ns=None, output_tokens=None))
    tally.add(record(2, output_tokens=1, end_ns=1_011 * MS))
    counts = {metric: sum(row["counts"]) for metric, row in tally.histograms().items()}
    assert counts == {"ttft": 1, "tpot": 0, "e2e": 2}
