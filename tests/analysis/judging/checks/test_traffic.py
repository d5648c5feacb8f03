"""Whether starts wait for ends: users who think are seen, and no schedule is taken for them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from analysis.judging.checks.arms import check_answers, check_comparable, check_equal_work, check_token_stream
from analysis.judging.checks.loop import UNKNOWN, Loop, loop_of
from analysis.judging.checks.records import check_complete, check_counts, check_cut, check_deaths, check_records
from analysis.judging.checks.statistics import (
    check_autocorrelation,
    check_blocks,
    check_cold_starts,
    check_cross,
    check_length,
    check_tail,
)
from analysis.judging.checks.traffic import (
    check_control_errors,
    check_generator_lag,
    check_interference,
    check_open_loop,
    check_sample_ratio,
    slowdown_during,
    starts_after_ends,
)
from analysis.run.work import TokenTimes, Work
from analysis.settings.gate_limits import GateLimits
from analysis.statistics.compare import Comparison
from benchmarks.simulation.loops import KINDS, SERVERS, closed_loop, open_loop, server_of, users


def test_a_split_far_from_its_weights_is_a_mismatch():
    weights = {"a": 9.0, "b": 1.0}
    assert check_sample_ratio({"a": 9010, "b": 990}, weights).ok
    assert not check_sample_ratio({"a": 8700, "b": 1300}, weights).ok
    assert check_sample_ratio({"a": 5}, weights) is None


def test_generator_lag_must_be_known_and_small():
    assert check_generator_lag(3.0, 50.0).ok
    assert not check_generator_lag(80.0, 50.0).ok
    assert not check_generator_lag(None, 50.0).ok


def test_closed_loop_and_unscheduled_data_carry_no_tail():
    assert check_open_loop(True, True).ok
    assert check_open_loop(None, True).ok
    assert not check_open_loop(False, True).ok
    assert not check_open_loop(True, False).ok


def test_an_arm_of_weight_0_gets_no_session():
    stray = check_sample_ratio({"a": 900, "b": 100, "c": 3}, {"a": 9.0, "b": 1.0, "c": 0.0})
    assert (stray.ok, stray.reason) == (False, "c has weight 0 and got 3 sessions.")


def test_a_control_that_fails_blames_nobody():
    assert check_control_errors("eager", 5, 1000, 0.5).ok
    assert not check_control_errors("eager", 6, 1000, 0.5).ok
    assert check_control_errors("eager", 0, 0, 0.5).ok


def slowed(factor, *, seed=0, requests=1200, seconds=600.0):
    rng = np.random.default_rng(seed)
    inside = np.zeros(600)
    for start in range(20, 600, 60):
        inside[start : start + 4] = 1.0
    starts = np.sort(rng.uniform(0, seconds, requests))
    drift = 0.2 * np.sin(starts / 40.0)
    excess = drift + 0.3 * rng.standard_normal(requests) + np.log(factor) * inside[starts.astype(int)]
    return slowdown_during(excess, starts, inside, bin_s=1.0, rng=rng)


def test_a_control_that_slows_while_others_compile_is_seen():
    factor, p_value = slowed(1.6)
    assert factor == pytest.approx(1.6, rel=0.1)
    assert not check_interference(factor, p_value).ok


def test_arms_that_take_turns_already_are_not_sent_to_the_design_that_they_have():
    assert "switchback" in check_interference(1.6, 0.01).remedy
    assert "a run of their own" in check_interference(1.6, 0.01, taking_turns=True).remedy


def test_a_control_that_drifts_by_itself_is_not_blamed():
    blamed = sum(not check_interference(*slowed(1.0, seed=seed)).ok for seed in range(60))
    assert blamed <= 5


def test_too_few_requests_say_nothing_of_interference():
    assert slowed(1.6, requests=12) == (None, None)
    assert check_interference(None, None).ok


def test_arms_that_differ_by_intent_may_be_compared():
    assert check_comparable("a", [], intended=False).ok
    assert not check_comparable("a", ["model.dtype"], intended=False).ok
    assert check_comparable("a", ["model.dtype"], intended=True).ok


def test_of_an_external_arm_nothing_is_known():
    assert not check_comparable("a", [], intended=False, outside={"a": "openai"}).ok
    assert "a (openai) is external" in check_comparable("a", [], intended=True, outside={"a": "openai"}).reason


@pytest.mark.parametrize(("mine", "ok"), [(104.0, True), (106.0, False), (0.0, False)])
def test_other_lengths_are_other_work(mine, ok):
    work = Work(arm="a", control="b", means=(("prompt tokens", mine, 100.0),))
    assert check_equal_work(work).ok is ok


def test_what_else_is_other_work_is_said():
    check = check_equal_work(Work(arm="a", control="b", other=("3 of 9 answers of a are not as long as asked for",)))
    assert not check.ok
    assert "3 of 9 answers of a are not as long as asked for: that is other work." in check.reason


def came(arm="a", **more):
    return TokenTimes(**{"arm": arm, "answers": 1000, "untimed": 0, "many": 800, "at_once": 0, **more})


def test_answers_in_one_piece_open_what_is_judged_by_gaps_alone():
    assert not check_token_stream(came(at_once=80), came("b"), judged=True).ok
    assert check_token_stream(came(at_once=80), came("b"), judged=False).ok
    assert check_token_stream(came(at_once=80), came("b", at_once=80), judged=True).ok


def test_a_few_answers_in_one_piece_are_within_chance():
    few = {"many": 23, "answers": 58}
    assert check_token_stream(came(at_once=10, **few), came("b", at_once=7, **few), judged=True).ok


def test_tokens_without_times_open_what_is_judged_by_gaps():
    check = check_token_stream(came(), came("b", untimed=7), judged=True)
    assert not check.ok
    assert "7 of 1000 answers of b have not one time for each token" in check.reason


def row(replica="eager-0", same=6, dtype="float32", **more):
    known = {"arm": "eager", "replica": replica, "error": None, "departs": None, "same": same, "of": 6}
    return {**known, "dtype": dtype, "prompts": [4, 57, 2, 9, 9, 9], **more}


def test_a_control_whose_replicas_agree_is_a_measure():
    assert check_answers("eager", [row(), row("eager-1")]).ok


def test_a_control_whose_replicas_disagree_in_float32_spoils_every_arm():
    check = check_answers("eager", [row(), row("eager-1", 5, departs=[1, 2])])
    assert not check.ok
    assert check.arm is None
    assert {"noninferiority", "parity", "recompile"} <= set(check.affects)
    assert "first other at token 3 after a prompt of 57 tokens" in check.reason
    assert check_answers("eager", [row(), row("eager-1", 5, "bfloat16", departs=[1, 2])]).ok


S = 1_000_000_000


@pytest.mark.parametrize("server", list(SERVERS))
@pytest.mark.parametrize("think_s", [0.005, 0.05, 0.5, 2.0])
@pytest.mark.parametrize("count", [1, 8, 64])
def test_users_who_think_are_not_taken_for_a_schedule(count: int, think_s: float, server: str) -> None:
    found = closed_loop(count, think_s, server, 3)
    assert found.closed or not found.known
    assert found.closed or count == 1


@pytest.mark.parametrize("server", list(SERVERS))
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_schedule_is_not_taken_for_users(kind: str, server: str) -> None:
    assert not any(open_loop(kind, server, seed).closed for seed in range(3))


@pytest.mark.parametrize("kind", ["Poisson", "a rate that wanders", "on and off", "paced", "batches"])
def test_a_schedule_is_told_from_users(kind: str) -> None:
    assert open_loop(kind, "noisy", 1).known


def test_users_who_think_five_milliseconds_are_beyond_what_follows_ends_at_once() -> None:
    rng = np.random.default_rng(0)
    starts, ends = users(8, 0.005, server_of("noisy", rng), rng)
    share, _ = starts_after_ends(starts, ends)
    assert share < 0.5
    assert loop_of(starts, ends).closed


def test_what_is_in_flight_does_not_depend_on_the_order_of_the_records() -> None:
    rng = np.random.default_rng(0)
    starts, ends = users(8, 0.5, server_of("noisy", rng), rng)
    order = rng.permutation(len(starts))
    assert loop_of(starts[order], ends[order]) == loop_of(starts, ends)


def test_a_few_requests_tell_nothing() -> None:
    for count in (0, 1, 2, 5):
        starts = np.arange(count, dtype=np.int64) ** 2 * S
        found = loop_of(starts, starts + S // 2)
        assert not found.closed
        assert not found.known
    same = np.zeros(50, dtype=np.int64)
    assert not loop_of(same, same + S).closed


def test_the_check_says_what_was_found_unless_the_records_say_how_they_were_made() -> None:
    waits, free = Loop(z=-9.0, kept=0.4), Loop(z=0.2, kept=0.95)
    assert check_open_loop(None, True, loops=[free, free]).ok
    closed = check_open_loop(None, True, loops=[free, waits])
    assert not closed.ok
    assert "closed loop" in closed.reason
    assert "60 %" in closed.reason
    untold = check_open_loop(None, True, loops=[free, UNKNOWN])
    assert not untold.ok
    assert "Nothing says" in untold.reason
    assert "open_loop" in untold.remedy
    assert check_open_loop(True, True, loops=[]).ok
    assert math.isnan(UNKNOWN.z)


def test_mirrored_arms_must_have_equal_counts():
    assert check_counts({"a": 1000, "b": 999}, {}, mirrored=True).ok
    lost = check_counts({"a": 1000, "b": 900}, {}, mirrored=True)
    assert not lost.ok
    assert "b has 900 of 1000 requests" in lost.reason


def test_an_arm_without_requests_is_missing_in_any_design():
    assert not check_counts({"a": 1000, "b": 0}, {}, mirrored=False).ok
    assert not check_counts({}, {}, mirrored=True).ok


def test_requests_that_were_planned_must_be_there():
    assert not check_counts({"a": 900, "b": 900}, {"a": 1000, "b": 1000}, mirrored=True).ok
    assert not check_counts({"a": 500, "b": 400}, {"*": 1000}, mirrored=False).ok
    assert check_counts({"a": 600, "b": 400}, {"*": 1000}, mirrored=False).ok


def test_requests_cut_by_the_end_must_not_hold_the_tail():
    assert check_cut("a", 10, 1000, 0.99).ok
    assert not check_cut("a", 11, 1000, 0.99).ok


def test_nobody_is_missing_who_was_only_under_way():
    assert check_counts({"a": 1000, "b": 998}, {}, mirrored=True).ok
    assert not check_counts({"a": 1000, "b": 997}, {}, mirrored=True).ok


def test_a_torn_file_a_broken_time_and_a_row_that_is_there_twice_are_told():
    assert check_records([], 0, 0).ok
    torn = check_records(["requests-0.arrow is cut off at its end"], 1, 2)
    assert not torn.ok
    assert torn.reason == (
        "requests-0.arrow is cut off at its end; 1 request has times that are missing or run backwards; "
        "2 rows repeat a request."
    )


def test_a_stopped_trial_is_named():
    assert check_complete([{"trial": 1, "complete": True}]).ok
    stopped = check_complete([{"trial": 1, "complete": True}, {"trial": 2}])
    assert (stopped.ok, stopped.reason) == (False, "Trial 2 was stopped before its end.")


def test_a_trial_that_was_planned_and_is_not_there_is_named():
    """Two of three trials that are there ended well; the third may be the one that the folder was deleted of."""
    ended = [{"trial": 1, "complete": True}, {"trial": 2, "complete": True}]
    assert check_complete(ended, planned=2).ok
    assert check_complete(ended, planned=3).reason == "Trial 3 is missing."
    assert (
        check_complete([{"trial": 1, "complete": True}, {"trial": 3, "complete": True}]).reason == "Trial 2 is missing."
    )
    assert check_complete([], planned=0).ok


def test_a_dead_control_spoils_every_arm_and_a_dead_arm_itself():
    deaths = [{"replica": "a-0", "exit_code": -9}]
    assert check_deaths("a", [], control=False).ok
    assert check_deaths("a", deaths, control=True).arm is None
    died = check_deaths("a", deaths, control=False)
    assert (died.arm, died.reason) == ("a", "a died under load: a-0 (exit code -9).")


def test_a_death_in_the_midst_of_a_compile_says_so():
    compiling = {"start_ns": 5, "seconds": 12.04, "shape": "prefill 2x64"}
    died = check_deaths("a", [{"replica": "a-0", "exit_code": -9, "compiling": compiling}], control=False)
    assert "a-0 (exit code -9, 12.0 s into a compile for prefill 2x64)" in died.reason


def item(correlation=None, **more):
    known = {"quantile": 0.99, "margin": 0.1, "alpha": 0.05, "method": "made up", "blocks": 48, "groups": 12}
    return Comparison(autocorrelation=correlation, trials=1, requests=100, **(known | more))


def test_stretches_that_look_alike_are_refused():
    assert check_autocorrelation("a", [item(0.2), item(None)]).ok
    assert not check_autocorrelation("a", [item(0.2), item(0.8)]).ok
    assert check_autocorrelation("a", [item(None)]).ok


def test_lengths_that_change_while_it_runs_may_be_what_lasts():
    failed = check_autocorrelation("a", [item(0.8)], lengths_change=True)
    assert failed.reason.endswith("longer than a stretch, perhaps the lengths that change (traffic.length_scales).")


def test_eighteen_blocks_are_needed():
    assert check_blocks("a", 18, GateLimits(), 30.0).ok
    short = check_blocks("a", 17, GateLimits(), 30.0)
    assert (short.ok, short.affects) == (False, ("noninferiority",))
    assert short.reason == "a can be compared over 17 steady blocks of 30 s; 18 are needed."
    assert not check_length(1, GateLimits(), 30.0).ok


@pytest.mark.parametrize(("requests", "quantile", "ok"), [(500, 0.99, True), (499, 0.99, False), (0, 0.5, False)])
def test_a_tail_needs_five_requests(requests, quantile, ok):
    assert check_tail("a", requests, quantile).ok is ok


def test_one_cold_start_cannot_say_how_they_differ():
    assert check_cold_starts(3).ok
    one = check_cold_starts(1)
    assert (one.ok, one.affects) == (False, ("cold",))
    assert one.reason == "The run has 1 cold start; 3 are needed to say how they differ."


def test_a_second_test_that_contradicts_is_heard():
    assert check_cross("a", [item(verdict="PASS", cross_p_noninferior=0.2)]).ok
    assert not check_cross("a", [item(verdict="PASS", cross_p_noninferior=0.3)]).ok
    assert not check_cross("a", [item(verdict="FAIL", cross_p_inferior=0.3)]).ok
    assert check_cross("a", [item(verdict="INCONCLUSIVE", cross_p_noninferior=0.9)]).ok
