"""Counts of slow requests against counting them one by one, and bets against scipy's hypergeometric distribution."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tailgate.analysis.arrays import Floats
from tailgate.analysis.statistics.compare import Comparison, Sample, compare, decide, equal_counts, holm
from tailgate.analysis.statistics.slow_counts import SlowCounts, SortedGroups, slow_counts
from tests.fakes.runs import correlated


def mirrored(seed, *, blocks=24, per_block=60, ratio=1.0, trials=1, own=0.05):
    """Two arms under one drifting load; each arm adds its own noise by block and by request."""
    rng = np.random.default_rng(seed)
    block = np.repeat(np.arange(blocks * trials), per_block)
    shared = correlated(rng, blocks * trials, 0.2, 0.7)[block] + 0.5 * rng.standard_normal(block.size)
    samples = []
    for scale in (ratio, 1.0):
        noise = own * rng.standard_normal(blocks * trials)[block] + 0.1 * rng.standard_normal(block.size)
        values = 100.0 * scale * np.exp(shared + noise)
        samples.append(Sample(values=values, block=block, trial=block // blocks + 1))
    return samples


def judged(treatment, control, *, q=0.99, margin=0.1, **more):
    (item,) = compare(treatment, control, qs=(q,), margin=margin, alpha=0.05, **more)
    return decide([item])[0]


@pytest.mark.parametrize(("seed", "ratio", "verdict"), [(1, 1.0, "PASS"), (2, 1.4, "FAIL"), (4, 1.1, "INCONCLUSIVE")])
def test_the_margin_decides_between_arms_of_known_ratio(seed, ratio, verdict):
    result = judged(*mirrored(seed, ratio=ratio, per_block=240))
    assert (result.verdict, result.lasting) == (verdict, None)
    assert result.ratio == pytest.approx(ratio, rel=0.1)
    assert result.low < result.ratio < result.high


def test_noise_that_lasts_widens_the_limits():
    """The arms' difference drifts over several blocks: the same blocks in another order look more certain."""
    wider = []
    for seed in range(12):
        treatment, control = mirrored(seed, own=0.0)
        drift = correlated(np.random.default_rng(seed), 24, 0.1, 0.9)
        widths = []
        for levels in (drift, np.random.default_rng(seed + 100).permutation(drift)):
            moved = treatment.values * np.exp(levels[treatment.block])
            item = judged(Sample(values=moved, block=treatment.block, trial=treatment.trial), control, q=0.5)
            widths.append(math.log(item.high / item.low))
        wider.append(widths[0] / widths[1])
    assert np.median(wider) > 1.25


def test_blocks_that_only_one_arm_has_are_left_out():
    treatment, control = mirrored(1)
    inside = control.block < 20
    trimmed = [
        Sample(values=item.values[inside], block=item.block[inside], trial=item.trial[inside])
        for item in (treatment, control)
    ]
    result = judged(treatment, trimmed[1])
    assert result.blocks == 20
    same = judged(*trimmed)
    assert (result.ratio, result.low, result.high) == (same.ratio, same.low, same.high)


@pytest.mark.parametrize("ratio", [0.8, 1.0, 1.08, 1.12, 1.3])
def test_verdict_limits_and_p_values_agree_about_the_margin(ratio):
    for seed in range(4):
        result = judged(*mirrored(seed, ratio=ratio))
        assert (result.verdict == "PASS") == (result.p_noninferior <= 0.05 and result.whole <= 1.1)
        assert (result.verdict == "FAIL") == (result.p_inferior <= 0.05)
        assert (result.high <= 1.1 + 1e-9) == (result.p_noninferior <= 0.05)
        assert (result.low >= 1.1 - 1e-9) == (result.verdict == "FAIL")


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"blocks": 3}, "has no error bars: 3 of 18 usable blocks."),
        ({"blocks": 24, "per_block": 8}, "has no error bars: 192 of 500 steady requests. Seen: ×"),
    ],
)
def test_too_few_blocks_or_too_thin_a_tail_set_no_limits(shape, words):
    result = judged(*mirrored(1, ratio=3.0, **shape), min_blocks=18)
    assert result.verdict == "INCONCLUSIVE"
    assert (result.low, result.high, result.p_inferior) == (None, None, None)
    assert result.needed_blocks >= 8
    assert result.ratio == pytest.approx(3.0, rel=0.2)
    assert words in result.reason
    assert ("Seen" in result.reason) is (result.seen is not None) is (shape["blocks"] >= 8), "few blocks show no ratio"


def test_as_many_values_of_each_sample_are_drawn_in_each_block():
    few, many = np.repeat([0, 1, 3], [2, 5, 1]), np.repeat([0, 1, 2], [9, 4, 7])
    drawn = equal_counts(
        *(sample(np.arange(float(len(block))), block) for block in (few, many)), rng=np.random.default_rng(0)
    )
    assert [np.bincount(item.block, minlength=4).tolist() for item in drawn] == [[2, 4, 0, 0]] * 2
    assert set(drawn[1].values[:2].tolist()) <= set(range(9))
    none = drawn[0].only(np.zeros(6, dtype=bool))
    assert [len(item) for item in equal_counts(none, drawn[1], rng=np.random.default_rng(0))] == [0, 0]


def test_six_trials_are_judged_by_their_own_ratios():
    result = judged(*mirrored(6, trials=6, blocks=6, ratio=0.95))
    assert (result.lasting is not None, result.groups) == (True, 6)
    assert result.verdict == "PASS"
    assert result.low < result.ratio < result.high
    assert judged(*mirrored(6, trials=5, blocks=6)).lasting is None


def empty():
    nothing = np.zeros(0)
    return Sample(values=nothing, block=nothing.astype(int), trial=nothing.astype(int))


def sample(values, block=None):
    values = np.asarray(values, dtype=float)
    block = np.zeros(len(values), dtype=int) if block is None else np.asarray(block)
    return Sample(values=values, block=block, trial=np.ones(len(values), dtype=int))


@pytest.mark.parametrize(
    ("treatment", "control", "words"),
    [
        (empty(), empty(), "no request"),
        (sample([1.0]), empty(), "control has no request"),
        (sample([1.0]), sample([1.0]), "only 1 different"),
        (sample([5.0] * 400, np.arange(400) % 40), sample([5.0] * 400, np.arange(400) % 40), "1 different latency"),
        (sample(np.arange(1.0, 50.0)), sample(np.arange(1.0, 50.0)), "49 of 500 steady requests"),
        (sample(np.arange(1.0, 50.0)), sample(np.arange(1.0, 50.0), np.ones(49, dtype=int)), "share no time block"),
        (sample(np.arange(1.0, 50.0)), sample(np.maximum(0.0, np.arange(-2000.0, 12.0))), "the control's is 0"),
    ],
)
def test_data_that_carry_no_test_are_undecided_and_say_why(treatment, control, words):
    result = judged(treatment, control)
    assert result.verdict == "INCONCLUSIVE"
    assert words in result.reason


def test_holm_steps_down_in_order():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []


def test_holm_holds_back_one_failure_among_many():
    known = {"quantile": 0.99, "margin": 0.1, "alpha": 0.05, "ratio": 1.2, "low": 1.0, "p_noninferior": 0.9}

    def item(p_value):
        return Comparison(**known, p_inferior=p_value, blocks=20, trials=1, requests=1000)

    assert decide([item(0.03)])[0].verdict == "FAIL"
    two = decide([item(0.03), item(0.5)])
    assert [row.verdict for row in two] == ["INCONCLUSIVE", "INCONCLUSIVE"]
    assert [row.tests for row in two] == [2, 2]
    assert "above the limit of 1.10, but one of 2 tests may be so by chance (Holm: p = 0.06)" in two[0].reason
    assert "leaves the limit of 1.10 open" in two[1].reason
    near = decide([replace(item(0.9), ratio=1.0, p_noninferior=0.01, low=0.9, high=1.0997)])[0]
    assert "1.0000 times that of the control (between 0.9000 and 1.0997), below the limit of 1.1000" in near.reason


def two_kinds(seed, *, slow, control_slow):
    """Two arms in which a share of the requests is a kind of its own that takes twenty times as long."""
    rng = np.random.default_rng(seed)
    block = np.repeat(np.arange(20), 120)
    work = 0.5 * rng.standard_normal(block.size)
    samples = []
    for share in (slow, control_slow):
        values = 100.0 * np.exp(work + 0.1 * rng.standard_normal(block.size))
        values[rng.uniform(size=block.size) < share] *= 20.0
        samples.append(Sample(values=values, block=block, trial=np.ones_like(block)))
    return samples


def test_slow_requests_of_a_kind_of_their_own_are_seen_in_every_block():
    """One in a hundred requests or none lies on either side of the quantile in each block."""
    slower = [judged(*two_kinds(seed, slow=0.03, control_slow=0.0)).verdict for seed in range(8)]
    faster = [judged(*two_kinds(seed, slow=0.0, control_slow=0.03)).verdict for seed in range(8)]
    assert (slower, faster) == (["FAIL"] * 8, ["PASS"] * 8)
    equal = [judged(*two_kinds(seed, slow=0.01, control_slow=0.01)).verdict for seed in range(30)]
    assert equal.count("FAIL") <= 4


def jammed(seed, *, ratio, jam):
    """Two arms, and one block in which the treatment takes `jam` times as long as the control does."""
    treatment, control = mirrored(seed, blocks=40, per_block=120, ratio=ratio, own=0.02)
    inside = treatment.block == 11
    return [
        Sample(values=np.where(inside, own.values * factor, own.values), block=own.block, trial=own.trial)
        for own, factor in ((treatment, 20.0 * jam), (control, 20.0))
    ]


def test_a_typical_block_does_not_pass_where_the_whole_run_was_seen_to_be_worse():
    result = judged(*jammed(1, ratio=1.0, jam=2.0))
    assert result.p_noninferior <= 0.05
    assert result.verdict == "INCONCLUSIVE"
    assert "over the whole run it is 2." in result.reason


def test_one_start_near_the_margin_does_not_pass_once_restarts_are_allowed_for():
    arms = mirrored(1, blocks=40, per_block=400, ratio=1.05, own=0.01)
    assert judged(*arms, restart_spread=0.0).verdict == "PASS"
    assert judged(*arms, restart_spread=0.03).verdict == "INCONCLUSIVE"


RATIOS = np.array([-0.3, 0.0, 0.25, 1.0])


def sorted_groups(groups: list[Floats]) -> SortedGroups:
    sizes = np.array([len(group) for group in groups])
    return SortedGroups(np.concatenate([np.sort(group) for group in groups]), np.cumsum(sizes) - sizes, sizes)


def one_by_one(treatment: Floats, control: Floats, q: float) -> tuple[int, int]:
    threshold = np.quantile(np.concatenate([treatment, control]), q)
    return int((treatment > threshold).sum()), int((control > threshold).sum())


@settings(max_examples=150)
@given(
    seed=st.integers(0, 10_000),
    sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=6),
    q=st.sampled_from([0.5, 0.9, 0.99, 1.0, 0.001]),
    ties=st.booleans(),
)
def test_counts_are_those_of_counting(seed: int, sizes: list[tuple[int, int]], q: float, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    drawn = [[rng.standard_normal(size) for size in both] for both in sizes]
    # quarters, which floats hold exactly, so that ties stay ties after a shift
    one, other = ([np.round(4 * pair[arm]) / 4 if ties else pair[arm] for pair in drawn] for arm in (0, 1))
    ratios = np.round(4 * RATIOS) / 4 if ties else RATIOS
    totals = np.array([sum(both) for both in sizes])
    place = np.floor(q * (totals - 1)).astype(np.int64) + 1
    counts = slow_counts(sorted_groups(one), sorted_groups(other), ratios[:, None], place)
    for place, ratio in enumerate(ratios):
        for group, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            expected = one_by_one(mine - ratio, theirs, q)
            assert (counts.treatment[place, group], counts.control[place, group]) == expected


def counts_of(*tables: tuple[int, int, int, int]) -> SlowCounts:
    """(slow of the treatment, of the control, all of the treatment, of the control) of each group."""
    return SlowCounts(*(np.array(column) for column in zip(*tables, strict=True)))


def test_arms_of_different_share_are_equally_slow_where_their_shares_are() -> None:
    counts = counts_of((1, 9, 10, 90), (10, 10, 100, 100), (0, 0, 5, 5))
    np.testing.assert_allclose(counts.by_arm(), 0.0, atol=1e-12)
    np.testing.assert_allclose(counts.by_request(), 0.0, atol=1e-12)
    alone = counts_of((4, 0, 100, 100))
    assert alone.by_arm() == pytest.approx(2.0)
    assert alone.by_request() == pytest.approx(2.0 / stats.hypergeom.std(200, 4, 100))


@settings(max_examples=100)
@given(own=st.integers(1, 60), other=st.integers(1, 60), data=st.data())
def test_bets_are_fair_by_the_hypergeometric_distribution(own: int, other: int, data: st.DataObject) -> None:
    slow = data.draw(st.integers(0, own + other))
    counts = range(max(0, slow - other), min(slow, own) + 1)
    chances = np.array([stats.hypergeom.pmf(k, own + other, slow, own) for k in counts])
    every = [counts_of((k, slow - k, own, other)).bets() for k in counts]
    for side in (0, 1):
        payoffs = np.exp(np.array([bets[side][:, 0] for bets in every]))
        np.testing.assert_allclose(chances @ payoffs, 1.0, rtol=1e-9)


def test_more_that_are_slow_are_evidence_of_harm_and_fewer_of_safety() -> None:
    harm, safety = counts_of((5, 5, 10, 90), (0, 10, 10, 90)).bets()
    for bets, signs in (harm, [1, -1]), (safety, [-1, 1]):
        assert (np.sign(bets) == signs).all()
