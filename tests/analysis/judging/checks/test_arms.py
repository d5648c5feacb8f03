import pytest

from analysis.judging.checks.arms import check_answers, check_comparable, check_equal_work, check_token_stream
from analysis.run.work import TokenTimes, Work


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
