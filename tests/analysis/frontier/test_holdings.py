"""What arms surely hold, and which holds more: all statements under one error."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.frontier.holdings import Holding, frontier_of
from analysis.judging.load_steps import Step, bracket
from tests.analysis.frontier.steps import steady, step

KNEES = {"eager": 9.0, "padded": 9.0, "bucketed": 40.0}


def test_every_arm_holds_what_lies_well_below_its_knee_and_misses_what_lies_well_above() -> None:
    frontier = frontier_of(steady(KNEES), list(KNEES))
    for arm, knee in KNEES.items():
        own = frontier.of(arm)
        assert (own.at(knee / 2), own.at(knee), own.at(knee * 2)) == ("holds", "open", "misses")
        assert own.low_rps < knee < own.high_rps  # type: ignore[operator]
        assert own.seen_rps == pytest.approx(knee, rel=0.1)
        assert (own.starts, own.steps) == (4, 16)


def test_arms_far_apart_are_ordered_and_equal_ones_are_not() -> None:
    frontier = frontier_of(steady(KNEES), list(KNEES))
    assert frontier.surely_more("bucketed", "eager")
    assert frontier.surely_more("bucketed", "padded")
    assert not frontier.surely_more("eager", "padded")
    assert not frontier.surely_more("padded", "eager")
    assert frontier.highest == "bucketed"
    (pair,) = [order for order in frontier.orders if {order.more, order.less} == {"bucketed", "eager"}]
    assert 1.0 < (pair.least or 0.0) < 40 / 9


def test_every_pair_of_treatments_is_compared() -> None:
    arms = ["eager", "a", "b", "c"]
    frontier = frontier_of(steady(dict.fromkeys(arms, 10.0)), arms)
    pairs = {frozenset((order.more, order.less)) for order in frontier.orders}
    assert pairs == {frozenset(pair) for pair in itertools.combinations(arms, 2)}
    assert frontier.highest is None


def test_intervals_of_all_arms_together_are_wider_than_one_alone() -> None:
    steps = steady(KNEES)
    for item in frontier_of(steps, list(KNEES)).holdings:
        alone = bracket(item.arm, steps)
        assert item.low_rps < alone.low_rps < alone.high_rps < item.high_rps  # type: ignore[operator]


def test_more_arms_make_every_statement_more_careful() -> None:
    two = frontier_of(steady(KNEES), ["eager", "bucketed"])
    three = frontier_of(steady(KNEES), list(KNEES))
    assert three.of("eager").low_rps <= two.of("eager").low_rps  # type: ignore[operator]
    assert three.orders[1].p > two.orders[0].p  # type: ignore[operator]


def test_one_start_decides_nothing() -> None:
    frontier = frontier_of(steady(KNEES, starts=1), list(KNEES))
    assert all((item.low_rps, item.high_rps) == (None, None) for item in frontier.holdings)
    assert all(order.p is None and not order.surely for order in frontier.orders)
    assert all(item.at(1e-9) == "open" for item in frontier.holdings)
    assert frontier.of("bucketed").seen_rps == pytest.approx(40, rel=0.1), "what was seen is shown all the same"


def test_an_arm_without_steps_is_open_and_counts_for_the_others_error() -> None:
    steps = [*steady({"eager": 9.0, "new": 40.0}), step("new", 9.0, "undecided", 9)]
    with_blind = frontier_of(steps, ["eager", "new", "blind"])
    assert with_blind.of("blind") == Holding(arm="blind", low_rps=None, seen_rps=None, high_rps=None, starts=0, steps=0)
    assert with_blind.of("new").low_rps < frontier_of(steps, ["eager", "new"]).of("new").low_rps  # type: ignore[operator]
    assert frontier_of([], ["eager", "new"]).highest is None


def test_an_arm_that_held_everything_is_open_above() -> None:
    held = [step("new", rate, "held", trial) for trial in (1, 2, 3) for rate in (4, 8, 16)]
    own = frontier_of(held, ["eager", "new"]).of("new")
    assert (own.high_rps, own.seen_rps) == (None, 16)
    assert own.at(1e6) == "open"


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 60), st.sampled_from(["held", "missed"]), st.integers(1, 4)),
        max_size=25,
    )
)
@settings(max_examples=25)
def test_statements_never_contradict_each_other(drawn: list[tuple[str, int, str, int]]) -> None:
    steps = [step(arm, rate, held, trial) for arm, rate, held, trial in drawn]  # type: ignore[arg-type]
    frontier = frontier_of(steps, ["a", "b", "c"])
    sure = {(order.more, order.less) for order in frontier.orders if order.surely}
    for more, less in sure:
        high = frontier.of(more).high_rps
        low = frontier.of(less).low_rps
        assert high is None or low is None or high > low, "no interval says the opposite of an order"
    for one, two, three in itertools.permutations("abc"):
        assert not {(one, two), (two, three), (three, one)} <= sure, "orders make no circle"


def test_an_arm_whose_steps_had_too_few_requests_holds_nothing_surely() -> None:
    steps = [
        Step(
            arm="eager", trial=trial, rate=rate, requests=40, good=40, failed=0, offered_rps=rate, goodput_rps=rate,
            held="held" if rate < 5 else "missed", reason="", thin=True,
        )
        for trial in (1, 2, 3)
        for rate in (1.0, 2.0, 4.0, 6.0)
    ]  # fmt: skip
    (thin,) = frontier_of(steps, ["eager"]).holdings
    assert (thin.low_rps, thin.thin) == (None, True)
    (wide,) = frontier_of([replace(step, thin=False) for step in steps], ["eager"]).holdings
    assert wide.low_rps is not None
    assert wide.high_rps == thin.high_rps
