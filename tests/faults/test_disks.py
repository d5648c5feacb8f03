"""Disks break as they say, and are whole again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.patience import PATIENCE_S
from tests.faults.disks import Disk, why_no_disks

pytestmark = pytest.mark.skipif(bool(why := why_no_disks()), reason=why or "it has")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with Disk(tmp_path / "disk", size_mib=8) as made:
        yield made
    assert not (tmp_path / "disk").is_mount()


def test_a_full_disk_takes_nothing_until_it_is_freed(disk: Disk) -> None:
    disk.fill()
    with (disk.path / "x").open("wb", buffering=0) as file:
        with pytest.raises(OSError, match="No space left"):
            file.write(bytes(100_000))
        disk.free()
        assert file.write(bytes(1000)) == 1000


def test_a_frozen_disk_makes_writers_wait_until_it_is_thawed(disk: Disk) -> None:
    done = threading.Event()
    disk.freeze()
    writer = threading.Thread(target=lambda: ((disk.path / "x").write_text("x"), done.set()), daemon=True)
    writer.start()
    assert not done.wait(0.2)
    disk.thaw()
    assert done.wait(PATIENCE_S)


def test_a_disk_that_failed_is_read_only_also_for_open_files(disk: Disk) -> None:
    with (disk.path / "x").open("wb", buffering=0) as file:
        file.write(b"before")
        disk.fail()
        with pytest.raises(OSError, match="Read-only"):
            file.write(b"after")
    assert (disk.path / "x").read_bytes() == b"before"
