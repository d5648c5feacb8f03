"""How figures read in reasons."""

import pytest

from analysis.judging.wording import digits, duration_text, percent


@pytest.mark.parametrize(
    ("value", "most", "shown"),
    [(119.3, 2, "119"), (99.4, 2, "99"), (99.6, 2, "100"), (4203.4, 3, "4,203"), (0.01234, 3, "0.0123"), (0.0, 3, "0")],
)
def test_large_numbers_are_no_powers_of_ten(value: float, most: int, shown: str) -> None:
    assert digits(value, most) == shown


def test_a_share_of_many_times_is_written_out() -> None:
    assert percent(123.456) == "12,346 %"


@pytest.mark.parametrize(
    ("seconds", "shown"), [(1, "1 second"), (90, "90 seconds"), (181, "4 minutes"), (12600, "3.5 hours")]
)
def test_a_length_of_time_is_in_the_unit_a_reader_thinks_in(seconds: float, shown: str) -> None:
    assert duration_text(seconds) == shown
