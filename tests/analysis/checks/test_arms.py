import pytest

from analysis.checks.arms import check_answers, check_comparable, check_equal_work


def test_arms_that_differ_by_intent_may_be_compared():
    assert check_comparable("a", [], intended=False).ok
    assert not check_comparable("a", ["model.dtype"], intended=False).ok
    assert check_comparable("a", ["model.dtype"], intended=True).ok


def test_of_an_external_arm_nothing_is_known():
    assert not check_comparable("a", [], intended=False, outside={"a": "openai"}).ok
    assert "a (openai) is external" in check_comparable("a", [], intended=True, outside={"a": "openai"}).reason


@pytest.mark.parametrize(("mine", "ok"), [(104.0, True), (106.0, False), (0.0, False)])
def test_other_lengths_are_other_work(mine, ok):
    assert check_equal_work("a", "b", [("prompt tokens", mine, 100.0)]).ok is ok


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
