from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from analysis.records.schemas import REQUESTS
from loadtests.generator.record import _TRAILERS, SERVED_COLUMNS, RequestRecord, _figures, record_of
from servers.metadata import ARM_HEADER, trailing_key


def test_every_column_of_the_schema_is_measured_here_or_by_the_server() -> None:
    assert sorted([*RequestRecord._fields, *SERVED_COLUMNS]) == sorted([*REQUESTS.names, "served"])


def test_what_the_server_measures_is_a_whole_number() -> None:
    assert {str(REQUESTS.field(name).type) for name in SERVED_COLUMNS} <= {"int32", "int64"}


def test_no_text_is_too_long_to_be_no_number() -> None:
    assert _figures({_TRAILERS[0]: "1" * 5000, _TRAILERS[1]: "-7", _TRAILERS[2]: "²"})[:3] == [None, -7, None]


def test_a_server_that_leaves_figures_out_is_heard_on_the_others() -> None:
    places = [_TRAILERS.index(trailing_key(name)) for name in ("recv_ns", "end_ns")]
    figures = _figures({trailing_key("recv_ns"): "1795658587999068231"})
    assert [figures[place] for place in places] == [1795658587999068231, None]


@pytest.mark.parametrize(
    ("pinned", "routed", "said", "arm", "error"),
    [
        ("new", "new", "new", "new", None),
        ("new", "", "eager", "new", 'pinned to arm "new" but arm "eager" answered: check the routes'),
        (None, "new", "new", "new", None),
        (None, "new", "", "new", None),
        (None, "", "new", "new", None),
        (None, "new", "eager", "new", 'routed to arm "new" but arm "eager" answered: check the routes'),
    ],
)
def test_an_answer_counts_for_the_arm_that_it_was_sent_to(
    pinned: str | None, routed: str, said: str, arm: str, error: str | None
) -> None:
    plan = SimpleNamespace(session_id="s", turn=0, prompt_tokens=3, max_tokens=1, phase="")
    copy: Any = SimpleNamespace(arm=pinned, plan=plan, request_id="1", pair_id="1", lane=None, scheduled_ns=0)
    call: Any = SimpleNamespace(status="OK", error="", sent_ns=1, first_token_ns=2, output_tokens=1, token_ns=b"")
    call.initial_metadata = {ARM_HEADER: routed} if routed else {}
    call.trailing_metadata = {trailing_key("arm"): said} if said else {}
    record = record_of(call, copy, 1, 3)
    assert (record.arm, record.error) == (arm, error)
