from __future__ import annotations

from loadtests.trials.telemetry import Restart
from loadtests.trials.users_trial import counted_since, is_known


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


def test_a_new_process_that_nobody_missed_is_a_death_of_its_own() -> None:
    second = 1_000_000_000
    restart = Restart(replica="eager-0", before_ns=10 * second, serving_ns=100 * second)
    missed = {"arm": "eager", "replica": "eager-0", "at_ns": 99 * second}
    assert not is_known(restart, [])
    assert is_known(restart, [missed])
    assert is_known(restart, [missed | {"at_ns": 101 * second}])  # missed twice before it was seen to serve
    assert not is_known(restart, [missed | {"at_ns": 9 * second}])  # the death before
    assert not is_known(restart, [missed | {"replica": "eager-1"}])
