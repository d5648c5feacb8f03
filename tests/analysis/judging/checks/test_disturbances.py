"""What several disturbances of one place come to."""

from __future__ import annotations

from analysis.judging.checks.disturbances import LEVER, Aspect, Disturbance, checks_of, gathered

ASPECT = Aspect(check="bed drift", sound="All was well.", remedy="Mend it.")
ARMS = ("eager", "compiled")


def disturbance(*, value: float, shift: float | None, trial: int = 1, place: str = "cuda:1") -> Disturbance:
    return Disturbance(
        aspect=ASPECT, place=place, trial=trial, arms=("compiled",), value=value, limit=0.05, shift=shift, text="so"
    )


def shift_of(*found: Disturbance) -> float | None:
    (check,) = checks_of(ASPECT, gathered(found, "eager"), ARMS)
    return check.shift


def test_the_largest_change_of_a_place_counts_and_not_that_of_the_longest_trouble() -> None:
    assert shift_of(disturbance(value=0.6, shift=0.1), disturbance(value=0.5, shift=0.4, trial=2)) == LEVER * 0.4


def test_what_nobody_knows_the_weight_of_is_not_hidden_by_what_is_known() -> None:
    assert shift_of(disturbance(value=0.9, shift=0.1), disturbance(value=0.3, shift=None, trial=2)) is None
    assert shift_of(disturbance(value=0.9, shift=0.1), disturbance(value=0.3, shift=None, place="cuda:0")) is None


def test_changes_of_two_places_add_up() -> None:
    both = shift_of(disturbance(value=0.6, shift=0.1), disturbance(value=0.5, shift=0.2, place="host"))
    assert both == LEVER * (0.1 + 0.2)
