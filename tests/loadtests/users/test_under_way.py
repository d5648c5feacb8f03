from __future__ import annotations

from loadtests.users.under_way import UnderWay

S = 1_000_000_000


def test_what_is_settled_waits_for_the_oldest_request_that_is_under_way() -> None:
    under_way = UnderWay(longest_ns=60 * S)
    assert under_way.settled_ns(100 * S) == 98 * S, "lines may be late"
    under_way.begun(50 * S, 1, "eager")
    under_way.begun(70 * S, 1, "eager")
    assert under_way.settled_ns(100 * S) == 50 * S
    under_way.ended(50 * S, 1, "eager")
    assert under_way.settled_ns(100 * S) == 70 * S
    under_way.ended(70 * S, 2, "eager")
    assert len(under_way) == 1, "of another connection"
    under_way.ended(70 * S, 1, "eager")
    assert under_way.settled_ns(100 * S) == 98 * S


def test_a_request_that_takes_too_long_is_not_waited_for() -> None:
    under_way = UnderWay(longest_ns=60 * S, known=[[30 * S, 1, ""]])
    assert under_way.settled_ns(80 * S) == 30 * S
    assert under_way.settled_ns(95 * S) == 93 * S


def test_two_of_the_same_instant_and_connection_both_count() -> None:
    under_way = UnderWay(longest_ns=60 * S)
    for _ in range(2):
        under_way.begun(50 * S, 1, "eager")
    under_way.ended(50 * S, 1, "eager")
    assert under_way.starts() == [[50 * S, 1, "eager"]]
    assert under_way.lost() == 1
    assert len(under_way) == 0


def test_it_is_known_at_which_arm_they_are() -> None:
    under_way = UnderWay(longest_ns=60 * S)
    for arm in ("eager", "compiled", "compiled"):
        under_way.begun(50 * S, 1, arm)
    under_way.begun(60 * S, 1, "compiled")
    assert (under_way.at("eager"), under_way.at("compiled"), under_way.at("compiled", until_ns=60 * S)) == (1, 3, 2)
    under_way.ended(50 * S, 1, "compiled")
    under_way.ended(50 * S, 1, "")  # its line does not say where it was
    assert under_way.at("eager") + under_way.at("compiled") == 2
