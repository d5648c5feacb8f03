"""Which arm is started next: within the budget, far arms out first, more for what is open."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.frontier.holdings import Frontier, frontier_of
from analysis.frontier.search import (
    FEWEST_STEPS,
    Budget,
    Left,
    Round,
    Turn,
    first_turns,
    fitted,
    hopeless,
    least_s,
    next_round,
    rounds_of,
)
from tests.analysis.frontier.steps import steady, step

BUDGET = Budget(total_s=7200.0, step_s=30.0, around_s=20.0)
START_S = {"eager": 5.0, "padded": 40.0, "dynamic": 60.0, "bucketed": 110.0}
ARMS = list(START_S)
FIRST = frontier_of([], ARMS)


def after(knees: dict[str, float], starts: int = 6) -> Frontier:
    return frontier_of(steady(knees, starts=starts, around=(0.85, 0.95, 1.05, 1.15)), ARMS)


def round_of(frontier: Frontier, *, budget: Budget = BUDGET, spent_s: float = 0.0, **more: object) -> Round:
    facts = {"number": 1, "before": ()} | more
    return next_round(frontier, start_s=START_S, budget=budget, spent_s=spent_s, **facts)  # type: ignore[arg-type]


def test_the_first_round_starts_every_arm() -> None:
    first = round_of(FIRST)
    assert {turn.arm for turn in first.turns} == set(ARMS)
    assert (first.left, first.stop) == ((), "")
    assert first.rounds == rounds_of(START_S, BUDGET)


def test_an_arm_that_surely_holds_less_leaves_and_says_why() -> None:
    apart = after({"eager": 10.0, "padded": 10.0, "dynamic": 30.0, "bucketed": 60.0})
    second = round_of(apart, number=2)
    assert {item.arm for item in second.left} == {"padded", "dynamic"}
    (padded,) = [item for item in second.left if item.arm == "padded"]
    assert padded.reason == "surely holds less than bucketed (9.98 against 59.8 requests/s as seen)"
    assert not {turn.arm for turn in second.turns} & {"padded", "dynamic"}


def test_the_control_never_leaves() -> None:
    apart = after({"eager": 2.0, "padded": 20.0, "dynamic": 20.0, "bucketed": 60.0})
    assert "eager" not in {item.arm for item in round_of(apart, number=2).left}


def test_who_left_before_gets_no_more_while_others_are_open() -> None:
    close = after({"eager": 10.0, "padded": 10.0, "dynamic": 30.0, "bucketed": 30.0}, starts=2)
    second = round_of(close, number=2, before=(Left(arm="padded", reason=""),))
    assert "padded" not in {turn.arm for turn in second.turns}
    assert {"dynamic", "bucketed"} <= {turn.arm for turn in second.turns}


def test_what_is_known_closely_and_told_apart_gets_no_more() -> None:
    apart = after({"eager": 10.0, "padded": 20.0, "dynamic": 40.0, "bucketed": 80.0})
    loose = replace(BUDGET, resolution=20.0)
    assert round_of(apart, budget=loose, number=2).stop == "the answer is not open any more"


def test_the_rest_goes_back_to_arms_that_some_load_could_speak_for() -> None:
    """padded holds less than eager and starts later: no load is for it. dynamic starts before bucketed."""
    apart = after({"eager": 20.0, "padded": 5.0, "dynamic": 40.0, "bucketed": 80.0})
    spread = {"eager": 1.0, "bucketed": 1.0, "padded": 1.2, "dynamic": 1.2}
    known = [
        replace(item, low_rps=(item.seen_rps or 0.0) / by, high_rps=(item.seen_rps or 0.0) * by)
        for item in apart.holdings
        for by in (spread[item.arm],)
    ]
    left = (Left(arm="padded", reason=""), Left(arm="dynamic", reason=""))
    again = round_of(replace(apart, holdings=tuple(known)), number=3, before=left)
    assert {turn.arm for turn in again.turns} == {"dynamic"}


def test_a_search_ends_when_no_start_fits_any_more() -> None:
    ended = round_of(FIRST, spent_s=BUDGET.total_s - 60.0)
    assert ended.turns == ()
    assert ended.stop == "60 seconds are left, less than one more start takes"


def test_of_equally_open_arms_those_of_fewer_starts_come_first() -> None:
    once = steady({"padded": 12.0, "dynamic": 30.0, "bucketed": 40.0}, starts=1, around=(0.85, 0.95, 1.05, 1.15))
    never_missed = [step("eager", 4.0, "held", trial=number) for number in (1, 2, 3)]
    frontier = frontier_of([*once, *never_missed], ARMS)
    assert frontier.of("eager").high_rps is None
    short = Budget(total_s=600.0, step_s=30.0, around_s=20.0)
    assert [turn.arm for turn in round_of(frontier, budget=short).turns] == ["padded"]
    longer = Budget(total_s=1200.0, step_s=30.0, around_s=20.0)
    assert [turn.arm for turn in round_of(frontier, budget=longer).turns] == ["padded", "dynamic"]


def test_two_short_starts_come_before_a_long_one() -> None:
    tight = replace(BUDGET, total_s=2.0 * sum(START_S.values()) + 2 * 4 * (20.0 + 4 * 30.0))
    first = round_of(FIRST, budget=tight)
    counts = {arm: sum(turn.arm == arm for turn in first.turns) for arm in ARMS}
    assert counts["eager"] == 2
    assert all(turn.steps >= FEWEST_STEPS for turn in first.turns)


def test_devices_of_their_own_let_arms_run_at_once() -> None:
    alone, four = round_of(FIRST), round_of(FIRST, budget=replace(BUDGET, lanes=4, total_s=BUDGET.total_s / 4))
    assert {turn.arm for turn in four.turns} == {turn.arm for turn in alone.turns}
    assert least_s(START_S, replace(BUDGET, lanes=4)) < least_s(START_S, BUDGET) / 2


def test_the_least_time_is_that_of_two_shortest_starts_of_every_arm() -> None:
    each = sum(START_S.values()) + 4 * (20.0 + FEWEST_STEPS * 30.0)
    assert least_s(START_S, BUDGET) == pytest.approx(2 * each)


@given(
    total_s=st.floats(100.0, 50_000.0),
    spent=st.floats(0.0, 1.0),
    number=st.integers(1, 12),
    lanes=st.integers(1, 4),
    step_s=st.floats(5.0, 120.0),
)
@settings(max_examples=100)
def test_a_round_never_plans_more_than_is_left(
    total_s: float, spent: float, number: int, lanes: int, step_s: float
) -> None:
    budget = replace(BUDGET, total_s=total_s, lanes=lanes, step_s=step_s)
    planned = round_of(FIRST, budget=budget, spent_s=spent * total_s, number=number)
    by_arm = {arm: sum(turn.seconds for turn in planned.turns if turn.arm == arm) for arm in ARMS}
    waves = sorted((seconds for seconds in by_arm.values() if seconds), reverse=True)[::lanes]
    assert sum(waves) <= (1.0 - spent) * total_s + 1e-6
    assert bool(planned.turns) != bool(planned.stop)
    assert all(FEWEST_STEPS <= turn.steps <= budget.steps for turn in planned.turns)


def test_every_arm_has_one_start_first_in_half_of_the_budget() -> None:
    turns = first_turns(ARMS, START_S, BUDGET)
    assert [turn.arm for turn in turns] == ARMS
    assert {turn.steps for turn in turns} == {BUDGET.steps}
    short = first_turns(ARMS, START_S, replace(BUDGET, total_s=1600.0))
    assert {turn.steps for turn in short} == {4}
    assert sum(turn.seconds for turn in short) <= 800.0
    assert {turn.steps for turn in first_turns(ARMS, START_S, replace(BUDGET, total_s=100.0))} == {FEWEST_STEPS}


def test_a_turn_has_no_more_steps_than_time_is_left_for() -> None:
    planned = Turn(arm="padded", steps=8, seconds=300.0)
    assert fitted(planned, start_s=START_S, budget=BUDGET, left_s=1000.0) == planned
    shorter = fitted(planned, start_s=START_S, budget=BUDGET, left_s=40.0 + 20.0 + 4 * 30.0)
    assert shorter == Turn(arm="padded", steps=4, seconds=180.0)
    assert fitted(planned, start_s=START_S, budget=BUDGET, left_s=40.0 + 20.0 + 2.9 * 30.0) is None


def test_an_arm_that_holds_less_than_half_of_the_control_is_hopeless() -> None:
    seen = after({"eager": 10.0, "padded": 4.0, "dynamic": 6.0, "bucketed": 30.0}, starts=1)
    (left,) = hopeless(seen)
    assert left.arm == "padded"
    assert left.reason == "is seen to hold 4 requests/s in its first start where eager holds 9.97"
    assert hopeless(seen, before=[left]) == ()


def test_an_arm_that_missed_every_step_is_hopeless_only_where_these_were_low() -> None:
    low = [*steady({"eager": 10.0}, starts=1), *(step("padded", rate, "missed") for rate in (2.0, 3.0, 4.0))]
    (left,) = hopeless(frontier_of(low, ["eager", "padded"]))
    assert "less than 2 requests/s" in left.reason
    high = [*steady({"eager": 10.0}, starts=1), *(step("padded", rate, "missed") for rate in (6.0, 8.0, 9.0))]
    assert hopeless(frontier_of(high, ["eager", "padded"])) == ()


def test_nobody_is_hopeless_beside_a_control_that_holds_nothing() -> None:
    nothing = [step(arm, rate, "missed") for arm in ("eager", "padded") for rate in (2.0, 3.0, 4.0)]
    assert hopeless(frontier_of(nothing, ["eager", "padded"])) == ()
