"""Kept records of runs: one compressed archive for a folder of runs, with token times rounded to 100 µs.

An archive holds run directories with their tables in Parquet. The column `token_ns` of the request tables is stored as
`token_gaps`, the time since the token before in units of 100 µs. Many requests share the gaps of one decode step, so a
token takes 0.4 bytes instead of 4.
"""

from __future__ import annotations

import io
import shutil
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[1]
UNPACKED = ROOT / "build" / "kept"
GAP_NS = 100_000
_DONE = ".unpacked"
_TIMES, _GAPS = "token_ns", "token_gaps"
_FORM = {"compression": "none", "use_dictionary": False}


def pack(folder: Path, archive: Path) -> None:
    """Write `folder`, which holds runs, to `archive` (.tar.xz). The same records give the same bytes.

    Raises ValueError for requests whose first token time is not `first_token_ns`.
    """
    archive.parent.mkdir(parents=True, exist_ok=True)
    partial = archive.with_suffix(".partial")
    with tarfile.open(partial, "w:xz", preset=9) as packed:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            content = path.read_bytes()
            if path.suffix == ".parquet":
                content = _bytes(_gaps_for_times(pq.read_table(path)))
            member = tarfile.TarInfo(path.relative_to(folder).as_posix())
            member.size = len(content)
            packed.addfile(member, io.BytesIO(content))
    partial.replace(archive)


def unpack(archive: Path) -> Path:
    """Return the folder that `archive` was packed from, under build/kept; unpack it if the archive is newer.

    Several processes may unpack one archive at the same time: each sees a whole folder.
    """
    folder = UNPACKED / archive.name.partition(".")[0]
    stamp = f"{archive.stat().st_size} {archive.stat().st_mtime_ns}"
    if _stamp(folder) == stamp:
        return folder
    UNPACKED.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=UNPACKED) as place:
        new = Path(place) / folder.name
        with tarfile.open(archive) as packed:
            # Python 3.11 has no `filter` before its release 4
            packed.extraction_filter = getattr(tarfile, "data_filter", None)
            packed.extractall(new)
        for path in new.rglob("*.parquet"):
            pq.write_table(_times_for_gaps(pq.read_table(path)), path, **_FORM)
        (new / _DONE).write_text(stamp)
        if folder.exists() and _stamp(folder) != stamp:
            shutil.rmtree(folder)
        try:
            new.rename(folder)
        except OSError:
            if _stamp(folder) != stamp:  # otherwise another process was quicker
                raise
    return folder


def _stamp(folder: Path) -> str:
    try:
        return (folder / _DONE).read_text()
    except OSError:
        return ""


def _bytes(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **_FORM)
    return sink.getvalue()


def _gaps_for_times(table: pa.Table) -> pa.Table:
    place = table.schema.get_field_index(_TIMES)
    if place < 0:
        return table
    times = table[_TIMES].combine_chunks()
    offsets, values = _flat(times)
    starts, lengths = offsets[:-1], np.diff(offsets)
    filled = lengths > 0
    first = _first_ns(table)
    if not np.array_equal(values[starts[filled]], first[filled]):
        raise ValueError(f"first_token_ns differs from the first of {_TIMES}")
    ticks = (values - np.repeat(first, lengths)) // GAP_NS
    gaps = np.diff(ticks, prepend=0)
    gaps[starts[filled]] = 0
    column = _lists(offsets, gaps.astype(np.uint32), times)
    return table.set_column(place, _GAPS, column)


def _times_for_gaps(table: pa.Table) -> pa.Table:
    place = table.schema.get_field_index(_GAPS)
    if place < 0:
        return table
    gaps = table[_GAPS].combine_chunks()
    offsets, values = _flat(gaps)
    starts, lengths = offsets[:-1], np.diff(offsets)
    first = _first_ns(table)
    ticks = np.cumsum(values.astype(np.int64))
    before = np.concatenate(([0], ticks))[starts]
    times = np.repeat(first, lengths) + (ticks - np.repeat(before, lengths)) * GAP_NS
    return table.set_column(place, _TIMES, _lists(offsets, times, gaps))


def _first_ns(table: pa.Table) -> np.ndarray:
    """Return the time from sending to the first token, 0 for requests without one."""
    times: np.ndarray = pc.fill_null(pc.subtract(table["first_token_ns"], table["sent_ns"]), 0).to_numpy()
    return times


def _flat(lists: pa.ListArray) -> tuple[np.ndarray, np.ndarray]:
    """Return the offsets, from 0, and the values of a list column."""
    lengths = lists.value_lengths().fill_null(0).to_numpy()
    return np.concatenate(([0], np.cumsum(lengths))), lists.flatten().to_numpy()


def _lists(offsets: np.ndarray, values: np.ndarray, like: pa.ListArray) -> pa.ListArray:
    missing = like.is_null()
    if like.null_count == len(like):
        return pa.nulls(len(like), pa.list_(pa.array(values).type))
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values), mask=missing)
