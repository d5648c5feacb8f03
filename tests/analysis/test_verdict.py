import math

import numpy as np
import pytest

from analysis import verdict as judge
from analysis.compare import Comparison
from analysis.records import RecordError
from analysis.verdict import Check, CompileFacts, Gate, GateLimits

LIMITS = GateLimits()


def gate(kind="noninferiority", verdict="PASS", arm="compiled", **more):
    return Gate(
        arm=arm, gate=kind, kind=kind, value=1.0, limit=1.1, unit="ratio", verdict=verdict, reason="It is so.", **more
    )


def check(ok=False, affects=judge.ESTIMATES, name="generator lag", **more):
    return Check(check=name, ok=ok, reason="The generator was late.", affects=affects, **more)


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


class TestLimits:
    def test_defaults_hold_where_the_table_is_silent(self):
        limits = GateLimits.from_table({"margin": 0.2, "metrics": ["tpot"], "max_recompiles": 3, "unheard_of": 1})
        assert (limits.margin, limits.metrics, limits.max_recompiles, limits.min_blocks) == (0.2, ("tpot",), 3, 20)

    @pytest.mark.parametrize(
        "table",
        [
            {"margin": "wide"},
            {"margin": True},
            {"margin": -0.1},
            {"margin": math.nan},
            {"alpha": 0.0},
            {"metrics": ["speed"]},
            {"metrics": "ttft"},
            {"quantile": 1.0},
            {"min_blocks": 1},
        ],
    )
    def test_a_bad_value_is_named(self, table):
        with pytest.raises(RecordError, match=f"gates.{next(iter(table))}"):
            GateLimits.from_table(table)


class TestRecompileGates:
    def test_a_recompiling_arm_fails_with_numbers(self):
        seen = facts(recompiles=6, most_in_a_trial=6, longest_event_s=7.9, longest_stall_s=7.85, requests_hit=31)
        first, stall, _, hit = judge.recompile_gates("naive", seen, LIMITS)
        assert first.verdict == stall.verdict == hit.verdict == "FAIL"
        assert first.reason == "6 recompiles while serving, longest 7.9 s, limit 0; 31 of 180 requests waited."

    def test_an_arm_that_never_compiles_passes(self):
        assert {item.verdict for item in judge.recompile_gates("padded", facts(), LIMITS)} == {"PASS"}

    def test_a_value_on_the_limit_passes(self):
        gates = judge.recompile_gates("padded", facts(longest_stall_s=1.0, stall_s_per_min=0.5), LIMITS)
        assert {item.verdict for item in gates} == {"PASS"}

    def test_without_telemetry_nothing_is_known(self):
        gates = judge.recompile_gates("padded", facts(known=False, recompiles=3, most_in_a_trial=3), LIMITS)
        assert {item.verdict for item in gates} == {"INCONCLUSIVE"}

    def test_without_requests_nothing_passes(self):
        assert {item.verdict for item in judge.recompile_gates("padded", facts(requests=0), LIMITS)} == {"INCONCLUSIVE"}


class TestChecksOnGates:
    @pytest.mark.parametrize("verdict", ["PASS", "FAIL"])
    @pytest.mark.parametrize("kind", ["noninferiority", "slo"])
    def test_a_failed_check_leaves_no_estimate_standing(self, kind, verdict):
        (result,) = judge.apply_checks([gate(kind, verdict)], [check()])
        assert result.verdict == "INCONCLUSIVE"
        assert result.blocked_by == ("generator lag",)
        assert "The generator was late." in result.reason

    def test_a_recompile_failure_stands(self):
        (result,) = judge.apply_checks([gate("recompile", "FAIL")], [check(affects=judge.ALL_KINDS)])
        assert result.verdict == "FAIL"

    def test_a_recompile_pass_does_not_survive_lost_records(self):
        (result,) = judge.apply_checks([gate("recompile", "PASS")], [check(affects=judge.ALL_KINDS)])
        assert result.verdict == "INCONCLUSIVE"

    def test_an_error_failure_stands_unless_the_control_failed_too(self):
        (result,) = judge.apply_checks([gate("error", "FAIL")], [check(affects=judge.ALL_KINDS)])
        assert result.verdict == "FAIL"
        broken = judge.check_control_errors("eager", 50, 100, 0.5)
        (result,) = judge.apply_checks([gate("error", "FAIL")], [broken])
        assert result.verdict == "INCONCLUSIVE"

    def test_a_check_of_one_arm_leaves_the_others_alone(self):
        first, second = judge.apply_checks([gate(arm="a"), gate(arm="b")], [check(arm="a")])
        assert (first.verdict, second.verdict) == ("INCONCLUSIVE", "PASS")

    def test_checks_that_hold_change_nothing(self):
        assert judge.apply_checks([gate()], [check(ok=True)]) == [gate()]


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (["PASS", "PASS"], "PASS"),
        (["PASS", "INCONCLUSIVE"], "INCONCLUSIVE"),
        (["INCONCLUSIVE", "FAIL", "PASS"], "FAIL"),
        ([], "INCONCLUSIVE"),
    ],
)
def test_one_failure_fails_and_only_passes_pass(verdicts, expected):
    assert judge.combined(verdicts) == expected


class TestChecks:
    def test_mirrored_arms_must_have_equal_counts(self):
        assert judge.check_counts({"a": 1000, "b": 999}, {}, mirrored=True).ok
        lost = judge.check_counts({"a": 1000, "b": 900}, {}, mirrored=True)
        assert not lost.ok
        assert "b has 900 of 1000 requests" in lost.reason

    def test_an_arm_without_requests_is_missing_in_any_design(self):
        assert not judge.check_counts({"a": 1000, "b": 0}, {}, mirrored=False).ok
        assert not judge.check_counts({}, {}, mirrored=True).ok

    def test_requests_that_were_planned_must_be_there(self):
        assert not judge.check_counts({"a": 900, "b": 900}, {"a": 1000, "b": 1000}, mirrored=True).ok
        assert not judge.check_counts({"a": 500, "b": 400}, {"*": 1000}, mirrored=False).ok
        assert judge.check_counts({"a": 600, "b": 400}, {"*": 1000}, mirrored=False).ok

    def test_a_split_far_from_its_weights_is_a_mismatch(self):
        weights = {"a": 9.0, "b": 1.0}
        assert judge.check_sample_ratio({"a": 9010, "b": 990}, weights).ok
        assert not judge.check_sample_ratio({"a": 8700, "b": 1300}, weights).ok
        assert judge.check_sample_ratio({"a": 5}, weights) is None

    def test_generator_lag_must_be_known_and_small(self):
        assert judge.check_generator_lag(3.0, 50.0).ok
        assert not judge.check_generator_lag(80.0, 50.0).ok
        assert not judge.check_generator_lag(None, 50.0).ok

    def test_closed_loop_and_unscheduled_data_carry_no_tail(self):
        assert judge.check_open_loop(True, True).ok
        assert judge.check_open_loop(None, True).ok
        assert not judge.check_open_loop(False, True).ok
        assert not judge.check_open_loop(True, False).ok

    def test_arms_that_differ_by_intent_may_be_compared(self):
        assert judge.check_comparable("a", [], intended=False).ok
        assert not judge.check_comparable("a", ["model.dtype"], intended=False).ok
        assert judge.check_comparable("a", ["model.dtype"], intended=True).ok

    def test_requests_cut_by_the_end_must_not_hold_the_tail(self):
        assert judge.check_cut("a", 10, 1000, 0.99).ok
        assert not judge.check_cut("a", 11, 1000, 0.99).ok

    def test_resembling_blocks_are_refused(self):
        def item(value):
            return Comparison(
                quantile=0.99,
                margin=0.1,
                alpha=0.05,
                autocorrelation=value,
                method="made up",
                blocks=25,
                trials=1,
                requests=100,
            )

        assert judge.check_autocorrelation("a", [item(0.2), item(None)]).ok
        assert not judge.check_autocorrelation("a", [item(0.2), item(0.6)]).ok
        assert judge.check_autocorrelation("a", [item(None)]).ok


def slowed(factor, *, seed=0, requests=1200, seconds=600.0):
    rng = np.random.default_rng(seed)
    inside = np.zeros(600)
    for start in range(20, 600, 60):
        inside[start : start + 4] = 1.0
    starts = np.sort(rng.uniform(0, seconds, requests))
    drift = 0.2 * np.sin(starts / 40.0)
    excess = drift + 0.3 * rng.standard_normal(requests) + np.log(factor) * inside[starts.astype(int)]
    return judge.slowdown_during(excess, starts, inside, bin_s=1.0, rng=rng)


def test_a_control_that_slows_while_others_compile_is_seen():
    factor, p_value = slowed(1.6)
    assert factor == pytest.approx(1.6, rel=0.1)
    assert not judge.check_interference(factor, p_value).ok


def test_a_control_that_drifts_by_itself_is_not_blamed():
    blamed = sum(not judge.check_interference(*slowed(1.0, seed=seed)).ok for seed in range(60))
    assert blamed <= 5


def test_too_few_requests_say_nothing_of_interference():
    assert slowed(1.6, requests=12) == (None, None)
    assert judge.check_interference(None, None).ok


class TestWords:
    def test_headline_names_the_failing_arm_and_why(self):
        gates = [gate(), gate("recompile", "FAIL")]
        text = judge.headline({"compiled": "FAIL"}, gates, [], "eager")
        assert text == "compiled must not replace eager: It is so."

    def test_headline_prefers_a_fault_to_a_short_run(self):
        gates = [gate(verdict="INCONCLUSIVE", blocked_by=("blocks", "generator lag"))]
        short = Check(check="blocks", ok=False, reason="Too short.", affects=judge.ESTIMATES)
        text = judge.headline({"compiled": "INCONCLUSIVE"}, gates, [short, check()], "eager")
        assert text == "This run cannot decide whether compiled may replace eager. The generator was late."

    def test_no_arm_is_no_pass(self):
        assert judge.headline({}, [], [], "eager") == "There is no arm to judge against eager."

    def test_advice_gives_the_longest_run_that_is_needed(self):
        gates = [gate(verdict="INCONCLUSIVE", needed_s=600.0), gate("slo", "INCONCLUSIVE", needed_s=1260.0)]
        advice = judge.advise(gates, [])
        assert advice.needed_s == 1260.0
        assert "about 21 minutes" in advice.text

    def test_advice_mends_what_no_length_mends(self):
        gates = [gate(verdict="INCONCLUSIVE", blocked_by=("generator lag",))]
        advice = judge.advise(gates, [check(remedy="Use more workers.")])
        assert advice.needed_s is None
        assert advice.text == "Use more workers."

    def test_advice_does_not_promise_to_clear_a_failure(self):
        gates = [gate("recompile", "FAIL"), gate(verdict="INCONCLUSIVE", needed_s=9000.0)]
        assert judge.advise(gates, []) == judge.Advice(needed_s=None, text="A longer run will not clear compiled.")

    def test_advice_is_for_the_arms_that_have_not_failed(self):
        gates = [gate("recompile", "FAIL"), gate(verdict="INCONCLUSIVE", needed_s=9000.0)]
        other = gate(verdict="INCONCLUSIVE", needed_s=630.0, arm="padded")
        assert judge.advise([*gates, other], []).needed_s == 630.0
