from __future__ import annotations

from analysis.records.schemas import REQUESTS
from loadtests.generator.record import _TRAILERS, SERVED_COLUMNS, RequestRecord, _figures
from servers.metadata import trailing_key


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
