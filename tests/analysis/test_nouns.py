"""How a count reads with its noun."""

import pytest

from analysis.nouns import counted


@pytest.mark.parametrize(
    ("number", "noun", "shown"),
    [
        (0, "stall", "0 stalls"),
        (1, "stall", "1 stall"),
        (12345, "stall", "12345 stalls"),
        (1.0, "request", "1 request"),
        (8.0, "request", "8 requests"),
        (2.5, "request", "2.5 requests"),
        (1, "process", "1 process"),
        (2, "process", "2 processes"),
        (2, "entry", "2 entries"),
        (2, "day", "2 days"),
    ],
)
def test_one_is_singular_and_all_else_plural(number: float, noun: str, shown: str) -> None:
    assert counted(number, noun) == shown


def test_the_number_that_is_shown_decides() -> None:
    assert counted(12345, "request", "{:,}".format) == "12,345 requests"
    assert counted(1.02, "minute", "{:.2g}".format) == "1 minute"
    assert counted(None, "shape", lambda value: "–" if value is None else str(value)) == "– shapes"
