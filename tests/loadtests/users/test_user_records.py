from __future__ import annotations

import pytest

from loadtests.users.user_records import place_of, request_id


def test_an_id_says_where_the_request_ended_in_the_log() -> None:
    assert place_of(request_id(2, 4711)) == (2, 4711)


@pytest.mark.parametrize("identity", ["", "user-", "user-1", "user-x-3", "1-7", "user-1-3-4"])
def test_another_id_says_nothing(identity: str) -> None:
    assert place_of(identity) is None


def test_digits_beyond_any_file_are_no_id() -> None:
    assert place_of(f"user-1-{'1' * 5000}") is None
    assert place_of("user-1-²") is None
