import tempfile
from pathlib import Path

import numpy as np
import pytest

from analysis.records import scratch
from analysis.records.scratch import Growing, ScratchError, empty, full, kept, lean, ordered, parts


@pytest.fixture(params=[0, 1 << 27], ids=["in files", "in memory"])
def limit(request, monkeypatch):
    monkeypatch.setattr(scratch, "LARGEST_IN_MEMORY", request.param)
    return request.param


def test_an_array_holds_what_is_written_to_it_wherever_it_lies(limit):
    values = empty(1000, np.float64)
    values[:] = np.arange(1000)
    values[::2] *= 2
    assert values.tolist() == [2 * number if number % 2 == 0 else number for number in range(1000)]
    assert full(3, 7, np.int32).tolist() == [7, 7, 7]
    assert kept(values).tolist() == values.tolist()
    assert ordered(np.array([3, 1, 2])).tolist() == [1, 2, 3]


@pytest.mark.parametrize("kind", [np.bool_, np.int8, np.int64])
def test_what_is_appended_follows_what_was_there(limit, kind):
    growing = Growing(kind)
    stretches = [np.arange(size) % 2 for size in (0, 1, 70_000, 5, 0, 200_000)]
    for stretch in stretches:
        growing.append(stretch.astype(kind))
    assert growing.all().dtype == kind
    assert np.array_equal(growing.all(), np.concatenate(stretches).astype(kind))


def test_a_scratch_file_has_no_name_and_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(scratch, "LARGEST_IN_MEMORY", 0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    values = full(1 << 16, 1, np.int64)
    assert list(tmp_path.iterdir()) == []
    del values
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before


def test_too_little_room_is_said_with_the_place_and_a_remedy(monkeypatch):
    monkeypatch.setattr(scratch, "LARGEST_IN_MEMORY", 0)
    with pytest.raises(ScratchError, match="GB more: free some, or set TMPDIR to another folder"):
        empty(1 << 50, np.int8)


def test_one_value_for_all_takes_no_memory():
    same = lean(np.zeros(1000, dtype=np.bool_))
    assert (same.strides, len(same), same.any()) == ((0,), 1000, False)
    other = np.array([True, False, True])
    assert lean(other) is other


@pytest.mark.parametrize("rows", [0, 1, 65_536, 65_537, 200_000])
def test_parts_are_all_rows_once(rows):
    assert [row for part in parts(rows) for row in (part.start, part.stop)][1:-1:2] == list(range(65_536, rows, 65_536))
    assert sum(part.stop - part.start for part in parts(rows)) == rows
