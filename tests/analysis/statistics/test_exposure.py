from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.statistics.exposure import ExposureError, batches, best_ladder, first_seen, padding, unseen_probability

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=25).map(np.array)


def test_a_row_is_new_only_the_first_time_it_comes() -> None:
    assert first_seen(np.array([5, 3, 5, 4, 3])).tolist() == [True, True, False, True, False]
    assert first_seen(np.array([1, 1, 2]), np.array([7, 8, 7])).tolist() == [True, True, True]
    assert first_seen(np.array([], dtype=np.int64)).tolist() == []


def test_the_unseen_are_as_likely_as_what_came_once() -> None:
    assert unseen_probability(np.array([1, 1, 2, 3])) == 0.5
    assert unseen_probability(np.array([], dtype=np.int64)) == 1.0


def test_the_chance_of_an_unseen_length_comes_true() -> None:
    rng = np.random.default_rng(5)
    lengths = np.rint(rng.lognormal(6.6, 0.98, 20_000)).astype(np.int64)
    foretold = unseen_probability(lengths[:10_000])
    came = float((~np.isin(lengths[10_000:10_500], lengths[:10_000])).mean())
    assert came == pytest.approx(foretold, abs=0.03)


def test_padding_counts_tokens_that_run_for_each_that_was_asked_for() -> None:
    found = padding(np.array([1, 3, 4, 9]), [4, 8])
    assert (found.ladder, found.factor, found.too_long) == ((4, 8), 12 / 8, 1)


@given(lengths=LENGTHS, steps=st.integers(1, 4))
def test_no_other_ladder_pads_less(lengths: np.ndarray, steps: int) -> None:
    edges = np.unique(lengths)
    every = (
        padding(lengths, [*chosen, edges[-1]]).factor
        for count in range(min(steps, len(edges)))
        for chosen in itertools.combinations(edges[:-1].tolist(), count)
    )
    found = best_ladder(lengths, steps)
    assert found.factor == pytest.approx(min(every))
    assert len(found.ladder) <= steps


@given(lengths=LENGTHS, steps=st.integers(1, 6), multiple=st.integers(1, 16), last=st.integers(1, 64))
def test_every_step_is_allowed_and_every_request_within_the_limit_fits(
    lengths: np.ndarray, steps: int, multiple: int, last: int
) -> None:
    if lengths.min() > last:
        with pytest.raises(ExposureError, match="longer last step"):
            best_ladder(lengths, steps, multiple=multiple, last=last)
        return
    found = best_ladder(lengths, steps, multiple=multiple, last=last)
    assert found.ladder[-1] == last
    assert found.too_long == 0
    assert len(found.ladder) <= steps
    assert all(step % multiple == 0 for step in found.ladder[:-1])


@given(lengths=LENGTHS)
def test_another_step_never_pads_more(lengths: np.ndarray) -> None:
    factors = [best_ladder(lengths, steps).factor for steps in range(1, 7)]
    assert factors == sorted(factors, reverse=True)


def test_a_batch_closes_when_it_is_full_or_its_window_is_over() -> None:
    found = batches(np.array([0, 1, 2, 50, 120]), np.array([5, 9, 7, 3, 4]), window_ns=60, most=2)
    assert found.size.tolist() == [2, 2, 1]
    assert found.longest.tolist() == [9, 7, 4]
    assert found.start_ns.tolist() == [0, 2, 120]


@given(gaps=st.lists(st.integers(0, 20), min_size=1, max_size=40), window=st.integers(0, 50), most=st.integers(1, 8))
def test_every_request_is_in_one_batch(gaps: list[int], window: int, most: int) -> None:
    times = np.cumsum(gaps)
    found = batches(times, np.ones(len(times), dtype=np.int64), window_ns=window, most=most)
    assert found.size.sum() == len(times)
    assert found.size.min() >= 1
    assert found.size.max() <= most


@pytest.mark.parametrize("ladder", [[], [0, 5]])
def test_a_ladder_without_real_steps_is_refused(ladder: list[int]) -> None:
    with pytest.raises(ExposureError, match="give steps of 1 token or more"):
        padding(np.array([3]), ladder)
