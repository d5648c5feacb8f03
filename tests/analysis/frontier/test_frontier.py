"""The frontier: what each arm surely holds, which arm the search starts next, and the answer in words."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailgate.analysis.frontier.holdings import Frontier, Order, frontier_of
from tailgate.analysis.frontier.search import FEWEST_STEPS, Budget, Left, Round, Turn, fitted, next_round
from tailgate.analysis.frontier.summary_rows import error_of, gpus_for_the_load, still_open, to_ship
from tailgate.analysis.judging.load_steps import Held, Holding, Step, holding_of
from tailgate.analysis.settings.ramp_limits import Rollout


def step(arm: str, rate: float, held: Held, trial: int = 1, **more: Any) -> Step:
    return Step(arm=arm, trial=trial, rate=rate, held=held, reason="", requests=100, good=90, **more)


def steady(
    knees: Mapping[str, float], *, starts: int = 4, around: Sequence[float] = (0.8, 0.9, 1.1, 1.25)
) -> list[Step]:
    """Start every arm `starts` times, at rates around its knee: it holds those below and misses those above."""
    return [
        step(arm, knee * place, "held" if place <= 1.0 else "missed", trial)
        for trial in range(1, starts + 1)
        for arm, knee in knees.items()
        for place in around
    ]


KNEES = {"eager": 9.0, "padded": 9.0, "bucketed": 40.0}


def test_every_arm_holds_loads_below_its_knee_and_arms_far_apart_are_ordered() -> None:
    frontier = frontier_of(steady(KNEES), list(KNEES))
    for arm, knee in KNEES.items():
        own = frontier.of(arm)
        assert knee / 2 < own.low_rps < knee < own.high_rps < knee * 2  # type: ignore[operator]
        assert own.seen_rps == pytest.approx(knee, rel=0.1)
        assert (own.starts, own.steps) == (4, 16)
    sure = [(order.more, order.less) for order in frontier.orders if order.surely]
    assert sorted(sure) == [("bucketed", "eager"), ("bucketed", "padded")]
    assert frontier.highest() == "bucketed"
    assert all(1.0 < (order.least or 0.0) < 40 / 9 for order in frontier.orders if order.surely)


def test_intervals_of_all_arms_together_are_wider_than_one_alone() -> None:
    steps = steady(KNEES)
    for item in frontier_of(steps, list(KNEES)).holdings:
        alone = holding_of(item.arm, steps)
        assert item.low_rps < alone.low_rps < alone.high_rps < item.high_rps  # type: ignore[operator]


def test_one_start_decides_nothing() -> None:
    frontier = frontier_of(steady(KNEES, starts=1), list(KNEES))
    assert all((item.low_rps, item.high_rps) == (None, None) for item in frontier.holdings)
    assert all(not order.surely for order in frontier.orders)
    assert frontier.of("bucketed").seen_rps == pytest.approx(40, rel=0.1), "what was seen is shown all the same"


def test_an_arm_without_steps_is_open_and_counts_for_the_others_error() -> None:
    steps = [*steady({"eager": 9.0, "new": 40.0}), step("new", 9.0, "undecided", 9)]
    with_blind = frontier_of(steps, ["eager", "new", "blind"])
    assert with_blind.of("blind") == Holding(arm="blind", low_rps=None, seen_rps=None, high_rps=None, starts=0, steps=0)
    assert with_blind.of("new").low_rps < frontier_of(steps, ["eager", "new"]).of("new").low_rps  # type: ignore[operator]
    assert frontier_of([], ["eager", "new"]).highest() is None


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
    rates = [(trial, rate) for trial in (1, 2, 3) for rate in (1.0, 2.0, 4.0, 6.0)]
    steps = [step("eager", rate, "held" if rate < 5 else "missed", trial, thin=True) for trial, rate in rates]
    (thin,) = frontier_of(steps, ["eager"]).holdings
    assert (thin.low_rps, thin.thin) == (None, True)
    (wide,) = frontier_of([replace(step, thin=False) for step in steps], ["eager"]).holdings
    assert wide.low_rps is not None
    assert wide.high_rps == thin.high_rps


BUDGET = Budget(total_s=7200.0, step_s=30.0, around_s=20.0)
START_S = {"eager": 5.0, "padded": 40.0, "dynamic": 60.0, "bucketed": 110.0}
ARMS = list(START_S)
FIRST = frontier_of([], ARMS)


def after(knees: dict[str, float], starts: int = 6) -> Frontier:
    return frontier_of(steady(knees, starts=starts, around=(0.85, 0.95, 1.05, 1.15)), ARMS)


def round_of(frontier: Frontier, *, budget: Budget = BUDGET, spent_s: float = 0.0, **more: object) -> Round:
    facts = {"number": 1, "before": ()} | more
    return next_round(frontier, start_s=START_S, budget=budget, spent_s=spent_s, **facts)  # type: ignore[arg-type]


def test_an_arm_that_surely_holds_less_leaves_with_a_reason_unless_it_is_the_control() -> None:
    separated = after({"eager": 2.0, "padded": 10.0, "dynamic": 30.0, "bucketed": 60.0})
    second = round_of(separated, number=2)
    assert {item.arm for item in second.left} == {"padded", "dynamic"}
    (padded,) = [item for item in second.left if item.arm == "padded"]
    assert padded.reason.endswith("surely holds less than bucketed (10 against 59.8 requests/s as seen)")
    assert not {turn.arm for turn in second.turns} & {"padded", "dynamic"}


def test_an_arm_that_left_is_not_started_while_others_are_open() -> None:
    close = after({"eager": 10.0, "padded": 10.0, "dynamic": 30.0, "bucketed": 30.0}, starts=2)
    second = round_of(close, number=2, before=(Left(arm="padded", reason=""),))
    assert "padded" not in {turn.arm for turn in second.turns}
    assert {"dynamic", "bucketed"} <= {turn.arm for turn in second.turns}


@given(
    total_s=st.floats(100.0, 50_000.0),
    spent=st.floats(0.0, 1.0),
    number=st.integers(1, 12),
    step_s=st.floats(5.0, 120.0),
)
@settings(max_examples=100)
def test_a_round_never_plans_more_than_is_left(total_s: float, spent: float, number: int, step_s: float) -> None:
    budget = replace(BUDGET, total_s=total_s, step_s=step_s)
    planned = round_of(FIRST, budget=budget, spent_s=spent * total_s, number=number)
    planned_s = sum(budget.turn_s(turn.steps, START_S[turn.arm]) for turn in planned.turns)
    assert planned_s <= (1.0 - spent) * total_s + 1e-6
    assert bool(planned.turns) != planned.stop.endswith("were left, too little for another start")
    assert all(FEWEST_STEPS <= turn.steps <= budget.steps for turn in planned.turns)


def test_a_turn_has_no_more_steps_than_time_is_left_for() -> None:
    planned = Turn(arm="padded", steps=8)
    assert fitted(planned, start_s=START_S["padded"], budget=BUDGET, left_s=1000.0) == planned
    shorter = fitted(planned, start_s=START_S["padded"], budget=BUDGET, left_s=40.0 + 20.0 + 4 * 30.0)
    assert shorter == Turn(arm="padded", steps=4)
    assert fitted(planned, start_s=START_S["padded"], budget=BUDGET, left_s=40.0 + 20.0 + 2.9 * 30.0) is None


def holding(arm: str, low: float | None, high: float | None, starts: int = 4) -> Holding:
    return Holding(arm=arm, low_rps=low, seen_rps=low, high_rps=high, starts=starts, steps=8 * starts)


def order(more: str, less: str, *, surely: bool = True, least: float | None = 1.5) -> Order:
    return Order(more=more, less=less, surely=surely, least=least)


CLEAR = Frontier(
    holdings=(holding("eager", 9.0, 10.0), holding("bucketed", 41.0, 44.0), holding("dynamic", 33.0, 36.0)),
    orders=(
        order("bucketed", "eager", least=4.1),
        order("dynamic", "eager", least=3.3),
        order("bucketed", "dynamic", least=1.14),
    ),
    alpha=0.05,
)


def said(frontier: Frontier, **more: Any) -> str:
    facts = {"out": (), "failed": ()} | more
    return "\n".join([*to_ship(frontier, "p99 TTFT ≤ 500 ms", **facts), *still_open(frontier, facts["out"])])


def test_a_search_that_shows_nothing_promises_nothing() -> None:
    text = said(frontier_of([], ["eager", "bucketed", "dynamic"]))
    assert "eager is not shown to hold any load." in text
    assert "No higher load is shown to be held by bucketed or dynamic." in text
    assert "none does" not in text
    assert "Open: eager, bucketed and dynamic at every load" in text
    assert "No two arms are ordered (0 of 3 pairs)." in text


def test_the_last_sentence_states_the_error_and_what_disturbed_the_machines() -> None:
    assert error_of(0.05, []) == "All statements on loads hold together with 95 % confidence."
    assert "disturbed (machine speed: see the checks)" in error_of(0.05, ["machine speed"])


def test_the_gpus_for_a_load_span_what_each_arm_may_hold() -> None:
    rollout = Rollout(load_rps=200.0, gpus_per_replica=2)
    open_above = Frontier(
        holdings=(*CLEAR.holdings, holding("thin", 50.0, None), holding("once", None, None, starts=1)),
        orders=(),
        alpha=0.05,
    )
    assert gpus_for_the_load(open_above, rollout, ["dynamic"]) == [
        "200 requests/s over all replicas need GPUs: 40 to 46 with eager, 10 to 10 with bucketed and – to 8 with thin."
    ]
    assert gpus_for_the_load(CLEAR, Rollout(), []) == []


@pytest.mark.parametrize(
    ("more", "words", "absent"),
    [
        ({}, ("Up to 9 requests/s", "From 9 to 41 bucketed", "Above 44", "every other arm, 1.14 times"), "FAIL"),
        ({"failed": ["bucketed"]}, ("From 9 to 33 dynamic", "bucketed surely holds more", "is FAIL"), "41 bucketed"),
        ({"out": ["bucketed"]}, ("holds, dynamic: it surely holds more than every other arm that stayed",), "FAIL"),
    ],
    ids=["clear", "failed", "left"],
)
def test_the_answer_names_the_arm_for_each_load(more: Any, words: tuple[str, ...], absent: str) -> None:
    text = said(CLEAR, **more)
    assert [word for word in words if word not in text] == []
    assert absent not in text


def test_an_arm_without_a_missed_step_is_open_above_and_one_start_decides_nothing() -> None:
    open_above = Frontier(holdings=(holding("eager", 9.0, None), holding("bucketed", None, 7.0)), orders=(), alpha=0.05)
    assert "eager above 9 requests/s" in said(open_above)
    assert "bucketed below 7 requests/s" in said(open_above)
    once = frontier_of(steady({"eager": 9.0, "bucketed": 40.0}, starts=1), ["eager", "bucketed"])
    assert "eager and bucketed at every load (one start" in said(once)
