from __future__ import annotations

from loadtests.trials.users_trial import counted_since


def test_counts_are_those_since_the_first_snapshot() -> None:
    before, now = {"steps": 100, "requests": 7}, {"steps": 130, "requests": 9, "tokens": 4}
    assert counted_since(before, now) == {"steps": 30, "requests": 2, "tokens": 4}


def test_fewer_in_flight_than_at_first_are_no_new_start() -> None:
    assert counted_since({"steps": 100, "in_flight": 3}, {"steps": 130, "in_flight": 1}) == {
        "steps": 30,
        "in_flight": 1,
    }


def test_a_process_that_started_anew_counts_from_nothing() -> None:
    assert counted_since({"steps": 100, "requests": 9}, {"steps": 20, "requests": 10}) == {"steps": 20, "requests": 10}
