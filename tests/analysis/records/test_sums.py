"""What a file says of itself: damage costs the pieces it touches, is never overlooked, and never ends the process."""

import contextlib
import random
import resource

import pytest

from analysis.records.schemas import REQUESTS
from analysis.records.sums import read_statement, sums_path
from analysis.records.tables import CUT_OFF, NOT_AS_WRITTEN, RecordError, RecordWriter, read_pieces, read_table
from tests.fakes.request_rows import row, write_rows

BATCHES = 40


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "requests.arrow"
    write_rows(path, [row(index) for index in range(BATCHES)])
    return path


def read(path):
    """The numbers of the rows that are read, and what is said of the file."""
    tables = []
    problems = read_pieces(path, REQUESTS, tables.append)
    names = [name for table in tables for name in table.column("request_id").to_pylist()]
    return [int(name.split("-")[1]) for name in names], problems


def test_what_was_written_is_stated_and_read(path):
    statement = read_statement(path)
    assert [piece.rows for piece in statement.pieces] == [0, *[1] * BATCHES, 0]
    assert statement.end == (path.stat().st_size, BATCHES + 2, BATCHES)
    assert read(path) == (list(range(BATCHES)), ())


def test_zeros_cost_the_batches_that_they_touch_and_no_others(path):
    pieces = read_statement(path).pieces
    content = bytearray(path.read_bytes())
    content[pieces[11].at + 8 : pieces[20].end - 8] = bytes(pieces[20].end - 8 - pieces[11].at - 8)
    path.write_bytes(content)
    assert read(path) == ([*range(10), *range(20, BATCHES)], (f"{NOT_AS_WRITTEN}, 10 rows of it are gone",))


def test_rows_behind_a_damaged_head_are_read(path):
    """The sums show that the schema was the one that runs write."""
    content = bytearray(path.read_bytes())
    content[:200] = bytes(200)
    path.write_bytes(content)
    assert read(path) == (list(range(BATCHES)), (NOT_AS_WRITTEN,))


def test_a_cut_between_two_batches_is_called_a_cut(path):
    pieces = read_statement(path).pieces
    path.write_bytes(path.read_bytes()[: pieces[-6].end])
    rows, (problem,) = read(path)
    assert rows == list(range(BATCHES - 4))
    assert problem.startswith("is cut off")
    assert problem.endswith("4 rows of it are gone")


def test_a_killed_writer_leaves_a_file_that_is_cut_off_and_reads(path):
    """The lines up to the kill stand, and a batch may be half written."""
    lines = sums_path(path).read_bytes().splitlines(keepends=True)
    pieces = read_statement(path).pieces
    for torn_line in (b"", lines[30][:9]):
        sums_path(path).write_bytes(b"".join(lines[:30]) + torn_line)
        path.write_bytes(path.read_bytes()[: pieces[30].at + 11])
        assert read(path) == (list(range(29)), (CUT_OFF,))


def test_swapped_and_repeated_batches_are_noticed(path):
    one, other, rest = read_statement(path).pieces[5], read_statement(path).pieces[6], path.read_bytes()
    swapped = rest[: one.at] + rest[other.at : other.end] + rest[one.at : one.end] + rest[other.end :]
    for content in (swapped, rest[: one.end] + rest[one.at :]):
        path.write_bytes(content)
        rows, problems = read(path)
        assert problems
        assert rows == sorted(set(rows))


def test_lost_lines_cost_their_pieces_and_are_noticed(path):
    lines = sums_path(path).read_bytes().splitlines(keepends=True)
    sums_path(path).write_bytes(b"".join(lines[:10] + lines[14:]))
    assert read(path) == ([*range(9), *range(13, BATCHES)], (f"{NOT_AS_WRITTEN}, 4 rows of it are gone",))


@pytest.mark.parametrize("stated", [True, False], ids=["stated", "unstated"])
@pytest.mark.parametrize("flips", [1, 20])
def test_flipped_bits_lose_rows_and_nothing_else(path, stated, flips):
    if not stated:
        sums_path(path).unlink()
    whole = path.read_bytes()
    expected = read_table(path, REQUESTS)[0].to_pylist()
    rng = random.Random(flips)
    for _ in range(40):
        content = bytearray(whole)
        for _ in range(flips):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        tables = []
        with contextlib.nullcontext() if stated else contextlib.suppress(RecordError):
            problems = read_pieces(path, REQUESTS, tables.append)
        if stated:
            assert problems
            assert all(row in expected for table in tables for row in table.to_pylist())


@pytest.mark.parametrize("at", [0.2, 0.6])
def test_zeros_in_a_file_without_sums_are_no_end(path, at):
    """Arrow takes them for the mark of the end and stops there."""
    sums_path(path).unlink()
    content = bytearray(path.read_bytes())
    start = content.index(b"\xff\xff\xff\xff", int(at * len(content)))
    content[start : start + 1000] = bytes(1000)
    path.write_bytes(content)
    rows, (problem,) = read(path)
    assert len(rows) < BATCHES
    assert "behind its end" in problem


def test_a_file_without_sums_and_without_its_end_mark_is_cut_off(path):
    last = read_statement(path).pieces[-1]
    sums_path(path).unlink()
    path.write_bytes(path.read_bytes()[: last.at])
    assert read(path) == (list(range(BATCHES)), (CUT_OFF,))


def test_a_disk_that_is_full_for_a_while_costs_nothing(tmp_path):
    writer = RecordWriter(tmp_path / "requests.arrow", REQUESTS)
    writer.append(row(0))
    writer.flush()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer.append(row(1))
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "requests.arrow").stat().st_size + 500, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            writer.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    writer.close()
    assert read(tmp_path / "requests.arrow") == ([0, 1], ())


def test_a_damaged_file_is_continued_with_what_is_whole(path):
    pieces = read_statement(path).pieces
    content = bytearray(path.read_bytes())
    content[pieces[3].at + 20] ^= 4
    path.write_bytes(content)
    write_rows(path, [row(99)])
    assert read(path) == ([0, 1, *range(3, BATCHES), 99], ())
