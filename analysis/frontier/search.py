"""Which arm is started next, and how long: a search that keeps to a budget of time.

The budget is shared out over rounds, and each round over the arms that are still in the search. An arm leaves when it
surely holds less than another (successive elimination), or held no step where the control did. The control never
leaves. An arm whose knee is known closely enough, and that is ordered against all others in the search, gets no more.
Once that is so of all, the search ends. Before the first round every arm has one start.

The same steps and the same budget give the same decision.

Source: Even-Dar, E., Mannor, S. and Mansour, Y. (2006). Action elimination and stopping conditions for the multi-armed
    bandit and reinforcement learning problems. Journal of Machine Learning Research 7, 1079-1105.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tailgate.analysis.frontier.holdings import Frontier
from tailgate.analysis.judging.load_steps import FEWEST_STARTS, Holding
from tailgate.analysis.wording import digits, duration_text

FEWEST_STEPS = 3  # of a start: one surely held, one near the knee, one missed
_MOST_ROUNDS = 8
_RESOLUTION = 0.15  # a knee is known closely enough when the far end of its interval is this much above the near one


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """`total_s` for the whole search. A start costs `around_s` more than its steps and its warm-up: splitter, ramp-up,
    stopping. It takes `steps` steps of `step_s` at most."""

    total_s: float
    step_s: float
    steps: int = 8
    around_s: float = 0.0

    def turn_s(self, steps: int, start_s: float) -> float:
        """Return the seconds of a turn with so many steps of an arm that takes `start_s` to start."""
        return start_s + self.around_s + steps * self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One fresh start of an arm and how many steps it takes: around what its steps until then leave open."""

    arm: str
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """An arm that is not searched any more. `reason` goes on from its name: "did not start: out of memory"."""

    arm: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What is done next. `turns` come one after the other; there are none where `stop` says why the search ends."""

    turns: tuple[Turn, ...]
    left: tuple[Left, ...]
    stop: str = ""


def first_turns(arms: Sequence[str], start_s: Mapping[str, float], budget: Budget) -> tuple[Turn, ...]:
    """Return one start of every arm, the control first, with as many steps as leave half of the budget."""
    counts = range(budget.steps, FEWEST_STEPS, -1)
    half = budget.total_s / FEWEST_STARTS
    steps = next((count for count in counts if _all_s(start_s, count, budget) <= half), FEWEST_STEPS)
    return tuple(Turn(arm=arm, steps=steps) for arm in arms)


def fitted(turn: Turn, *, start_s: float, budget: Budget, left_s: float) -> Turn | None:
    """Shorten the turn to the steps that fit into the time left after a start; None if too few fit."""
    steps = min(turn.steps, _steps_in(left_s, start_s, budget))
    return Turn(arm=turn.arm, steps=steps) if steps >= FEWEST_STEPS else None


def _steps_in(seconds: float, start_s: float, budget: Budget) -> int:
    """Return how many steps fit into the seconds of one start."""
    return int((seconds - start_s - budget.around_s) / budget.step_s + 1e-9)


def _all_s(start_s: Mapping[str, float], steps: int, budget: Budget) -> float:
    """Return the seconds of one start of every arm with so many steps."""
    return sum(budget.turn_s(steps, seconds) for seconds in start_s.values())


def next_round(
    frontier: Frontier,
    *,
    start_s: Mapping[str, float],
    budget: Budget,
    spent_s: float,
    number: int,
    before: Sequence[Left] = (),
) -> Round:
    """Plan round `number` (from 1), after the steps of the earlier ones led to `frontier`.

    `start_s` is the time until each arm serves, measured or guessed; `before` are the arms that already left. The round
    never plans more time than is left.
    """
    gone = {item.arm for item in before}
    staying = [arm for arm in frontier.arms if arm not in gone]
    left = _leaving(frontier, staying)
    staying = [arm for arm in staying if arm not in {item.arm for item in left}]
    wanting = [arm for arm in staying if _open(frontier, arm, staying)]
    remaining_s = budget.total_s - spent_s
    if not wanting:
        return Round(turns=(), left=tuple(left), stop="the answer is decided")
    # A round has one whole start of every arm. What is over after the last goes on to the arms that are left.
    planned = int(budget.total_s / _all_s(start_s, budget.steps, budget))
    share_s = remaining_s / (max(number, FEWEST_STARTS, min(_MOST_ROUNDS, planned)) - number + 1)
    shares = (_turns(frontier, wanting, start_s, budget, seconds) for seconds in (share_s, remaining_s))
    turns: tuple[Turn, ...] = next(filter(None, shares), ())
    less = f"{duration_text(max(0.0, remaining_s))} were left, too little for another start"
    return Round(turns=turns, left=tuple(left), stop="" if turns else less)


def _leaving(frontier: Frontier, staying: Sequence[str]) -> list[Left]:
    """Return the arms to drop, and why: those that surely hold less than another arm still in the search, or held no
    step while the control held one. The control stays."""
    control = frontier.holdings[0]
    left = []
    for own in (frontier.of(arm) for arm in staying if arm != control.arm):
        above = [frontier.of(other) for other in staying if frontier.surely_more(other, own.arm)]
        if above:
            best = max(above, key=lambda other: other.seen_rps or 0.0)
            seen = f"{digits(own.seen_rps or 0.0)} against {digits(best.seen_rps or 0.0)} requests/s as seen"
            left.append(Left(arm=own.arm, reason=f"was dropped: it surely holds less than {best.arm} ({seen})"))
        elif own.seen_rps is None and own.steps >= FEWEST_STEPS and control.seen_rps is not None:
            reason = f"was dropped: it held none of {own.steps} steps, and {control.arm} held"
            left.append(Left(arm=own.arm, reason=f"{reason} {digits(control.seen_rps)} requests/s"))
    return left


def _open(frontier: Frontier, arm: str, staying: Sequence[str]) -> bool:
    """Return whether more steps of the arm could change an answer: its knee or its order is still open."""
    if _width(frontier.of(arm)) > 1.0 + _RESOLUTION:
        return True
    others = (other for other in staying if other != arm)
    return any(not frontier.surely_more(arm, other) and not frontier.surely_more(other, arm) for other in others)


def _width(holding: Holding) -> float:
    """Return how open an arm is: the factor between the ends of its interval."""
    return math.inf if not holding.low_rps or holding.high_rps is None else holding.high_rps / holding.low_rps


def _turns(
    frontier: Frontier,
    wanting: Sequence[str],
    start_s: Mapping[str, float],
    budget: Budget,
    share_s: float,
) -> tuple[Turn, ...]:
    """Return turns that take at most `share_s`; each arm has the same time, in one start or more.

    The most open arms come first, and of equally open ones those with the fewest starts. An arm of one start decides
    nothing, so that two short starts come before a long one.
    """
    ordered = sorted(wanting, key=lambda arm: (-_width(frontier.of(arm)), frontier.of(arm).starts))
    while ordered:
        each_s = share_s / len(ordered)
        if all(_steps_in(each_s, start_s[arm], budget) >= FEWEST_STEPS for arm in ordered):
            break
        ordered = ordered[:-1]
    turns = []
    for arm in ordered:
        starts = max(1, int(each_s / budget.turn_s(budget.steps, start_s[arm])))
        lacking = FEWEST_STARTS - frontier.of(arm).starts
        if lacking * budget.turn_s(FEWEST_STEPS, start_s[arm]) <= each_s:
            starts = max(starts, lacking)
        turns += [Turn(arm=arm, steps=min(budget.steps, _steps_in(each_s / starts, start_s[arm], budget)))] * starts
    return tuple(turns)
