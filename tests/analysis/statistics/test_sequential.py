"""Evidence for an interim analysis after every group: how seldom it errs, and that it knows nothing of what comes."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailgate.analysis.arrays import Ints
from tailgate.analysis.statistics import sequential
from tailgate.analysis.statistics.compare import Sample
from tailgate.analysis.statistics.sequential import FEWEST_GROUPS, Evidence, Groups, groups_for
from tailgate.analysis.statistics.share_evidence import (
    design_effect_of,
    share_evidence,
    share_limits,
    tail_effects,
)

MARGIN = 0.1
PER_BLOCK = 120


def arm(rng: np.random.Generator, *, ratio: float = 1.0, blocks: int = 40, first: int = 0, trial: int = 1) -> Sample:
    """Independent lognormal latencies, PER_BLOCK to a block."""
    count = PER_BLOCK * blocks
    block = first + np.repeat(np.arange(blocks), PER_BLOCK)
    return Sample(
        values=ratio * np.exp(0.5 * rng.standard_normal(count)) * 100, block=block, trial=np.full(count, trial)
    )


def of(one: Sample, other: Sample, *, margin: float = MARGIN, restart_spread: float = 0.0) -> Evidence:
    return groups(one, other, restart_spread=restart_spread).evidence(margin)


def groups(one: Sample, other: Sample, *, restart_spread: float = 0.0) -> Groups:
    return groups_for(one, other, q=0.99, blocks=2, restart_spread=restart_spread)


def joined(*samples: Sample) -> Sample:
    return Sample(
        **{item.name: np.concatenate([getattr(part, item.name) for part in samples]) for item in fields(Sample)}
    )


@pytest.mark.parametrize(("ratio", "outcome"), [(0.8, "PASS"), (1.6, "FAIL")])
def test_what_is_far_from_the_margin_is_decided_early_and_right(ratio: float, outcome: str) -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        decision = of(arm(rng, ratio=ratio), arm(rng)).decision(alpha=0.05)
        assert decision is not None
        assert decision[0] == outcome
        assert FEWEST_GROUPS - 1 <= decision[1] < 15


@pytest.mark.parametrize(("ratio", "disturbed", "outcome"), [(1.2, "control", "PASS"), (0.95, "treatment", "FAIL")])
def test_evidence_of_one_early_disturbance_does_not_last(ratio: float, disturbed: str, outcome: str) -> None:
    """One arm takes twice as long for six blocks; large effects are decided by all segments together."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        arms = {"treatment": arm(rng, ratio=ratio, blocks=90), "control": arm(rng, blocks=90)}
        arms[disturbed].values[arms[disturbed].block < 18] *= 2.0
        segments = groups_for(arms["treatment"], arms["control"], q=0.99, blocks=1, separation=sequential.SEPARATION)
        evidence = segments.evidence(MARGIN)
        decision = evidence.decision(alpha=0.05)
        assert decision is not None
        assert decision[0] == outcome
        assert evidence.last_block[decision[1]] // sequential.SEGMENTS >= sequential.SOONEST_BLOCKS - 1
        assert evidence.decision(alpha=0.05, to_the_end=True) is None


def test_nothing_is_decided_before_it_is_known_how_groups_resemble_each_other() -> None:
    rng = np.random.default_rng(0)
    evidence = of(arm(rng, ratio=9.0), arm(rng))
    assert np.isinf(evidence.deflation[: FEWEST_GROUPS - 1]).all()
    assert (evidence.harm[: FEWEST_GROUPS - 1] == 0.0).all()
    assert np.isfinite(evidence.deflation[FEWEST_GROUPS - 1 :]).all()


@settings(max_examples=20)
@given(seed=st.integers(0, 1000), kept=st.integers(2, 39))
def test_what_comes_later_changes_nothing_of_what_was_known(seed: int, kept: int) -> None:
    rng = np.random.default_rng(seed)
    both = [arm(rng, ratio=ratio) for ratio in (1.1, 1.0)]
    # a jam in the middle, so that groups differ in length
    for sample in both:
        sample.values[(sample.block >= 17) & (sample.block < 21)] *= 4.0
    whole = of(*both)
    part = of(*(sample.only(sample.block < kept) for sample in both))
    groups = len(part.harm)
    for item in ("last_block", "harm", "safety", "deflation", "value"):
        np.testing.assert_array_equal(getattr(part, item), getattr(whole, item)[:groups])


def test_swapped_arms_swap_harm_and_safety() -> None:
    rng = np.random.default_rng(3)
    one, other = arm(rng, ratio=1.2), arm(rng)
    forth, back = of(one, other, margin=0.0), of(other, one, margin=0.0)
    np.testing.assert_allclose(forth.harm, back.safety, atol=1e-9)
    np.testing.assert_allclose(forth.safety, back.harm, atol=1e-9)


def test_a_jam_is_one_group_and_so_is_what_is_left_of_a_trial_none() -> None:
    rng = np.random.default_rng(5)
    both = [arm(rng, blocks=21), arm(rng, blocks=21)]
    for sample in both:
        sample.values[(sample.block >= 11) & (sample.block < 14)] *= 4.0
    assert of(*both).last_block.tolist() == [1, 3, 5, 7, 9, 14, 16, 18, 20]
    # a second trial begins with a group of its own, though the first left a block over
    more = [joined(sample.only(sample.block < 5), arm(rng, blocks=4, first=100, trial=2)) for sample in both]
    assert of(*more).last_block.tolist() == [1, 3, 101, 103]


def test_groups_wait_for_requests_beyond_their_quantile() -> None:
    rng = np.random.default_rng(6)
    seldom = [sample.only(np.arange(len(sample)) % 3 == 0) for sample in (arm(rng), arm(rng))]
    assert np.diff(of(*seldom).last_block).tolist() == [3] * 12, (
        "40 requests of an arm in a block: 0.8 beyond p99 of both"
    )


def test_noise_that_lasts_and_start_to_start_variance_deflate_the_evidence() -> None:
    rng = np.random.default_rng(7)
    plain = arm(rng), arm(rng)
    calm = of(*plain).deflation[-1]
    wandering = np.repeat([0.3, -0.3, 0.3, -0.3, 0.3], 8)
    slowed = Sample(
        values=plain[0].values * np.exp(wandering[plain[0].block]), block=plain[0].block, trial=plain[0].trial
    )
    assert calm < 1.5
    assert of(slowed, plain[1]).deflation[-1] > 1.2 * calm
    assert of(*plain, restart_spread=0.05).deflation[-1] > calm + 0.5


def test_neighbours_that_agree_deflate_the_evidence_and_others_do_not() -> None:
    alike, alternating = np.repeat([2.0, -2.0, 2.0, -2.0], 4), np.tile([2.0, -2.0], 8)
    assert sequential._neighbours(alike)[-1] > 0.4
    assert sequential._neighbours(alternating)[-1] == sequential._neighbours(np.ones(8))[-1] == 0.0


def test_an_arm_whose_worst_is_far_worse_does_not_pass() -> None:
    rng = np.random.default_rng(8)
    one, other = arm(rng, ratio=0.6), arm(rng)
    one.values[(one.block >= 2) & (one.block < 4)] *= 30.0
    evidence = of(one, other)
    assert evidence.safety.max() > math.log(20)
    p99s = [np.quantile(sample.values, 0.99) for sample in (one, other)]
    assert evidence.value[-1] == pytest.approx(p99s[0] / p99s[1], rel=0.01)
    assert evidence.decision(alpha=0.05) is None


def test_arms_that_share_no_time_are_not_compared() -> None:
    rng = np.random.default_rng(9)
    evidence = of(arm(rng, blocks=4), arm(rng, blocks=4, first=50))
    assert len(evidence.harm) == 0
    assert evidence.decision(alpha=0.05) is None


def test_a_failure_of_one_gate_among_many_needs_more_evidence_and_a_pass_does_not() -> None:
    may, none = np.ones(2, dtype=np.bool_), np.zeros(2, dtype=np.bool_)

    def decision(gates: int, *, to_the_end: bool = False, **columns: list[float]) -> object:
        known = {name: np.array(columns.get(name, [0.0, 0.0])) for name in ("harm", "safety", "deflation", "value")}
        evidence = Evidence(
            limit=1.0 + MARGIN, last_block=np.array([1, 3]), may_fail=may, may_pass=may, early=none, **known
        )
        return evidence.decision(alpha=0.05, gates=gates, to_the_end=to_the_end)

    assert decision(1, harm=[0.0, math.log(25)]) == ("FAIL", 1)
    assert decision(2, harm=[0.0, math.log(25)]) is None
    for to_the_end in (False, True):
        assert decision(9, safety=[math.log(25), 0.0], to_the_end=to_the_end) == ("PASS", 0), "nothing contradicts it"
    broken = {"safety": [math.log(25), 0.0], "value": [1.0, 1.2]}
    assert decision(9, **broken) == ("PASS", 0)
    assert decision(9, **broken, to_the_end=True) is None
    assert decision(1, **broken, harm=[0.0, math.log(25)], to_the_end=True) == ("FAIL", 1)


def test_the_limits_hold_the_true_ratio_at_every_interim_analysis_and_close_in_on_it() -> None:
    missed = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        samples = arm(rng, ratio=1.3), arm(rng)
        found = [
            groups(*(sample.only(sample.block < blocks) for sample in samples)).limits(alpha=0.05)
            for blocks in (24, 40, 60)
        ]
        missed += any(low > 1.3 or high < 1.3 for low, high in found)
        assert all(low < high for low, high in found)
        assert found[-1][1] / found[-1][0] < 1.6
    assert missed <= 6, "0.05 to either side"


def test_limits_and_decision_agree() -> None:
    rng = np.random.default_rng(3)
    samples = arm(rng, ratio=1.6), arm(rng)
    both = groups(*samples)
    decision = both.evidence(MARGIN).decision(alpha=0.05)
    assert decision is not None
    assert decision[0] == "FAIL"
    ends = (both.last_block[decision[1] - 1], both.last_block[decision[1]])
    before, after = (groups(*(one.only(one.block <= end) for one in samples)).limits(alpha=0.05)[0] for end in ends)
    assert after >= 0.97 * (1.0 + MARGIN)
    assert before <= 1.03 * (1.0 + MARGIN)
    assert groups(*(one.only(one.block <= both.last_block[0]) for one in samples)).limits(alpha=0.05)[1] == math.inf


BLOCKS, ALLOWED = 80, 0.01


def share_of(share: float, seed: int, **more: Any) -> Evidence:
    """Independent misses."""
    missed = np.random.default_rng(seed).binomial(PER_BLOCK, share, BLOCKS)
    return share_evidence(missed, np.full(BLOCKS, PER_BLOCK), allowed=ALLOWED, **more)


def test_at_the_limit_it_errs_no_more_often_than_alpha_over_all_interim_analyses() -> None:
    found = [share_of(ALLOWED, seed).decision(alpha=0.05) for seed in range(300)]
    for outcome in ("PASS", "FAIL"):
        assert sum(item is not None and item[0] == outcome for item in found) <= 0.05 * 300


@pytest.mark.parametrize(("share", "outcome", "within"), [(0.0, "PASS", 24), (0.03, "FAIL", 25), (0.002, "PASS", 60)])
def test_what_is_far_from_the_limit_is_decided_right(share: float, outcome: str, within: int) -> None:
    for seed in range(20):
        decision = share_of(share, seed).decision(alpha=0.05)
        assert decision is not None
        assert decision[0] == outcome
        assert decision[1] < within


def test_a_pass_waits_for_the_least_number_of_blocks_and_a_fail_does_not() -> None:
    passed = share_of(0.0, 0, least_blocks=30).decision(alpha=0.05)
    failed = share_of(0.2, 0, least_blocks=30).decision(alpha=0.05)
    assert passed == ("PASS", 29)
    far = share_of(0.0, 0, far=True, least_blocks=20)
    assert far.decision(alpha=0.05) == ("PASS", 19)
    assert failed is not None
    assert failed[0] == "FAIL"
    assert failed[1] < 3


@pytest.mark.parametrize(("late", "stands"), [(0, "PASS"), (3, None), (30, "FAIL")])
def test_later_misses_contradict_a_pass_at_the_end(late: int, stands: str | None) -> None:
    missed = np.where(np.arange(BLOCKS) < 30, 0, late)
    evidence = share_evidence(missed, np.full(BLOCKS, PER_BLOCK), allowed=ALLOWED)
    assert evidence.decision(alpha=0.05) == ("PASS", 23)
    found = evidence.decision(alpha=0.05, to_the_end=True)
    assert (found and found[0]) == stands


def test_a_pass_on_few_blocks_must_still_be_so_at_the_end() -> None:
    missed = np.where(np.arange(BLOCKS) < 40, 0, 2)
    for min_blocks, decision in ((0, ("PASS", 19)), (30, ("PASS", 29)), (60, None)):
        evidence = share_evidence(
            missed, np.full(BLOCKS, PER_BLOCK), allowed=ALLOWED, far=True, least_blocks=20, min_blocks=min_blocks
        )
        assert not evidence.safe(alpha=0.05)[-1]
        assert evidence.decision(alpha=0.05, to_the_end=True) == decision


def test_misses_of_two_blocks_never_fail() -> None:
    missed = np.array([3, 3, 0])
    assert share_evidence(missed, np.full(3, 3), allowed=0.001).decision(alpha=0.05) is None


def test_the_slowest_requests_in_one_jam_deflate_the_evidence_before_any_missed() -> None:
    rng = np.random.default_rng(0)
    block = np.repeat(np.arange(20), PER_BLOCK)
    even = np.exp(0.3 * rng.standard_normal(len(block))) * 100
    jammed = np.where(block == 5, 3.0 * even, even)
    both = (tail_effects(values, block, blocks=20, allowed=ALLOWED, limit_ms=150.0) for values in (even, jammed))
    calm, jam = (effects for effects, _ in both)
    assert calm[-1] < 3
    assert 10 * jam[4] < jam[-1]
    with_tail = share_evidence(np.zeros(20, dtype=np.int64), np.full(20, PER_BLOCK), allowed=ALLOWED, tail=jam)
    without = share_evidence(np.zeros(20, dtype=np.int64), np.full(20, PER_BLOCK), allowed=ALLOWED)
    assert with_tail.safety[-1] < without.safety[-1]


def test_independent_misses_have_a_design_effect_near_one() -> None:
    rng = np.random.default_rng(0)
    block = np.arange(3000) // 100
    effects = [design_effect_of(rng.uniform(size=3000) < 0.05, block) for _ in range(50)]
    assert 1.0 <= np.mean(effects) < 2.0, "the largest of four is above 1 by chance"
    assert design_effect_of(np.zeros(10, dtype=bool), np.zeros(10, dtype=int)) == 1.0
    assert design_effect_of(np.zeros(0, dtype=bool), np.zeros(0, dtype=int)) == 1.0


def test_misses_that_last_for_blocks_have_a_large_design_effect() -> None:
    block = np.arange(3200) // 100
    assert design_effect_of((block % 16 < 4) & (np.arange(3200) % 4 == 0), block) > 2 * 3
    assert design_effect_of(block == 3, block) == pytest.approx(100, rel=0.1)


@pytest.mark.parametrize(
    ("allowed", "missed", "outcome"), [(0.0, [1] * 24, "FAIL"), (0.0, [0] * 24, None), (1.0, [9] * 24, "PASS")]
)
def test_limits_that_allow_nothing_or_all(allowed: float, missed: list[int], outcome: str | None) -> None:
    counts: Ints = np.array(missed)
    decision = share_evidence(counts, np.full(24, 9), allowed=allowed).decision(alpha=0.05)
    assert (decision and decision[0]) == outcome


def test_blocks_without_requests_and_no_block_at_all_decide_nothing() -> None:
    none = np.zeros(0, dtype=np.int64)
    assert share_evidence(none, none, allowed=ALLOWED).decision(alpha=0.05) is None
    zeros = np.zeros(30, dtype=np.int64)
    assert share_evidence(zeros, zeros, allowed=ALLOWED).decision(alpha=0.05) is None
    sparse = np.where(np.arange(30) % 2, 2 * PER_BLOCK, 0)  # an arm of little weight
    assert share_evidence(zeros, sparse, allowed=ALLOWED).decision(alpha=0.05) is None


def test_the_limits_of_a_share_agree_with_its_decision() -> None:
    for missed, outcome in ((0, "PASS"), (3, "FAIL")):
        counts, requests = np.full(BLOCKS, missed), np.full(BLOCKS, PER_BLOCK)
        evidence = share_evidence(counts, requests, allowed=0.0123)
        decision = evidence.decision(alpha=0.05)
        assert decision is not None
        seen = slice(decision[1] + 1)
        evidence = share_evidence(counts[seen], requests[seen], allowed=0.0123)
        low, high = share_limits(counts[seen], requests[seen], evidence, alpha=0.05)
        assert (outcome, True) == (decision[0], low >= 0.0123 or high <= 0.0123)
