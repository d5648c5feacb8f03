"""Times of lines, of clocks whose zone and error nobody knows."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from loadtests.external.line_clock import LineClock

SECOND = 10**9


def ns(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1e6) * 1000


NOON = ns("2026-11-25T12:00:00")


@pytest.mark.parametrize(
    "head",
    [
        "(EngineCore pid=7) INFO 11-25 {clock} [x.py:1] ",
        "[2026-11-25 {clock} TP0] ",
        "V1125 {clock}.000000 1506 torch/_dynamo/guards.py:5396] [0/4] ",
        "2026-11-25T{clock}.000000000Z (EngineCore pid=7) INFO 03-04 01:02:03 [x.py:1] ",
        "2026-11-25T{clock}+02:00 ",
        '{{"asctime": "2026-11-25 {clock},000", "message": "',
    ],
)
@pytest.mark.parametrize("zone_h", [0, -8, 5])
def test_a_line_that_came_late_was_written_when_it_says(head: str, zone_h: int) -> None:
    clock = LineClock()
    away = zone_h * 3600 * SECOND  # by which the server's clock differs from this host's
    arrived = NOON + away + 20_000_000
    assert clock.moment(head.format(clock="12:00:00") + "first", arrived) == arrived
    late = clock.moment(head.format(clock="12:00:10") + "late", NOON + away + 17 * SECOND)
    assert 0 <= late - (NOON + away + 10 * SECOND) <= 1.1 * SECOND


def test_a_line_that_came_in_time_was_written_when_it_came() -> None:
    # Rounded down to a second its own time is the worse of the two.
    clock = LineClock()
    for second, part in ((0, 900), (1, 100), (2, 500)):
        arrived = NOON + second * SECOND + part * 1_000_000
        assert clock.moment(f"INFO 11-25 12:00:0{second} [x.py:1] ", arrived) == arrived


def test_a_line_without_a_time_was_written_when_it_came() -> None:
    assert LineClock().moment("finished after 1.23s,", NOON) == NOON
    assert LineClock().moment("INFO 02-30 12:00:00 [x.py:1] ", NOON) == NOON


def test_the_year_is_the_one_that_fits() -> None:
    clock = LineClock()
    eve = ns("2026-12-31T23:59:59")
    assert clock.moment("INFO 12-31 23:59:59 [x.py:1] ", eve) == eve
    assert clock.moment("INFO 12-31 23:59:59 [x.py:1] ", eve + 5 * SECOND) == eve + SECOND
    assert clock.moment("INFO 01-01 00:00:09 [x.py:1] ", eve + 10 * SECOND) == eve + 10 * SECOND


def test_a_clock_that_was_set_back_is_learnt_anew() -> None:
    clock = LineClock()
    clock.moment("INFO 10-25 02:59:59 [x.py:1] ", NOON)
    assert clock.moment("INFO 10-25 02:00:00 [x.py:1] ", NOON + SECOND) == NOON + SECOND


def test_the_history_of_a_log_was_before_its_newest_line() -> None:
    clock = LineClock()
    history = [f"INFO 11-25 {hour:02}:00:00 [x.py:1] " for hour in range(6, 12)]  # all printed at once
    for line in history:
        clock.learn(line, NOON)
    hours_before = [round((NOON - clock.moment(line, NOON)) / 3600 / SECOND) for line in history]
    assert hours_before == [5, 4, 3, 2, 1, 0]
    assert clock.moment("INFO 11-25 12:00:01 [x.py:1] ", NOON + SECOND + 5) == NOON + SECOND + 5
