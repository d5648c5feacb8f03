"""The answer in words, and the ranges of load behind it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.foresight.costs import Span, Start
from analysis.frontier.answer import answer, by_start, load_ranges
from analysis.frontier.holdings import Frontier, Holding, Order, frontier_of
from analysis.frontier.latencies import StepLatency, drawn_target, latency_at_one_load, step_latencies
from analysis.frontier.load_costs import LoadCost, load_costs, shown_loads
from analysis.frontier.search import Left
from analysis.frontier.step_times import FEWEST, StepCell, octave, span, step_cells, turning_points
from analysis.judging.load_steps import Step, bracket
from analysis.records.run_records import read_run
from analysis.records.schemas import STEPS
from analysis.records.tables import RecordWriter
from analysis.report.charts import chart_data
from analysis.report.frontier import costly, latencies, step_times, step_turns
from analysis.run.run import Run
from analysis.settings.rollout import Rollout
from analysis.summary.summary import analyze
from tests.analysis.frontier.steps import steady, step
from tests.analysis.judging.test_load_steps import START, write_search
from tests.fakes.runs import FakeRun, write_run

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


KNEES_LATENCIES = {"eager": 17.0, "new": 33.0}
RATES = [[8, 16, 18, 32, 64], [8, 14, 18, 30, 36]]


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_search(tmp_path_factory.mktemp("latencies") / "run", KNEES_LATENCIES, RATES)


def test_the_quantile_of_every_step_lies_within_its_interval(searched: Path) -> None:
    run = Run.of(read_run(searched))
    target = drawn_target(run)
    assert target is not None
    assert target.key == "p90_ttft_ms"
    steps = step_latencies(run, target)
    assert len(steps) == len(KNEES_LATENCIES) * sum(map(len, RATES))
    for one in steps:
        assert one.ms == pytest.approx(50.0 if one.rate <= KNEES_LATENCIES[one.arm] else 1000.0)
        assert one.low_ms is None or one.low_ms <= one.ms
        assert one.high_ms is None or one.ms <= one.high_ms
        assert one.compiles == 0


def test_a_search_by_goodput_alone_has_no_quantile_to_draw(tmp_path: Path) -> None:
    limits = "[goodput]\nttft = 500\nattainment_pct = 90\n"
    run = Run.of(read_run(write_search(tmp_path / "run", KNEES_LATENCIES, RATES[:1], limits=limits)))
    assert drawn_target(run) is None


def test_the_charts_have_steps_limits_and_costs(searched: Path) -> None:
    summary = analyze(searched)
    assert latencies(summary) == "p90 TTFT"
    assert costly(summary)
    knees: dict[str, Any] = chart_data(summary)["knees"]
    assert (knees["label"], knees["limit_ms"]) == ("p90 TTFT", 500)
    assert {step["arm"] for step in knees["steps"]} == {0, 1}
    assert {cost["arm"] for cost in knees["costs"]} == {0, 1}
    assert all(cost["low"] <= cost["seen"] for cost in knees["costs"] if cost["low"] is not None)


def test_a_run_without_a_search_draws_nothing(tmp_path: Path) -> None:
    plain = analyze(write_run(tmp_path, FakeRun(duration_s=60, trials=2, rate=2, gates={"draws": 99})))
    assert latencies(plain) == ""
    assert chart_data(plain)["knees"] == {}


def tried(arm: str, trial: int, rate: float, ms: float) -> StepLatency:
    return StepLatency(
        arm=arm, trial=trial, rate=rate, ms=ms, low_ms=None, high_ms=None, requests=100, compiles=0, compile_s=0.0
    )


def test_arms_are_seen_at_the_highest_load_that_the_control_and_another_one_had() -> None:
    steps = [
        *(tried("eager", 1, 2.0, 280), tried("eager", 2, 2.04, 300), tried("eager", 2, 2.9, 400)),
        *(tried("new", 3, 2.0, 100), tried("new", 3, 8.0, 200), tried("late", 4, 8.0, 90)),
    ]
    found = latency_at_one_load(steps, ("eager", "new", "late"), 3.0)
    assert found is not None, "nobody else was tried at 2.9"
    assert (found.rate, found.ms) == (2.04, {"eager": 290, "new": 100})
    assert found.starts == {"eager": 2, "new": 1}
    assert latency_at_one_load(steps, ("eager", "late"), 3.0) is None
    assert latency_at_one_load(steps, ("eager", "new"), 1.0) is None


def test_the_answer_says_what_requests_wait_where_the_control_holds_the_load(searched: Path) -> None:
    summary = analyze(searched)
    assert "As seen at 16 requests/s (one start each), p90 TTFT is 50 ms on eager and 50 ms on new." in " ".join(
        summary["frontier"]["answer"]
    )


def test_an_arm_that_the_answer_leaves_out_is_not_seen_either() -> None:
    frontier = Frontier(
        holdings=tuple(holding(arm, 2.0, 8.0) for arm in ("eager", "new", "late")), orders=(), alpha=0.05
    )
    steps = [tried(arm, 1, 2.0, ms) for arm, ms in (("eager", 280), ("new", 100), ("late", 90))]
    seen = "As seen at 2 requests/s (one start each), p99 TTFT is 280 ms on eager and 100 ms on new."
    dropped = [Left(arm="late", reason="no trial of it was recorded")]
    assert seen in answer(frontier, objective="", starts={}, dropped=dropped, latencies=steps, label="p99 TTFT")


TOKENS = {"eager": 100.0, "bucketed": 100.0, "dynamic": None}


def costs(load: float, **more: object) -> dict[str, LoadCost]:
    rows = load_costs(CLEAR, [load], rollout=Rollout(**more), tokens=TOKENS)  # type: ignore[arg-type]
    return {row.arm: row for row in rows}


def test_gpus_follow_from_the_ends_of_the_intervals() -> None:
    found = costs(200.0, gpus_per_replica=2)
    assert found["eager"].gpus == Span(low=40.0, seen=46.0, high=46.0)
    assert found["bucketed"].gpus == Span(low=10.0, seen=10.0, high=10.0)


def test_tokens_cost_the_gpus_that_carry_the_load_busy_or_not() -> None:
    found = costs(200.0, gpu_hour_price=3.6)
    assert found["eager"].token_gpu_s.seen == pytest.approx(23 / 200 / 100 * 1e6)
    assert found["eager"].token_price.seen == pytest.approx(23 / 200 / 100 * 1e6 * 3.6 / 3600)
    assert found["dynamic"].token_gpu_s == Span(), "an arm that counts no tokens has no cost of one"
    assert costs(200.0)["eager"].token_price == Span()


def test_the_fewest_gpus_are_named_only_where_no_other_arm_may_need_as_few() -> None:
    assert [arm for arm, row in costs(1000.0).items() if row.surely_fewest] == ["bucketed"]
    assert not any(row.surely_fewest for row in costs(5.0).values()), "one replica of any arm carries it"


def test_the_load_of_the_rollout_is_shown_alone() -> None:
    assert shown_loads(CLEAR, Rollout(load_rps=200.0)) == [200.0]
    loads = shown_loads(CLEAR, Rollout())
    assert loads[0] < 9.0
    assert loads[-1] > 41.0 * 32
    assert loads == sorted(set(loads))
    assert shown_loads(frontier_of([], ["eager", "new"]), Rollout()) == []


SECOND, MS = 1_000_000_000, 1_000_000
# (kind, batch, tokens, ms of eager, ms of new)
STEP_MS = [
    ("prefill", 1, 30, 4.0, 6.0),
    ("prefill", 2, 200, 9.0, 5.0),
    ("decode", 1, 1, 3.0, 1.0),
    ("decode", 6, 6, 3.5, 2.0),
]


def write_steps(folder: Path, count: int = FEWEST) -> Path:
    write_search(folder, {"eager": 17.0, "new": 33.0}, [[8, 16, 32], [8, 16, 32]])
    with RecordWriter(folder / "trial-01" / "steps.arrow", STEPS) as writer:
        for number in range(count):
            for kind, batch, tokens, *each in STEP_MS:
                for arm, ms in zip(("eager", "new"), each, strict=True):
                    start = START + 1001 * SECOND + number * SECOND
                    writer.append(
                        {
                            **{"trial": 1, "arm": arm, "replica": f"{arm}-0", "step_id": number, "kind": kind},
                            **{"start_ns": start, "end_ns": start + int(ms * MS), "batch": batch, "tokens": tokens},
                            **{"padded_batch": 8, "padded_tokens": 8 * tokens, "compiled": arm == "new"},
                        }
                    )
    return folder


def test_a_cell_holds_the_median_of_each_arm(tmp_path: Path) -> None:
    cells = step_cells(Run.of(read_run(write_steps(tmp_path / "run"))))
    assert [(cell.kind, cell.batch, cell.length) for cell in cells] == [
        ("prefill", (1, 1), (17, 32)),
        ("prefill", (2, 2), (65, 128)),
        ("decode", (1, 1), (1, 1)),
        ("decode", (5, 8), (1, 1)),
    ]
    for cell, (_, _, _, eager, new) in zip(cells, STEP_MS, strict=True):
        assert cell.ms == {"eager": pytest.approx(eager), "new": pytest.approx(new)}
        assert cell.ratio("new", "eager") == pytest.approx(new / eager)


def test_too_few_steps_show_nothing(tmp_path: Path) -> None:
    assert step_cells(Run.of(read_run(write_steps(tmp_path / "run", FEWEST - 1)))) == []


def test_the_report_says_where_the_gain_turns(tmp_path: Path) -> None:
    summary = analyze(write_steps(tmp_path / "run"))
    assert step_turns(summary) == [
        "The prefill steps of new are shorter than eager's at 2 × 65–128, and longer at 1 × 17–32.",
        "The decode steps of new are shorter than eager's in every cell.",
    ]
    first, *_ = step_times(summary).rows
    assert first["Step"] == "prefill"
    assert first["new"].startswith("×1.5")


def cell(batch: int, eager: float, new: float | None) -> StepCell:
    ms = {"eager": eager} | ({} if new is None else {"new": new})
    return StepCell(kind="decode", batch=(batch, batch), length=(1, 1), ms=ms, steps=dict.fromkeys(ms, 9))


def test_medians_that_are_close_count_as_neither() -> None:
    assert turning_points([cell(1, 2.0, 1.0), cell(2, 2.0, 2.05)], "new", "eager") == [
        "The decode steps of new are nowhere longer than eager's."
    ]
    assert turning_points([cell(1, 2.0, 2.5), cell(2, 2.0, 2.05)], "new", "eager") == [
        "The decode steps of new are nowhere shorter than eager's."
    ]
    assert turning_points([cell(1, 2.0, None)], "new", "eager") == []


@given(st.integers(1, 1 << 20))
def test_every_size_lies_in_its_octave(size: int) -> None:
    (top,) = octave(np.array([size])).tolist()
    assert top // 2 + 1 <= size <= top
    assert span((top // 2 + 1, top)).endswith(str(top))
