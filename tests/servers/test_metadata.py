from __future__ import annotations

import pytest

from servers.metadata import trailing_key, whole_number


def test_trailing_metadata_have_keys_of_the_wire() -> None:
    assert trailing_key("queue_ns") == "tailgate-queue-ns"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("-7", -7),
        ("1795658587999068231", 1795658587999068231),  # a time of today has 19 digits
        (str(2**63 - 1), 2**63 - 1),
        (str(-(2**63)), -(2**63)),
        (str(2**63), None),
        ("1" * 5000, None),
        ("²", None),
        ("1_0", None),
        (" 1", None),
        ("", None),
        (None, None),
    ],
)
def test_a_whole_number_is_one_that_a_column_holds(text: str | None, value: int | None) -> None:
    assert whole_number(text) == value
