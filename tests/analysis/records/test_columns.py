import pyarrow as pa
import pytest

from analysis.records.columns import Columns
from analysis.records.scratch import parts

NAME = pa.dictionary(pa.int32(), pa.string())
SCHEMA = pa.schema([("at_ns", pa.int64()), ("name", NAME), ("text", pa.string()), ("times", pa.list_(pa.int64()))])


def piece(*rows):
    columns = zip(*rows, strict=True) if rows else ([], [], [], [])
    kinds = (pa.int64(), pa.string(), pa.string(), pa.list_(pa.int64()))
    at_ns, name, *rest = (pa.array(list(column), kind) for column, kind in zip(columns, kinds, strict=True))
    return pa.table([at_ns, name.dictionary_encode().cast(NAME), *rest], schema=SCHEMA)


ROWS = [(5, "b", "x", [1]), (None, None, None, None), (-7, "a", "", []), (2**62, "b", "y", [None])]


@pytest.mark.parametrize("cut", [0, 1, 2, 4])
def test_pieces_come_back_as_they_went_in(cut):
    columns = Columns(SCHEMA)
    columns.append(piece(*ROWS[:cut]))
    columns.append(piece(*ROWS[cut:]))
    assert columns.table().to_pylist() == piece(*ROWS).to_pylist()


def test_nothing_is_an_empty_table():
    table = Columns(SCHEMA).table()
    assert (table.num_rows, table.column_names) == (0, SCHEMA.names)


def test_numbers_and_shared_names_are_in_one_piece():
    columns = Columns(SCHEMA)
    for row in ROWS:
        columns.append(piece(row))
    table = columns.table()
    assert [table.column(name).num_chunks for name in SCHEMA.names] == [1, 1, 4, 4]
    assert table.column("name").chunk(0).dictionary.to_pylist() == ["b", "a"]


def test_numbers_without_a_null_are_read_without_a_copy():
    columns = Columns(SCHEMA)
    columns.append(piece(ROWS[0]))
    assert not columns.table().column("at_ns").chunk(0).to_numpy(zero_copy_only=True).flags.owndata


@pytest.mark.parametrize(("values", "kind"), [([0, 127, -128], "int8"), ([128], "int16"), ([-(2**31)], "int32")])
def test_columns_are_as_wide_as_their_values(values, kind):
    columns = Columns(SCHEMA)
    columns.append(piece(*((value, "a", "", []) for value in values)))
    assert str(columns.table().column("at_ns").type) == kind


def test_a_column_grows_wider_and_keeps_what_it_holds():
    values = [None, 5, 127, 128, -32769, 2**31, None, -(2**63), 2**63 - 1]
    columns = Columns(SCHEMA)
    for number, value in enumerate(values):
        columns.append(piece((value, f"name-{number}", "", [])))
    assert columns.table().column("at_ns").to_pylist() == values
    assert columns.table().column("name").to_pylist() == [f"name-{number}" for number in range(len(values))]


def test_more_names_than_a_byte_counts_stay_apart():
    columns = Columns(SCHEMA)
    names = [f"name-{number}" for number in range(300)]
    columns.append(piece(*((0, name, "", []) for name in names)))
    assert columns.table().column("name").to_pylist() == names


@pytest.mark.parametrize("rows", [0, 1, 65_536, 65_537, 200_000])
def test_parts_are_all_rows_once(rows):
    assert [row for part in parts(rows) for row in (part.start, part.stop)][1:-1:2] == list(range(65_536, rows, 65_536))
    assert sum(part.stop - part.start for part in parts(rows)) == rows
