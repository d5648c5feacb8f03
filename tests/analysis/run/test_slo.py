"""Which requests and token gaps miss a limit, how a share of misses is judged, and where time went."""

import numpy as np
import pytest
from scipy import stats

from tailgate.analysis.records.requests import requests_of
from tailgate.analysis.run.gaps import gaps_of
from tailgate.analysis.run.slo import judge_share, meets_all, misses, observed, units
from tailgate.analysis.settings.slo_targets import parse_slo
from tests.fakes.request_rows import columns_of

MS = 1_000_000
T0 = 1_700_000_000_000 * MS


def row(ttft, e2e, status="OK", **more):
    times = {"first_token_ns": None if ttft is None else T0 + int(ttft * MS), "end_ns": T0 + int(e2e * MS)}
    base = {"arm": "a", "trial": 1, "scheduled_ns": T0, "sent_ns": T0, "status": status, "output_tokens": 11}
    return {**base, **times, **more}


def streamed(times, status="OK"):
    """A request whose tokens came at these times in ms."""
    tokens = [int(time) * MS for time in times]
    return row(times[0], times[-1], status, output_tokens=len(tokens), token_ns=tokens)


def requests(*rows, deadline_ms=1000):
    return requests_of(columns_of(rows), deadline_ms=deadline_ms)


def test_a_failure_misses_every_limit_of_what_it_did_not_reach():
    data = requests(row(100, 500), row(100, 500, "INTERNAL"), row(None, 5, "UNAVAILABLE"))
    ttft, e2e = parse_slo({"p99_ttft_ms": 1e9, "p99_e2e_ms": 1e9})
    assert misses(data, ttft)[0].tolist() == [False, False, True]
    assert misses(data, e2e)[0].tolist() == [False, True, True]
    assert misses(data, e2e)[1].all()


def test_a_request_that_was_cut_off_past_a_limit_has_missed_it_however_long_others_took():
    data = requests(*[row(900, 950)] * 3, row(None, 300, "CANCELLED"), row(None, 100, "CANCELLED"))
    assert data.cut.tolist() == [False, False, False, True, True]
    for target in parse_slo({"p99_ttft_ms": 200, "p99_e2e_ms": 200}):
        missed, counts = misses(data, target)
        assert missed.tolist() == counts.tolist() == [True, True, True, True, False]
    assert np.isnan(data.ttft_ms[3:]).all(), "no evidence of the tail"


def test_goodput_counts_requests_that_meet_every_limit():
    data = requests(row(200, 800), row(201, 800), row(100, 801), row(100, 500, "INTERNAL"))
    targets = parse_slo({"p99_ttft_ms": 200, "p99_e2e_ms": 800, "error_pct": 1})
    assert meets_all(data, targets).tolist() == [True, False, False, False], "a value on the limit meets it"


def test_units_are_the_requests_in_the_mask_that_count():
    data = requests(row(100, 500), row(300, 500), row(None, 5, "UNAVAILABLE"))
    (target,) = parse_slo({"p99_ttft_ms": 200})
    found = units(data, np.array([False, True, True]), target)
    assert (found.missed.tolist(), found.row.tolist(), found.at_ns) == ([True, True], [1, 2], None)


def test_units_of_an_itl_target_are_gaps_and_not_requests():
    data = requests(streamed([10, 20, 70]), streamed([10, 15]))
    (target,) = parse_slo({"p50_itl_ms": 30})
    found = units(data, np.ones(2, dtype=bool), target)
    assert found.missed.tolist() == [False, True, False]
    assert ((found.at_ns - T0) / MS).tolist() == [20, 70, 15]
    assert observed(data, np.ones(2, dtype=bool), target) == 10.0
    (target,) = parse_slo({"p50_itl_ms": 1e9})
    failed = requests(streamed([10, 20], "INTERNAL"))
    assert units(failed, np.ones(1, dtype=bool), target).missed.tolist() == [False, True], "a failure is a gap too"


def test_observed_values_are_quantiles_and_error_rates():
    data = requests(*[row(100, 500)] * 3, row(None, 5, "UNAVAILABLE"))
    ttft, error = parse_slo({"p50_ttft_ms": 1, "error_pct": 1})
    every = np.ones(4, dtype=bool)
    assert (observed(data, every, ttft), observed(data, every, error)) == (100.0, 25.0)
    assert np.isnan(observed(data, ~every, error))


def shares(missed, total, blocks=20):
    flags = np.zeros(total, dtype=bool)
    flags[np.linspace(0, total - 1, missed).astype(int)] = True
    return flags, np.arange(total) * blocks // total


@pytest.mark.parametrize(
    ("missed", "total", "verdict"),
    [
        (0, 100, "INCONCLUSIVE"),  # 100 clean requests do not show that 99 % are
        (0, 400, "PASS"),
        (20, 4000, "PASS"),
        (40, 4000, "INCONCLUSIVE"),
        (60, 4000, "FAIL"),
        (2, 10, "INCONCLUSIVE"),
        (0, 0, "INCONCLUSIVE"),
        (1, 1, "INCONCLUSIVE"),
    ],
)
def test_a_share_is_judged_with_its_error(missed, total, verdict):
    assert judge_share(*shares(missed, total), allowed=0.01, alpha=0.05).verdict == verdict


BLOCK = np.repeat(np.arange(40), 100)
CALM = 100 * np.exp(0.3 * np.random.default_rng(0).standard_normal(4000))
JAM = np.where(BLOCK == 7, 4 * CALM, CALM)


@pytest.mark.parametrize(
    ("ms", "limit_ms", "missed", "blocks", "verdict", "needed"),
    [
        (CALM, 400.0, 0, 40, "PASS", None),
        (JAM, 1200.0, 0, 40, "INCONCLUSIVE", None),  # what misses next may be the next jam
        (JAM, 5000.0, 0, 40, "PASS", None),  # no jam comes near the limit
        (np.where(np.arange(4000) % 500 == 0, np.inf, JAM), 5000.0, 8, 40, "PASS", None),  # failures outside jams
        (CALM, 400.0, 0, 20, "INCONCLUSIVE", 24),  # no jam may have come yet
        (CALM, 5000.0, 0, 20, "PASS", None),
        (CALM, 5000.0, 0, 16, "INCONCLUSIVE", 18),
        (CALM, None, 0, 20, "PASS", None),  # nothing says at what latency a request misses
    ],
)
def test_slow_requests_show_how_misses_would_bunch(ms, limit_ms, missed, blocks, verdict, needed):
    within = blocks > BLOCK
    ms = ms[within]
    bad = ~np.isfinite(ms)
    found = judge_share(bad, BLOCK[within], allowed=0.01, alpha=0.05, ms=ms, limit_ms=limit_ms, least_blocks=18)
    assert (found.missed, found.verdict, found.needed_blocks) == (missed, verdict, needed)


def test_a_limit_that_allows_every_miss_needs_no_blocks():
    limits = {"allowed": 1.0, "alpha": 0.05, "ms": CALM[:200], "limit_ms": 400.0, "least_blocks": 1}
    assert judge_share(np.zeros(200, dtype=bool), BLOCK[:200], **limits).verdict == "PASS"


def test_the_length_that_would_fail_rests_on_how_misses_bunch_and_not_on_slow_requests():
    missed = np.arange(4000) % 80 == 0
    found = judge_share(missed, BLOCK, allowed=0.01, alpha=0.05, ms=np.where(missed, np.inf, JAM), limit_ms=1200.0)
    alone = judge_share(missed, BLOCK, allowed=0.01, alpha=0.05)
    assert (found.verdict, found.low, found.design_effect) == ("INCONCLUSIVE", alone.low, alone.design_effect)


def test_misses_in_one_bunch_decide_less_than_misses_spread_out():
    bunch, block = np.arange(4000) < 60, shares(60, 4000)[1]
    assert judge_share(bunch, block, allowed=0.01, alpha=0.05).verdict == "INCONCLUSIVE"
    found = judge_share(shares(60, 4000)[0], np.zeros(4000, dtype=int), allowed=0.01, alpha=0.05)
    exact = stats.binomtest(60, 4000).proportion_ci(0.9, "exact")
    assert (found.low, found.high) == pytest.approx((exact.low, exact.high))


def test_a_failure_counts_with_the_gaps_it_had_and_one_of_its_deadline():
    data = requests(streamed([100, 110, 130], "DEADLINE_EXCEEDED"), streamed([50, 90]), deadline_ms=5000)
    found = gaps_of(data, np.array([0, 1]))
    failed = dict(zip(found.ms.tolist(), found.failed.tolist(), strict=True))
    assert failed == {10: False, 20: False, 40: False, 5000: True}
