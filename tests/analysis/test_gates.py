import math

from analysis.compare import Comparison
from analysis.gates import (
    CompileFacts,
    death_gate,
    error_gate,
    noninferiority_gate,
    noninferiority_name,
    recompile_gates,
    slo_gate,
)
from analysis.limits import GateLimits
from analysis.slo import ShareResult, SloTarget

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
