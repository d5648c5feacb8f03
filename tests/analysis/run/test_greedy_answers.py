"""What two arms answered, counted: equal answers, departures, and the pairs that four answers make."""

from __future__ import annotations

import pytest

from analysis.records.asked_answers import AskedAnswer, Twice
from analysis.run.greedy_answers import GreedyAnswers, greedy_answers


def answer(token: str, other: str = "z", *, log_prob: float = -0.1, its: float = -5.0, prompt: int = 0) -> AskedAnswer:
    """One token behind a first one that all share, and by how much another is less likely."""
    start = f"p{prompt}"
    return AskedAnswer(
        text=f"{start} {token}",
        asked=2,
        pieces=2,
        tokens=(start, f" {token}"),
        log_probs=(-0.5, log_prob),
        likeliest=({start: -0.5}, {f" {token}": log_prob, f" {other}": its}),
    )


def counted(control: str, arm: str, *, its: float = -5.0) -> GreedyAnswers:
    """`control` and `arm` are what each answers the first and the second time, a letter each."""

    def twice(letters: str) -> Twice:
        first, second = (answer(letter, "b" if letter == "a" else "a", its=its) for letter in letters)
        return (first,), (second,)

    return greedy_answers([twice(control)], [twice(arm)], near_tie=1.0)


@pytest.mark.parametrize(
    ("control", "arm", "same", "repeated", "swapped"),
    [
        ("aa", "aa", 1, 0, 0),
        ("aa", "bb", 0, 1, 0),  # each repeats itself and differs from the other
        ("ab", "ab", 1, 0, 1),  # they pair off by time
        ("ab", "ba", 0, 0, 1),  # crosswise
        ("aa", "ab", 1, 0, 0),
        ("ab", "aa", 1, 0, 0),
    ],
)
def test_four_answers_make_pairs_by_arm_or_otherwise(
    control: str, arm: str, same: int, repeated: int, swapped: int
) -> None:
    found = counted(control, arm)
    assert (found.same, found.repeated, found.swapped) == (same, repeated, swapped)
    assert found.held == (control == "aa")
    assert found.parted == (control == "aa" and "b" in arm)


def test_near_ties_are_no_departures_of_either_kind() -> None:
    found = counted("aa", "bb", its=-0.4)
    assert (found.same, found.ties, found.apart, found.repeated, found.parted) == (0, 1, 0, 0, 0)
    assert (found.departs, found.tokens, found.lead) == ((1,), 2, pytest.approx(0.6))


def test_log_probabilities_count_where_all_tell_them() -> None:
    told = ((answer("a"),), (answer("a"),))
    silent = ((AskedAnswer(text="p0 a", asked=2),), (AskedAnswer(text="p0 a", asked=2),))
    assert greedy_answers([told], [told], near_tie=1.0).told
    found = greedy_answers([told], [silent], near_tie=1.0)
    assert (found.told, found.same, found.shift) == (False, 1, None)


def test_trials_add_up_and_equal_answers_are_held_once() -> None:
    one = ((answer("a"), answer("a", prompt=1)), (answer("a"), answer("a", prompt=1)))
    found = greedy_answers([one, one], [one, one], near_tie=1.0)
    assert (found.prompts, found.answered, found.same, found.distinct, found.held) == (4, 4, 4, 2, 2)
    assert found.shift is not None
    assert (found.shift.mean, found.shift.high, found.shift.most) == (0.0, 0.0, 0.0)


def test_limits_of_the_shift_take_more_than_one_prompt() -> None:
    one, other = answer("a"), answer("a", log_prob=-0.3)
    single = greedy_answers([((one,), (one,))], [((other,), (other,))], near_tie=1.0)
    assert single.shift is not None
    assert (single.shift.mean, single.shift.low, single.shift.high) == (pytest.approx(0.1), None, None)
    assert single.shift.most == pytest.approx(0.2)


def test_nothing_asked_is_nothing_found() -> None:
    found = greedy_answers([], [], near_tie=1.0)
    assert (found.prompts, found.answered, found.low, found.lead, found.shift) == (0, 0, None, None, None)
