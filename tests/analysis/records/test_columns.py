import pyarrow as pa
import pytest

from analysis.records.columns import Columns

NAME = pa.dictionary(pa.int32(), pa.string())
SCHEMA = pa.schema([("at_ns", pa.int64()), ("name", NAME), ("text", pa.string()), ("times", pa.list_(pa.int64()))])


def piece(*rows):
    columns = zip(*rows, strict=True) if rows else ([], [], [], [])
    kinds = (pa.int64(), pa.string(), pa.string(), pa.list_(pa.int64()))
    at_ns, name, *rest = (pa.array(list(column), kind) for column, kind in zip(columns, kinds, strict=True))
    return pa.table([at_ns, name.dictionary_encode().cast(NAME), *rest], schema=SCHEMA)


ROWS = [(5, "b", "x", [1]), (None, None, None, None), (-7, "a", "", []), (2**62, "b", "y", [None])]


@pytest.mark.parametrize("expected", [0, 1, 4, 1000])
@pytest.mark.parametrize("cut", [0, 1, 2, 4])
def test_pieces_come_back_as_they_went_in_whatever_was_expected(cut, expected):
    columns = Columns(SCHEMA)
    columns.append(piece(*ROWS[:cut]), expected)
    columns.append(piece(*ROWS[cut:]), expected)
    assert columns.table().to_pylist() == piece(*ROWS).to_pylist()


def test_nothing_is_an_empty_table():
    assert Columns(SCHEMA).table().equals(SCHEMA.empty_table())


def test_numbers_and_shared_names_are_in_one_piece():
    columns = Columns(SCHEMA)
    for row in ROWS:
        columns.append(piece(row), len(ROWS))
    table = columns.table()
    assert [table.column(name).num_chunks for name in SCHEMA.names] == [1, 1, 4, 4]
    assert table.column("name").chunk(0).dictionary.to_pylist() == ["b", "a"]


def test_numbers_without_a_null_are_read_without_a_copy():
    columns = Columns(SCHEMA)
    columns.append(piece(ROWS[0]), 1)
    assert not columns.table().column("at_ns").chunk(0).to_numpy(zero_copy_only=True).flags.owndata
