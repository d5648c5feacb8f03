import numpy as np
import pyarrow as pa
import pytest

from analysis.records.requests import requests_of
from analysis.records.schemas import REQUESTS
from analysis.run.slo import design_effect, judge_share, meets_all, misses, observed, units
from analysis.settings.slo_targets import parse_slo

S = 1_000_000_000
T0 = 1_700_000_000 * S


def requests(rows):
    table = [
        {
            "arm": "a",
            "trial": 1,
            "scheduled_ns": T0,
            "sent_ns": T0,
            "first_token_ns": None if ttft is None else T0 + int(ttft * 1e6),
            "end_ns": T0 + int(e2e * 1e6),
            "status": status,
            "output_tokens": 11,
        }
        for ttft, e2e, status in rows
    ]
    return requests_of(pa.Table.from_pylist(table, schema=REQUESTS), deadline_ms=1000)


def shares(missed, total, blocks=20):
    flags = np.zeros(total, dtype=bool)
    flags[np.linspace(0, total - 1, missed).astype(int)] = True
    return flags, np.arange(total) * blocks // total


def test_a_failure_misses_every_limit_however_high():
    data = requests([(100, 500, "OK"), (None, 5, "UNAVAILABLE")])
    (target,) = parse_slo({"p99_e2e_ms": 1e9})
    missed, counts = misses(data, target)
    assert missed.tolist() == [False, True]
    assert counts.all()


def test_a_failure_after_the_first_token_keeps_its_ttft():
    data = requests([(100, 500, "INTERNAL")])
    ttft, e2e = parse_slo({"p99_ttft_ms": 200, "p99_e2e_ms": 1e9})
    assert not misses(data, ttft)[0].any()
    assert misses(data, e2e)[0].all()


def test_a_request_that_was_cut_off_past_a_limit_has_missed_it_however_long_others_took():
    data = requests([*[(900, 950, "OK")] * 3, (None, 300, "CANCELLED"), (None, 100, "CANCELLED")])
    assert data.cut.tolist() == [False, False, False, True, True]
    for target in parse_slo({"p99_ttft_ms": 200, "p99_e2e_ms": 200}):
        missed, counts = misses(data, target)
        assert missed.tolist() == [True, True, True, True, False]
        assert counts.tolist() == [True, True, True, True, False]
    assert np.isnan(data.ttft_ms[3:]).all(), "no evidence of the tail"


def test_goodput_counts_requests_that_meet_every_limit():
    data = requests([(100, 500, "OK"), (300, 500, "OK"), (100, 900, "OK"), (100, 500, "INTERNAL")])
    targets = parse_slo({"p99_ttft_ms": 200, "p99_e2e_ms": 800, "error_pct": 1})
    assert meets_all(data, targets).tolist() == [True, False, False, False]


def test_a_value_on_the_limit_misses_a_strict_target_alone():
    data = requests([(100, 500, "OK")])
    within, below = parse_slo({"p99_ttft_ms": 100})[0], parse_slo({"targets": ["p99_ttft_ms < 100"]})[0]
    assert (misses(data, within)[0].tolist(), misses(data, below)[0].tolist()) == ([False], [True])


class TestTokenGaps:
    def streamed(self, *rows):
        table = [
            {
                "arm": "a",
                "trial": 1,
                "scheduled_ns": T0,
                "sent_ns": T0,
                "first_token_ns": T0 + times[0] * 1_000_000,
                "end_ns": T0 + times[-1] * 1_000_000,
                "status": status,
                "output_tokens": len(times),
                "token_ns": [time * 1_000_000 for time in times],
            }
            for times, status in rows
        ]
        return requests_of(pa.Table.from_pylist(table, schema=REQUESTS), deadline_ms=1000)

    def test_an_itl_target_counts_gaps_and_not_requests(self):
        data = self.streamed(([10, 20, 70], "OK"), ([10, 15], "OK"))
        (target,) = parse_slo({"p50_itl_ms": 30})
        found = units(data, np.ones(2, dtype=bool), target)
        assert found.missed.tolist() == [False, True, False]
        assert ((found.at_ns - T0) / 1e6).tolist() == [20, 70, 15]
        assert observed(data, np.ones(2, dtype=bool), target) == 10.0

    def test_a_failure_is_a_gap_beyond_any_limit(self):
        data = self.streamed(([10, 20], "INTERNAL"))
        (target,) = parse_slo({"p50_itl_ms": 1e9})
        assert units(data, np.ones(1, dtype=bool), target).missed.tolist() == [False, True]


def test_units_are_the_requests_in_the_mask_that_count():
    data = requests([(100, 500, "OK"), (300, 500, "OK"), (None, 5, "UNAVAILABLE")])
    (target,) = parse_slo({"p99_ttft_ms": 200})
    found = units(data, np.array([False, True, True]), target)
    assert (found.missed.tolist(), found.row.tolist()) == ([True, True], [1, 2])
    assert found.at_ns.tolist() == [T0, T0]


def test_observed_values_are_quantiles_and_error_rates():
    data = requests([(100, 500, "OK")] * 3 + [(None, 5, "UNAVAILABLE")])
    ttft, error = parse_slo({"p50_ttft_ms": 1, "error_pct": 1})
    everyone = np.ones(4, dtype=bool)
    assert observed(data, everyone, ttft) == 100.0
    assert observed(data, everyone, error) == 25.0
    assert np.isnan(observed(data, ~everyone, error))


@pytest.mark.parametrize(
    ("missed", "total", "verdict"),
    [
        (0, 100, "INCONCLUSIVE"),  # 100 clean requests do not show that 99 % are
        (0, 400, "PASS"),
        (20, 4000, "PASS"),
        (40, 4000, "INCONCLUSIVE"),
        (80, 4000, "FAIL"),
        (2, 10, "INCONCLUSIVE"),
        (0, 0, "INCONCLUSIVE"),
        (1, 1, "INCONCLUSIVE"),
    ],
)
def test_a_share_is_judged_with_its_error(missed, total, verdict):
    assert judge_share(*shares(missed, total), allowed=0.01, alpha=0.05).verdict == verdict


def test_misses_in_one_bunch_decide_less_than_misses_spread_out():
    spread, block = shares(60, 4000)
    bunch = np.arange(4000) < 60
    assert judge_share(spread, block, allowed=0.01, alpha=0.05).verdict == "FAIL"
    assert judge_share(bunch, block, allowed=0.01, alpha=0.05).verdict == "INCONCLUSIVE"


def test_independent_misses_have_a_design_effect_near_one():
    rng = np.random.default_rng(2)
    effects = [design_effect(rng.uniform(size=3000) < 0.05, np.arange(3000) // 100) for _ in range(50)]
    assert 1.0 <= np.mean(effects) < 1.4
    assert design_effect(np.zeros(10, dtype=bool), np.zeros(10, dtype=int)) == 1.0
