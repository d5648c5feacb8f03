from unittest import mock

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.records import scratch
from analysis.records.columns import Columns, Groups

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


@pytest.mark.parametrize("most", [0, 100, 1 << 27])
def test_rows_come_back_from_files_as_they_went_in(most, monkeypatch):
    monkeypatch.setattr(scratch, "LARGEST_IN_MEMORY", most)
    rows = [(number * 2 ** (number % 50), f"name-{number % 7}", "x" * (number % 9), [number]) for number in range(500)]
    rows[100] = (None, None, None, None)
    columns = Columns(SCHEMA)
    for number in range(0, 500, 50):
        columns.append(piece(*rows[number : number + 50]))
    assert columns.table().to_pylist() == piece(*rows).to_pylist()


@pytest.mark.parametrize("most", [0, 1 << 27])
@pytest.mark.parametrize("longest", [3, 90], ids=["short texts", "texts too long for a print"])
@settings(max_examples=50)
@given(texts=st.lists(st.lists(st.one_of(st.none(), st.integers(0, 9)), max_size=8), max_size=6))
def test_equal_texts_have_one_number(most, longest, texts):
    with mock.patch.object(scratch, "LARGEST_IN_MEMORY", most):
        groups = Groups()
        flat = []
        for row in texts:
            named = [None if item is None else str(item) * (longest if item else 1) for item in row]
            groups.append(pa.array(named, pa.string()))
            flat += named
        numbers = groups.numbers().tolist()
    assert [number < 0 for number in numbers] == [text is None for text in flat]
    assert len(set(zip(numbers, flat, strict=True))) == len(set(flat)) == len(set(numbers))
