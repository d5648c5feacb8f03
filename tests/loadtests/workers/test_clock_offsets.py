"""Clocks of two hosts, compared by messages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loadtests.workers.clock_offsets import ClockComparison, Exchange, clock_identity, host_identity
from servers.clock import ANCHOR_NS

MS = 1_000_000
SECOND = 1_000_000_000


def exchange(*, at_ns: int, offset_ns: int, there_ns: int, thought_ns: int, back_ns: int) -> Exchange:
    received = at_ns + there_ns + offset_ns
    return Exchange(at_ns, received, received + thought_ns, at_ns + there_ns + thought_ns + back_ns)


times = st.integers(0, 500 * MS)


@given(offset=st.integers(-(10**18), 10**18), there=times, thought=times, back=times)
def test_the_true_offset_lies_within_the_uncertainty_however_lopsided_the_way(
    offset: int, there: int, thought: int, back: int
) -> None:
    clock = ClockComparison()
    clock.add(exchange(at_ns=10**18, offset_ns=offset, there_ns=there, thought_ns=thought, back_ns=back))
    found, uncertainty = clock.at(10**18 + there + thought + back)
    assert abs(found - offset) <= uncertainty + 1  # a nanosecond for rounding
    assert uncertainty == (there + back) // 2


@given(st.lists(st.tuples(times, times), min_size=1, max_size=100), st.integers(-50, 50))
def test_clocks_that_drift_are_followed(ways: list[tuple[int, int]], ppm: int) -> None:
    clock = ClockComparison()
    for second, (there, back) in enumerate(ways):
        at = second * SECOND
        clock.add(exchange(at_ns=at, offset_ns=at * ppm // 10**6, there_ns=there, thought_ns=0, back_ns=back))
        now = at + there + back
        found, uncertainty = clock.at(now)
        assert abs(found - now * ppm // 10**6) <= uncertainty + 200_000  # what drifts within one exchange


def test_the_fastest_exchange_is_trusted_until_it_is_old() -> None:
    clock = ClockComparison()
    clock.add(exchange(at_ns=0, offset_ns=5, there_ns=MS, thought_ns=0, back_ns=MS))
    clock.add(exchange(at_ns=SECOND, offset_ns=7, there_ns=9 * MS, thought_ns=0, back_ns=9 * MS))
    assert clock.at(SECOND)[0] == 5
    later = 600 * SECOND
    clock.add(exchange(at_ns=later, offset_ns=7, there_ns=9 * MS, thought_ns=0, back_ns=9 * MS))
    assert clock.at(later)[0] == 7
    assert clock.worst_ns == 0  # nothing was recorded with it
    clock.map_at(later + SECOND)
    assert clock.summary(later)["worst_uncertainty_ns"] == clock.worst_ns > 9 * MS


def test_an_exchange_in_which_time_went_back_is_not_believed() -> None:
    clock = ClockComparison()
    clock.add(Exchange(sent_ns=100, received_ns=0, answered_ns=0, back_ns=50))
    assert clock.summary(0)["exchanges"] == 0
    assert clock.at(0) == (0, 0)


def test_one_clock_is_not_compared() -> None:
    clock = ClockComparison()
    clock.same()
    clock.add(exchange(at_ns=0, offset_ns=5, there_ns=MS, thought_ns=0, back_ns=MS))
    assert clock.summary(0)["exchanges"] == 1
    assert clock.map_at(10**18) == (0, 0)
    assert clock.summary(0)["same"] is True


def test_processes_of_one_kernel_with_one_anchor_have_one_clock() -> None:
    assert clock_identity() == (f"{host_identity()}/{ANCHOR_NS}" if host_identity() else "")
