"""What a frontier promises on servers whose knees are known: its errors, and how often it names the best arm."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.simulation.table import Table
from tailgate.analysis.arrays import Floats
from tailgate.analysis.frontier.holdings import Frontier, frontier_of
from tailgate.analysis.frontier.search import Budget, Left, Turn, first_turns, next_round
from tailgate.analysis.judging.load_steps import Step, holding_of
from tailgate.loadtests.trials.rate_search import next_rates

ALPHA = 0.05
LOW, HIGH = 2.0, 64.0  # of the staircase
BUDGET = Budget(total_s=3 * 3600.0, step_s=30.0, around_s=20.0)

# Knees in requests/s, the control first, and what each takes to start.
FIFTHS = {"eager": 10.0, "padded": 12.0, "dynamic": 14.4, "bucketed": 17.28}
EQUAL = dict.fromkeys(FIFTHS, 10.0)
TWINS = {"eager": 10.0, "padded": 10.0, "dynamic": 25.0, "bucketed": 25.0}
START_S = {"eager": 5.0, "padded": 40.0, "dynamic": 60.0, "bucketed": 110.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How servers waver: their knee from step to step, with every start, and after a step that was missed.

    `spread` and `start_spread` are standard deviations in log rate. `drag`: by how much the queue of a missed step
    lowers what is held of the next. `tails`: whether the noise of steps is Student's t of 3 degrees of freedom.
    """

    spread: float = 0.05
    start_spread: float = 0.01
    drag: float = 0.0
    tails: bool = False


KINDS = {
    "steady": Kind(),
    "noisy": Kind(spread=0.15, start_spread=0.02),
    "lucky starts": Kind(start_spread=0.06),
    "dragging": Kind(spread=0.1, start_spread=0.02, drag=0.1),
    "long tails": Kind(spread=0.08, start_spread=0.02, tails=True),
}


def search(knees: Mapping[str, float], kind: Kind, seed: int, *, budget: Budget) -> tuple[Frontier, float]:
    """Search servers with these knees as `tailgate frontier` does: a first start of each, then rounds.

    Return what it says, and the seconds that it took.
    """
    rng = np.random.default_rng([seed, 13])
    arms = list(knees)
    steps: list[Step] = []
    left: list[Left] = []
    spent_s, trial = 0.0, 0

    def take(turns: Sequence[Turn]) -> None:
        nonlocal spent_s, trial, steps
        for turn in turns:
            trial += 1
            rates = next_rates([turn.arm], steps, turn.steps, low=LOW, high=HIGH)
            steps += _one_start(turn.arm, knees[turn.arm], rates, kind, trial, rng)
            spent_s += budget.turn_s(turn.steps, START_S[turn.arm])

    take(first_turns(arms, START_S, budget))
    for number in itertools.count(1):
        frontier = frontier_of(steps, arms, alpha=ALPHA)
        decided = next_round(frontier, start_s=START_S, budget=budget, spent_s=spent_s, number=number, before=left)
        left += decided.left
        if decided.stop:
            return frontier, spent_s
        take(decided.turns)
    raise AssertionError("a search ends")


def _one_start(
    arm: str, knee: float, rates: tuple[float, ...], kind: Kind, trial: int, rng: np.random.Generator
) -> list[Step]:
    noise = rng.standard_t(3.0, len(rates)) if kind.tails else rng.standard_normal(len(rates))
    limits = math.log(knee) + kind.start_spread * rng.standard_normal() + kind.spread * noise
    steps: list[Step] = []
    for rate, limit in zip(rates, limits.tolist(), strict=True):
        dragged = kind.drag if steps and steps[-1].held == "missed" else 0.0
        held = math.log(rate) <= limit - dragged
        steps.append(
            Step(
                arm=arm,
                trial=trial,
                rate=rate,
                requests=100,
                good=100 if held else 50,
                held="held" if held else "missed",
                reason="",
            )
        )
    return steps


def wrong(frontier: Frontier, knees: Mapping[str, float]) -> bool:
    """Return whether any statement is false: on the load that an arm holds, or on which of two holds more."""
    of_loads = any(
        (item.low_rps is not None and item.low_rps > knees[item.arm])
        or (item.high_rps is not None and item.high_rps < knees[item.arm])
        for item in frontier.holdings
    )
    return of_loads or any(order.surely and knees[order.more] <= knees[order.less] for order in frontier.orders)


def promise(knees: Mapping[str, float], kind: Kind, seed: int, *, budget: Budget = BUDGET) -> Floats:
    """Return (any statement false, the arm that holds most named, share of the budget taken)."""
    frontier, spent_s = search(knees, kind, seed, budget=budget)
    highest = max(knees, key=lambda arm: knees[arm])
    return np.array([wrong(frontier, knees), frontier.highest() == highest, spent_s / budget.total_s], dtype=np.float64)


def inside(kind: Kind, starts: int, seed: int) -> Floats:
    """Return whether the 95 % interval of one arm holds its knee: a staircase, then more starts around what is open."""
    rng = np.random.default_rng([seed, 17])
    knee = float(np.exp(rng.uniform(np.log(4.0), np.log(30.0))))
    steps: list[Step] = []
    for trial in range(1, starts + 1):
        rates = next_rates(["arm"], steps, 8, low=LOW, high=HIGH)
        steps += _one_start("arm", knee, rates, kind, trial, rng)
    shown = holding_of("arm", steps)
    return np.array([(shown.low_rps or 0.0) <= knee <= (shown.high_rps or math.inf)], dtype=np.float64)


def frontiers_table(table: Table) -> None:
    """Add all rows."""
    for name, kind in KINDS.items():
        for starts in (2, 4):
            (share,) = table.means(partial(inside, kind, starts))
            table.add(f"95 % interval of a knee holds the truth, {name}, {starts} starts", share, least=0.92)
    for name, kind in KINDS.items():
        for label, knees in (("equal", EQUAL), ("two pairs of twins", TWINS), ("20 % apart", FIFTHS)):
            shares = table.means(partial(promise, knees, kind))
            table.add(f"frontier: any statement false, {name}, {label}", shares[0], most=0.08)
            if knees is FIFTHS:
                # What the budget is enough for; the others are shown.
                least = 0.8 if name == "steady" else None
                table.add(f"frontier: the arm that holds most is named, {name}, {label}", shares[1], least=least)
            table.add(f"  share of the budget, {name}, {label}", shares[2], most=1.0)
