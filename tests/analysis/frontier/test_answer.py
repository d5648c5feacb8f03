"""The answer in words, and the ranges of load behind it."""

from __future__ import annotations

from analysis.foresight.costs import Start
from analysis.frontier.answer import answer, by_start, load_ranges
from analysis.frontier.holdings import Frontier, Holding, Order, frontier_of
from analysis.frontier.search import Left
from tests.analysis.frontier.steps import steady

STARTS = {
    "eager": Start(serving_s=5.0, memory_bytes=2.0**32),
    "bucketed": Start(serving_s=110.0, memory_bytes=2.0**32 + 1.1 * 2**30),
    "dynamic": Start(serving_s=60.0, memory_bytes=2.0**32),
}


def holding(arm: str, low: float | None, high: float | None, starts: int = 4) -> Holding:
    return Holding(arm=arm, low_rps=low, seen_rps=low, high_rps=high, starts=starts, steps=8 * starts)


def order(more: str, less: str, *, surely: bool = True, least: float | None = 1.5) -> Order:
    return Order(more=more, less=less, p=0.001, surely=surely, least=least)


CLEAR = Frontier(
    holdings=(holding("eager", 9.0, 10.0), holding("bucketed", 41.0, 44.0), holding("dynamic", 33.0, 36.0)),
    orders=(
        order("bucketed", "eager", least=4.1),
        order("dynamic", "eager", least=3.3),
        order("bucketed", "dynamic", least=1.14),
    ),
    alpha=0.05,
)


def said(frontier: Frontier, **more: object) -> str:
    facts = {"objective": "p99 TTFT ≤ 500 ms", "starts": STARTS} | more
    return "\n".join(answer(frontier, **facts))  # type: ignore[arg-type]


def test_the_answer_says_what_to_ship_where() -> None:
    assert said(CLEAR).split("\n") == [
        "Up to 9 requests/s a replica of eager holds p99 TTFT ≤ 500 ms: nothing is gained in load by compiling.",
        "From 9 to 41 bucketed holds it, dynamic to 33.",
        "Above 44 requests/s none does.",
        "For more load than one replica holds, bucketed: it surely holds more than every other arm, 1.14 times or "
        "more.",
        "bucketed costs 105 s of start and 1.1 GiB more than eager.",
        "dynamic costs 55 s of start more than eager.",
        "Open: eager from 9 to 10 requests/s; bucketed from 41 to 44 requests/s; dynamic from 33 to 36 requests/s.",
        "What is said of loads is true all at once, but for a chance of 5 %.",
    ]


def test_what_is_not_told_apart_is_said_to_be_open() -> None:
    unsure = Frontier(
        holdings=(holding("eager", 9.0, 10.0), holding("bucketed", 30.0, 44.0), holding("dynamic", 28.0, 40.0)),
        orders=(
            order("bucketed", "eager"),
            order("dynamic", "eager"),
            order("bucketed", "dynamic", surely=False, least=0.75),
        ),
        alpha=0.05,
    )
    text = said(unsure)
    assert "For more load than one replica holds it is open between bucketed and dynamic." in text
    assert "Not told apart at their limits: bucketed against dynamic." in text


def test_where_few_pairs_are_told_apart_those_are_named() -> None:
    few = Frontier(
        holdings=(holding("eager", 9.0, 10.0), holding("bucketed", 30.0, 44.0), holding("dynamic", 9.0, 40.0)),
        orders=(
            order("bucketed", "eager"),
            order("dynamic", "eager", surely=False, least=0.9),
            order("bucketed", "dynamic", surely=False, least=0.75),
        ),
        alpha=0.05,
    )
    assert "Of any two of these arms only some are told apart at their limits: bucketed above eager." in said(few)


def test_a_search_that_shows_nothing_promises_nothing() -> None:
    text = said(frontier_of([], ["eager", "bucketed", "dynamic"]))
    assert "No load is known that eager surely holds." in text
    assert "Beyond that nothing is shown to be held by bucketed or dynamic." in text
    assert "none does" not in text
    assert "Open: eager, bucketed and dynamic at every load" in text
    assert "No two of these arms are told apart" in text


def test_one_start_is_named_as_what_decides_nothing() -> None:
    text = said(frontier_of(steady({"eager": 9.0, "bucketed": 40.0}, starts=1), ["eager", "bucketed"]))
    assert "Open: eager and bucketed at every load (one start decides nothing)." in text


def test_an_arm_that_missed_no_step_is_open_above() -> None:
    text = said(Frontier(holdings=(holding("eager", 9.0, None), holding("bucketed", None, 7.0)), orders=(), alpha=0.05))
    assert "eager above 9 requests/s (no step was missed: search higher)" in text
    assert "bucketed below 7 requests/s" in text
    assert "none does" not in text


def test_an_arm_that_its_gates_do_not_pass_is_not_recommended_in_silence() -> None:
    text = said(CLEAR, verdicts={"bucketed": "FAIL", "dynamic": "PASS"})
    assert "bucketed is FAIL by its gates, and nothing here changes that." in text
    assert "dynamic is" not in text


def test_who_left_the_search_is_said_with_the_reason() -> None:
    text = said(CLEAR, left=[Left(arm="dynamic", reason="surely holds less than bucketed")])
    assert "dynamic left the search early: it surely holds less than bucketed." in text


def test_ranges_cover_all_loads_and_pick_the_arm_that_starts_soonest() -> None:
    ranges = load_ranges(CLEAR, STARTS)
    assert [(item.low_rps, item.high_rps, item.pick) for item in ranges] == [
        (0.0, 9.0, "eager"),
        (9.0, 10.0, "dynamic"),
        (10.0, 33.0, "dynamic"),
        (33.0, 36.0, "bucketed"),
        (36.0, 41.0, "bucketed"),
        (41.0, 44.0, None),
        (44.0, None, None),
    ]
    assert ranges[1].open == ("eager",)
    assert ranges[-1].open == ranges[-1].holds == ()


def test_unknown_starts_come_last() -> None:
    assert by_start(CLEAR, {"dynamic": Start(serving_s=3.0)}) == ["eager", "dynamic", "bucketed"]
    assert by_start(CLEAR, {}) == ["eager", "bucketed", "dynamic"]


def test_nothing_is_claimed_of_an_arm_that_was_let_go_after_one_start() -> None:
    once = Frontier(
        holdings=(*CLEAR.holdings, holding("padded", None, None, starts=1)),
        orders=(*CLEAR.orders, *(order(arm, "padded", surely=False, least=None) for arm in CLEAR.arms)),
        alpha=0.05,
    )
    left = [Left(arm="padded", reason="is seen to hold 2 requests/s where eager holds 9, and starts no sooner")]
    text = said(once, left=left)
    assert "bucketed: it surely holds more than every other arm that stayed in the search, 1.14 times or more." in text
    assert "padded left the search early: it is seen to hold 2 requests/s where eager holds 9" in text
    assert "Not told apart" not in text
    assert "padded at every load" not in text
    assert "it is open between bucketed and padded" in said(once), "who is still in the search is open"


def test_arms_that_were_never_tried_are_named() -> None:
    dropped = [Left(arm="compiled-padded", reason="no C++ compiler is here")]
    assert "compiled-padded was not tried: no C++ compiler is here." in said(CLEAR, dropped=dropped)


def test_an_arm_whose_weights_are_held_otherwise_is_named_where_its_answers_were_not_measured() -> None:
    why = {"bucketed": "its weights are held as float8-per-row (control: none), and nobody measured it."}
    line = "bucketed is not shown to answer as well: its weights are held as float8-per-row"
    assert line in said(CLEAR, unproven=why)
    assert line not in said(CLEAR, unproven=why, dropped=[Left(arm="bucketed", reason="it was not reached")])


def test_nothing_is_claimed_of_an_arm_that_a_check_forbids_to_believe() -> None:
    text = said(CLEAR, blocked={"dynamic": ["comparable", "parity"]})
    assert "Nothing is known of dynamic, for comparable, parity: see the checks." in text
    assert "every other arm that stayed in the search" in text
    assert "dynamic costs" not in text


def test_what_is_said_of_disturbed_machines_says_so() -> None:
    last = said(CLEAR, disturbed=["bed drift", "busy host"]).split("\n")[-1]
    assert last == (
        "What is said of loads is of machines that were disturbed (bed drift, busy host: see the checks). Left alone "
        "it would be true all at once, but for a chance of 5 %."
    )


def test_an_arm_that_fails_its_gates_is_not_one_to_ship() -> None:
    best = CLEAR.highest
    assert best is not None
    assert best in {item.pick for item in load_ranges(CLEAR, STARTS)}
    assert best not in {item.pick for item in load_ranges(CLEAR, STARTS, failed=[best])}
    text = " ".join(answer(CLEAR, objective="p99 TTFT ≤ 500 ms", starts=STARTS, verdicts={best: "FAIL"}))
    assert f"{best} surely holds more than every other arm" in text
    assert "and is FAIL by its gates: it is not one to ship." in text
