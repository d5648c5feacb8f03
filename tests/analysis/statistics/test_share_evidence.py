"""A share that may be looked at after every block: how seldom it errs, and that bunches are paid for."""

from __future__ import annotations

import math

import numpy as np
import pytest

from analysis.arrays import Ints
from analysis.statistics.share_evidence import ShareEvidence, share_evidence, tail_effects

BLOCKS, PER_BLOCK, ALLOWED = 80, 120, 0.01


def of(share: float, seed: int) -> ShareEvidence:
    """Independent misses."""
    missed = np.random.default_rng(seed).binomial(PER_BLOCK, share, BLOCKS)
    return share_evidence(missed, np.full(BLOCKS, PER_BLOCK), allowed=ALLOWED)


def test_at_the_limit_it_errs_no_more_often_than_alpha_over_all_looks() -> None:
    found = [of(ALLOWED, seed).decision(alpha=0.05) for seed in range(300)]
    for outcome in ("PASS", "FAIL"):
        assert sum(item is not None and item[0] == outcome for item in found) <= 0.05 * 300


@pytest.mark.parametrize(("share", "outcome", "within"), [(0.0, "PASS", 12), (0.03, "FAIL", 25), (0.002, "PASS", 60)])
def test_what_is_far_from_the_limit_is_decided_right(share: float, outcome: str, within: int) -> None:
    for seed in range(20):
        decision = of(share, seed).decision(alpha=0.05)
        assert decision is not None
        assert decision[0] == outcome
        assert decision[1] < within


def test_a_pass_waits_for_the_least_number_of_blocks_and_a_fail_does_not() -> None:
    passed = of(0.0, 0).decision(alpha=0.05, least_blocks=20)
    failed = of(0.2, 0).decision(alpha=0.05, least_blocks=20)
    assert passed == ("PASS", 19)
    assert failed is not None
    assert failed[0] == "FAIL"
    assert failed[1] < 3


def test_misses_of_two_blocks_never_fail() -> None:
    missed = np.array([3, 3, 0])
    assert share_evidence(missed, np.full(3, 3), allowed=0.001).decision(alpha=0.05) is None


def test_misses_in_one_bunch_are_worth_less_than_spread_ones() -> None:
    total = np.full(20, PER_BLOCK)
    spread = share_evidence(np.full(20, 3), total, allowed=ALLOWED)
    bunched = share_evidence(np.array([60, *[0] * 19]), total, allowed=ALLOWED)
    assert bunched.design_effect[-1] > 10 * spread.design_effect[-1]
    assert bunched.harm[-1] < spread.harm[-1]


def test_the_slowest_requests_in_one_jam_are_paid_for_before_any_missed() -> None:
    rng = np.random.default_rng(0)
    block = np.repeat(np.arange(20), PER_BLOCK)
    even = np.exp(0.3 * rng.standard_normal(len(block))) * 100
    jammed = np.where(block == 5, 3.0 * even, even)
    calm, jam = (tail_effects(values, block, blocks=20, allowed=ALLOWED) for values in (even, jammed))
    assert calm.max() < 3
    assert jam[4] < 3 < jam[-1]
    with_tail = share_evidence(np.zeros(20, dtype=np.int64), np.full(20, PER_BLOCK), allowed=ALLOWED, tail=jam)
    without = share_evidence(np.zeros(20, dtype=np.int64), np.full(20, PER_BLOCK), allowed=ALLOWED)
    assert with_tail.safety[-1] < without.safety[-1]


def test_failed_requests_are_slower_than_any_that_ended() -> None:
    values = np.array([1.0, 2.0, math.inf, 3.0])
    assert tail_effects(values, np.array([0, 0, 1, 1]), blocks=2, allowed=0.3).shape == (2,)


@pytest.mark.parametrize(
    ("allowed", "missed", "outcome"), [(0.0, [1, 1, 1], "FAIL"), (0.0, [0, 0, 0], None), (1.0, [9, 9, 9], "PASS")]
)
def test_limits_that_allow_nothing_or_all(allowed: float, missed: list[int], outcome: str | None) -> None:
    counts: Ints = np.array(missed)
    decision = share_evidence(counts, np.full(3, 9), allowed=allowed).decision(alpha=0.05)
    assert (decision and decision[0]) == outcome


def test_blocks_without_requests_and_no_block_at_all_decide_nothing() -> None:
    none = np.zeros(0, dtype=np.int64)
    assert share_evidence(none, none, allowed=ALLOWED).decision(alpha=0.05) is None
    zeros = np.zeros(3, dtype=np.int64)
    assert share_evidence(zeros, zeros, allowed=ALLOWED).decision(alpha=0.05) is None
