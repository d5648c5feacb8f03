import math

import pytest

from analysis.judging.gates import (
    CompileFacts,
    death_gate,
    error_gate,
    goodput_ratio_gate,
    noninferiority_gate,
    noninferiority_name,
    recompile_gates,
    slo_gate,
)
from analysis.judging.rates import RateComparison
from analysis.run.slo import ShareResult
from analysis.settings.gate_limits import GateLimits
from analysis.settings.slo_targets import SloTarget
from analysis.statistics.compare import Comparison

LIMITS = GateLimits()


def facts(**change):
    base = {
        "known": True,
        "recompiles": 0,
        "most_in_a_trial": 0,
        "longest_event_s": 0.0,
        "longest_stall_s": 0.0,
        "stall_s_per_min": 0.0,
        "requests_hit": 0,
        "requests": 180,
        "trials": 1,
    }
    return CompileFacts(**(base | change))


class TestRecompileGates:
    def test_a_recompiling_arm_fails_with_numbers(self):
        seen = facts(recompiles=6, most_in_a_trial=6, longest_event_s=7.9, longest_stall_s=7.85, requests_hit=31)
        first, stall, _, hit = recompile_gates("naive", seen, LIMITS)
        assert first.verdict == stall.verdict == hit.verdict == "FAIL"
        assert first.reason == "6 recompiles while serving, longest 7.9 s, limit 0; 31 of 180 requests waited."

    def test_an_arm_that_never_compiles_passes(self):
        assert {item.verdict for item in recompile_gates("padded", facts(), LIMITS)} == {"PASS"}

    def test_a_value_on_the_limit_passes(self):
        gates = recompile_gates("padded", facts(longest_stall_s=1.0, stall_s_per_min=0.5), LIMITS)
        assert {item.verdict for item in gates} == {"PASS"}

    def test_without_telemetry_nothing_is_known(self):
        gates = recompile_gates("padded", facts(known=False, recompiles=3, most_in_a_trial=3), LIMITS)
        assert {item.verdict for item in gates} == {"INCONCLUSIVE"}

    def test_without_requests_nothing_passes(self):
        assert {item.verdict for item in recompile_gates("padded", facts(requests=0), LIMITS)} == {"INCONCLUSIVE"}


def comparison(verdict, quantile=0.99):
    return Comparison(
        arm="compiled",
        metric="e2e",
        quantile=quantile,
        margin=0.1,
        alpha=0.05,
        ratio=1.02,
        method="made up",
        blocks=25,
        trials=1,
        requests=100,
        verdict=verdict,
    )


def test_a_comparison_gate_is_named_by_quantile_and_metric():
    assert noninferiority_gate(comparison("PASS"), None).gate == "noninferiority p99_e2e"
    assert noninferiority_name(comparison("PASS", quantile=0.999)) == "noninferiority p99_9_e2e"


def test_only_an_open_gate_asks_for_a_longer_run():
    assert noninferiority_gate(comparison("INCONCLUSIVE"), 600.0).needed_s == 600.0
    assert noninferiority_gate(comparison("PASS"), 600.0).needed_s is None
    assert error_gate("compiled", share("INCONCLUSIVE"), 0.5, 600.0).needed_s == 600.0
    assert error_gate("compiled", share("FAIL"), 0.5, 600.0).needed_s is None


def share(verdict, missed=2, requests=100):
    return ShareResult(
        missed=missed, requests=requests, allowed=0.01, low=0.004, high=0.07, design_effect=1.0, verdict=verdict
    )


class TestShareGates:
    TARGET = SloTarget(key="p99_ttft_ms", metric="ttft", quantile=0.99, limit=2000.0)

    def test_an_slo_gate_says_what_was_seen_and_what_is_allowed(self):
        gate = slo_gate("compiled", self.TARGET, share("INCONCLUSIVE"), 2100.0, None)
        assert (gate.gate, gate.unit, gate.value) == ("slo p99_ttft_ms", "ms", 2100.0)
        assert gate.reason == (
            "2 of 100 requests took longer than 2000 ms; p99 TTFT within 2000 ms allows 1 %, "
            "the true share may lie between 0.4 % and 7 %."
        )

    def test_an_slo_without_requests_has_no_value(self):
        gate = slo_gate("compiled", self.TARGET, share("INCONCLUSIVE", 0, 0), math.nan, None)
        assert gate.value is None
        assert gate.reason == "No request to judge p99 TTFT within 2000 ms."

    def test_an_error_gate_without_requests_knows_no_rate(self):
        gate = error_gate("compiled", share("INCONCLUSIVE", 0, 0), 0.5, None)
        assert gate.value is None
        assert gate.reason.startswith("No request completed or failed")


def test_one_death_fails():
    assert (death_gate("compiled", 0).verdict, death_gate("compiled", 1).verdict) == ("PASS", "FAIL")
    assert death_gate("compiled", 2).reason == "compiled died 2 times under load."


class TestParts:
    def test_the_cold_start_and_what_came_after_have_names_of_their_own(self):
        early = facts(recompiles=2, most_in_a_trial=2, longest_event_s=1.0)
        cold = recompile_gates("naive", early, LIMITS, part="cold")
        assert [item.gate for item in cold] == [
            "cold recompiles",
            "cold longest stall",
            "cold stall per minute",
            "cold requests hit",
        ]
        assert cold[0].reason.startswith("2 recompiles in the cold start, longest 1.0 s, limit 0; ")
        steady = recompile_gates("naive", facts(), LIMITS, part="steady")
        assert (steady[0].gate, steady[0].reason) == ("recompiles", "0 recompiles past the cold start, limit 0.")


def test_a_cold_target_is_a_gate_of_its_own_kind():
    target = SloTarget(key="p99_ttft_ms", metric="ttft", quantile=0.99, limit=2000.0, cold=True)
    gate = slo_gate("compiled", target, share("FAIL"), 2100.0, None)
    assert (gate.gate, gate.kind) == ("cold slo p99_ttft_ms", "cold")
    assert gate.reason.startswith("2 of 100 cold requests took longer than 2000 ms; ")


def test_an_itl_target_speaks_of_gaps_and_a_strict_one_of_the_limit_itself():
    target = SloTarget(key="p50_itl_ms", metric="itl", quantile=0.5, limit=40.0, strict=True)
    assert slo_gate("compiled", target, share("PASS"), 12.0, None).reason.startswith(
        "2 of 100 token gaps took 40 ms or longer; p50 ITL below 40 ms allows "
    )


class TestGoodputRatio:
    def rate(self, **change):
        known = {"ratio": 1.0, "low": 0.97, "high": 1.03, "share_pct": 99.0, "control_share_pct": 99.0, "spread": 0.02}
        return RateComparison(
            arm="compiled",
            control="eager",
            rate="goodput",
            value=4.0,
            control_value=4.0,
            alpha=0.05,
            blocks=26,
            groups=8,
            trials=1,
            requests=3000,
            method="made up",
            **(known | change),
        )

    @pytest.mark.parametrize(
        ("low", "high", "verdict"),
        [(0.96, 1.04, "PASS"), (0.94, 1.04, "INCONCLUSIVE"), (0.90, 0.949, "FAIL"), (None, None, "INCONCLUSIVE")],
    )
    def test_the_whole_interval_decides(self, low, high, verdict):
        gate = goodput_ratio_gate(self.rate(low=low, high=high), 0.95, 600.0)
        assert gate.verdict == verdict
        assert gate.needed_s == (600.0 if verdict == "INCONCLUSIVE" else None)

    def test_a_goodput_that_is_unknown_is_no_pass(self):
        unknown = self.rate(ratio=None, low=None, high=None, obstacle="one of the arms was sent nothing")
        gate = goodput_ratio_gate(unknown, 0.95, None)
        assert (gate.verdict, gate.reason) == (
            "INCONCLUSIVE",
            "Goodput cannot be compared: one of the arms was sent nothing.",
        )
