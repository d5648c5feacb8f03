from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from scipy import optimize, stats

from analysis.blackbox.firstseen import (
    chance_of_new,
    goes_by_length,
    longest_of,
    more_than_chance,
    shapes_of,
    slow_first,
)
from analysis.records.requests import Requests, requests_of
from analysis.records.schemas import REQUESTS
from analysis.run.spikes import windows_of

S = 1_000_000_000
T0 = 1_700_000_000 * S
TIMES = ("scheduled_ns", "first_token_ns", "end_ns")
NEVER = windows_of([])


def requests(lengths: list[int | None], waits_s: list[float] | None = None, **columns: list[object]) -> Requests:
    """One request a second with these prompt lengths and times to the first token."""
    waits = waits_s or [0.1] * len(lengths)
    rows = []
    for index, (length, wait) in enumerate(zip(lengths, waits, strict=True)):
        sent = T0 + index * S
        row = {"request_id": str(index), "arm": "a", "trial": 1, "scheduled_ns": sent, "status": "OK"}
        row |= {"first_token_ns": sent + int(wait * S), "end_ns": sent + int(wait * S) + S // 2}
        row |= {"prompt_tokens": length, **{name: values[index] for name, values in columns.items()}}
        rows.append(row)
    return requests_of(pa.Table.from_pylist(rows, schema=REQUESTS))


def test_a_shape_is_new_once() -> None:
    assert shapes_of(requests([5, 7, 5, 7, 9]), "a").new.tolist() == [True, True, False, False, True]


def test_padded_prompts_share_the_shape_of_their_step() -> None:
    shapes = shapes_of(requests([5, 7, 12, 40]), "a", ladder=(8, 16))
    assert shapes.shape.tolist() == [8, 8, 16, 40], "what no step takes keeps its length"
    assert shapes.new.tolist() == [True, False, True, True]


def test_each_replica_meets_a_shape_anew_and_each_trial_where_the_server_was_restarted() -> None:
    two = requests([5, 5, 5, 5], replica=["x", "y", "x", "y"])
    assert shapes_of(two, "a").new.tolist() == [True, True, False, False]
    trials = requests([5, 5], trial=[1, 2])
    assert shapes_of(trials, "a").new.tolist() == [True, True]
    assert shapes_of(trials, "a", lives=np.zeros(2, dtype=np.int64)).new.tolist() == [True, False]


def test_prompts_of_unknown_length_are_never_new() -> None:
    shapes = shapes_of(requests([None, 5, None]), "a")
    assert shapes.new.tolist() == [False, True, False]
    assert chance_of_new(shapes.share(np.array([0, 2]))) == 0.0
    assert not shapes_of(requests([5]), "absent").new.any()


def test_the_share_of_new_shapes_falls_with_time() -> None:
    rng = np.random.default_rng(1)
    shapes = shapes_of(requests(rng.integers(100, 140, 400).tolist()), "a")
    share = shapes.share(np.arange(400))
    assert share[0] == 1.0
    assert (np.diff(share) <= 1e-12).all()
    assert share.sum() == pytest.approx(shapes.new.sum())


@pytest.mark.parametrize("shuffled", [False, True])
def test_shares_of_some_requests_are_those_of_a_fit_to_all(shuffled: bool) -> None:
    rng = np.random.default_rng(3)
    lengths = np.exp(rng.normal(5.0, 1.5, 3000)).astype(int) + 1
    at = rng.permutation(3000) if shuffled else np.arange(3000)
    times = {name: (T0 + at * S + later * S).tolist() for later, name in enumerate(TIMES)}
    shapes = shapes_of(requests(lengths.tolist(), **times), "a")
    assert len(shapes.share(np.arange(0))) == 0
    order = np.argsort(at)
    quarter = np.floor(4.0 * np.log2(lengths[order]))
    rows = rng.choice(3000, 40, replace=False)
    for row, wide, long in zip(rows, shapes.share(rows), shapes.share_as_long(rows), strict=True):
        place = int(np.flatnonzero(order == row)[0])
        for share, below, above in ((wide, 8, 8), (long, 1, 4)):
            alike = (quarter >= quarter[place] - below) & (quarter <= quarter[place] + above)
            fitted = optimize.isotonic_regression(shapes.new[order][alike].astype(float), increasing=False).x
            assert share == pytest.approx(fitted[alike[:place].sum()])


def test_how_far_a_prompt_stands_out_is_counted_among_twenty_of_its_time_and_kind() -> None:
    rng = np.random.default_rng(4)
    lengths = rng.integers(1, 300, 2000)
    shapes = shapes_of(requests(lengths.tolist()), "a")
    rows = rng.choice(2000, 60, replace=False)
    for row, longer in zip(rows, shapes.longer(rows), strict=True):
        kind = np.flatnonzero(shapes.new == shapes.new[row])
        begin = min(max(0, int(np.searchsorted(kind, row)) - 10), len(kind) - 20)
        near = lengths[kind[begin : begin + 20]]
        assert longer == pytest.approx((near < lengths[row]).mean() + 0.5 * (near == lengths[row]).mean())


def test_long_prompts_are_held_against_long_ones() -> None:
    rng = np.random.default_rng(1)
    lengths = rng.integers(100, 110, 400)
    lengths[20::40] = np.arange(5000, 5000 + 50 * lengths[20::40].size, 50)
    shapes = shapes_of(requests(lengths.tolist()), "a")
    long = shapes.shape >= 5000
    share = shapes.share(np.arange(400))
    assert (share[long] == 1.0).all(), "every one of them is new"
    assert share[~long][100:].max() == 0.0
    assert chance_of_new(shapes.share(np.array([399, 380]))) == 1.0


def test_stalls_that_begin_with_the_longest_prompts_go_by_length() -> None:
    rng = np.random.default_rng(2)
    shapes = shapes_of(requests(np.exp(rng.normal(6.6, 1.0, 800)).astype(int).tolist()), "a")
    longest = np.flatnonzero(shapes.shape >= np.quantile(shapes.shape, 0.95))
    ranks = np.array([longest_of(shapes, np.array([row])) for row in longest.tolist()])
    assert goes_by_length(ranks, np.ones(ranks.size), others=0)
    at_random = [
        goes_by_length(np.array([longest_of(shapes, rng.integers(0, 800, 2)) for _ in range(8)]), np.ones(8), others=0)
        for _ in range(200)
    ]
    assert np.mean(at_random) <= 0.1
    assert not goes_by_length(np.zeros(0), np.zeros(0), others=0)
    assert not goes_by_length(ranks, np.zeros(ranks.size), others=0), "none of them counts"


def test_an_arm_with_other_reasons_to_stall_is_trusted_less() -> None:
    ranks = np.array([0.6, 0.65, 0.7, 0.55, 0.75, 0.7])
    assert not goes_by_length(ranks, np.ones(6), others=1)
    assert goes_by_length(ranks, np.ones(6), others=2)


def test_equal_chances_give_the_binomial_test() -> None:
    new = np.array([True] * 4 + [False] * 2)
    expected = stats.binomtest(4, 6, 0.1, alternative="greater").pvalue
    assert more_than_chance(new, np.full(6, 0.1)) == pytest.approx(expected)
    assert more_than_chance(np.zeros(0, dtype=bool), np.zeros(0)) == 1.0
    assert more_than_chance(np.zeros(3, dtype=bool), np.full(3, 0.1)) == 1.0
    assert more_than_chance(np.ones(5, dtype=bool), np.ones(5)) == 1.0, "where every shape is new, one says nothing"


def slowed(by: float, *, shapes: int = 30, seed: int = 2) -> tuple[list[int], list[float]]:
    """Lengths of 30 shapes that come about ten times each, the first of each slower by a factor."""
    rng = np.random.default_rng(seed)
    lengths = (100 * rng.integers(1, shapes + 1, 10 * shapes)).tolist()
    waits = (0.1 * np.exp(0.3 * rng.standard_normal(len(lengths)))).tolist()
    for length in set(lengths):
        waits[lengths.index(length)] *= by
    return lengths, waits


def test_first_requests_of_a_shape_that_wait_longer_are_seen_though_nobody_else_waits() -> None:
    made = requests(*slowed(3.0))
    found = slow_first(made, shapes_of(made, "a"), NEVER, rng=np.random.default_rng(0))
    assert found.first >= 25
    assert found.p_value < 1e-6
    assert found.excess_ms == pytest.approx(200.0, rel=0.3)


def test_equal_waits_are_no_finding_whether_few_or_many_are_compared() -> None:
    for shapes in (5, 30):
        p_values = []
        for seed in range(60):
            made = requests(*slowed(1.0, shapes=shapes, seed=seed))
            p_values.append(slow_first(made, shapes_of(made, "a"), NEVER, rng=np.random.default_rng(0)).p_value)
        assert np.mean(np.array(p_values) < 0.1) <= 0.2
        assert np.mean(np.array(p_values) > 0.5) >= 0.3


def test_few_shapes_are_judged_by_permutation() -> None:
    made = requests([8] * 20, [5.0] + [0.1] * 19)
    found = slow_first(made, shapes_of(made, "a"), NEVER, rng=np.random.default_rng(0))
    assert found.first == 1
    assert found.p_value == pytest.approx(0.05, abs=0.01), "one of twenty ranks"


def test_nothing_to_compare_is_no_finding() -> None:
    for lengths in ([5], [5, 6, 700], [None, None]):
        made = requests(lengths)
        found = slow_first(made, shapes_of(made, "a"), NEVER, rng=np.random.default_rng(0))
        assert (found.first, found.p_value) == (0, 1.0)
        assert np.isnan(found.excess_ms)


def test_all_ties_are_no_finding() -> None:
    made = requests([8, 16] * 40)
    found = slow_first(made, shapes_of(made, "a"), NEVER, rng=np.random.default_rng(0))
    assert found.p_value == 1.0


def test_requests_that_a_stall_held_up_are_left_out() -> None:
    made = requests([8] * 20, [0.9] + [0.1] * 19)
    stall = windows_of([(T0, T0 + S // 2)])
    assert slow_first(made, shapes_of(made, "a"), stall, rng=np.random.default_rng(0)).first == 0
