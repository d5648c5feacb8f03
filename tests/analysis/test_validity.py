import numpy as np
import pytest

from analysis import validity
from analysis.compare import Comparison
from analysis.gates import Gate
from analysis.validity import ALL_KINDS, ESTIMATES, Check, apply_checks


def gate(kind="noninferiority", verdict="PASS", arm="compiled", **more):
    return Gate(
        arm=arm, gate=kind, kind=kind, value=1.0, limit=1.1, unit="ratio", verdict=verdict, reason="It is so.", **more
    )


def check(ok=False, affects=ESTIMATES, name="generator lag", **more):
    return Check(check=name, ok=ok, reason="The generator was late.", affects=affects, **more)


class TestChecksOnGates:
    @pytest.mark.parametrize("verdict", ["PASS", "FAIL"])
    @pytest.mark.parametrize("kind", ["noninferiority", "slo"])
    def test_a_failed_check_leaves_no_estimate_standing(self, kind, verdict):
        (result,) = apply_checks([gate(kind, verdict)], [check()])
        assert result.verdict == "INCONCLUSIVE"
        assert result.blocked_by == ("generator lag",)
        assert "The generator was late." in result.reason

    def test_a_recompile_failure_stands(self):
        (result,) = apply_checks([gate("recompile", "FAIL")], [check(affects=ALL_KINDS)])
        assert result.verdict == "FAIL"

    def test_a_recompile_pass_does_not_survive_lost_records(self):
        (result,) = apply_checks([gate("recompile", "PASS")], [check(affects=ALL_KINDS)])
        assert result.verdict == "INCONCLUSIVE"

    def test_an_error_failure_stands_unless_the_control_failed_too(self):
        (result,) = apply_checks([gate("error", "FAIL")], [check(affects=ALL_KINDS)])
        assert result.verdict == "FAIL"
        broken = validity.check_control_errors("eager", 50, 100, 0.5)
        (result,) = apply_checks([gate("error", "FAIL")], [broken])
        assert result.verdict == "INCONCLUSIVE"

    def test_a_check_of_one_arm_leaves_the_others_alone(self):
        first, second = apply_checks([gate(arm="a"), gate(arm="b")], [check(arm="a")])
        assert (first.verdict, second.verdict) == ("INCONCLUSIVE", "PASS")

    def test_checks_that_hold_change_nothing(self):
        assert apply_checks([gate()], [check(ok=True)]) == [gate()]


class TestChecks:
    def test_mirrored_arms_must_have_equal_counts(self):
        assert validity.check_counts({"a": 1000, "b": 999}, {}, mirrored=True).ok
        lost = validity.check_counts({"a": 1000, "b": 900}, {}, mirrored=True)
        assert not lost.ok
        assert "b has 900 of 1000 requests" in lost.reason

    def test_an_arm_without_requests_is_missing_in_any_design(self):
        assert not validity.check_counts({"a": 1000, "b": 0}, {}, mirrored=False).ok
        assert not validity.check_counts({}, {}, mirrored=True).ok

    def test_requests_that_were_planned_must_be_there(self):
        assert not validity.check_counts({"a": 900, "b": 900}, {"a": 1000, "b": 1000}, mirrored=True).ok
        assert not validity.check_counts({"a": 500, "b": 400}, {"*": 1000}, mirrored=False).ok
        assert validity.check_counts({"a": 600, "b": 400}, {"*": 1000}, mirrored=False).ok

    def test_a_split_far_from_its_weights_is_a_mismatch(self):
        weights = {"a": 9.0, "b": 1.0}
        assert validity.check_sample_ratio({"a": 9010, "b": 990}, weights).ok
        assert not validity.check_sample_ratio({"a": 8700, "b": 1300}, weights).ok
        assert validity.check_sample_ratio({"a": 5}, weights) is None

    def test_generator_lag_must_be_known_and_small(self):
        assert validity.check_generator_lag(3.0, 50.0).ok
        assert not validity.check_generator_lag(80.0, 50.0).ok
        assert not validity.check_generator_lag(None, 50.0).ok

    def test_closed_loop_and_unscheduled_data_carry_no_tail(self):
        assert validity.check_open_loop(True, True).ok
        assert validity.check_open_loop(None, True).ok
        assert not validity.check_open_loop(False, True).ok
        assert not validity.check_open_loop(True, False).ok

    def test_arms_that_differ_by_intent_may_be_compared(self):
        assert validity.check_comparable("a", [], intended=False).ok
        assert not validity.check_comparable("a", ["model.dtype"], intended=False).ok
        assert validity.check_comparable("a", ["model.dtype"], intended=True).ok

    def test_requests_cut_by_the_end_must_not_hold_the_tail(self):
        assert validity.check_cut("a", 10, 1000, 0.99).ok
        assert not validity.check_cut("a", 11, 1000, 0.99).ok

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

        assert validity.check_autocorrelation("a", [item(0.2), item(None)]).ok
        assert not validity.check_autocorrelation("a", [item(0.2), item(0.6)]).ok
        assert validity.check_autocorrelation("a", [item(None)]).ok


def slowed(factor, *, seed=0, requests=1200, seconds=600.0):
    rng = np.random.default_rng(seed)
    inside = np.zeros(600)
    for start in range(20, 600, 60):
        inside[start : start + 4] = 1.0
    starts = np.sort(rng.uniform(0, seconds, requests))
    drift = 0.2 * np.sin(starts / 40.0)
    excess = drift + 0.3 * rng.standard_normal(requests) + np.log(factor) * inside[starts.astype(int)]
    return validity.slowdown_during(excess, starts, inside, bin_s=1.0, rng=rng)


def test_a_control_that_slows_while_others_compile_is_seen():
    factor, p_value = slowed(1.6)
    assert factor == pytest.approx(1.6, rel=0.1)
    assert not validity.check_interference(factor, p_value).ok


def test_a_control_that_drifts_by_itself_is_not_blamed():
    blamed = sum(not validity.check_interference(*slowed(1.0, seed=seed)).ok for seed in range(60))
    assert blamed <= 5


def test_too_few_requests_say_nothing_of_interference():
    assert slowed(1.6, requests=12) == (None, None)
    assert validity.check_interference(None, None).ok
