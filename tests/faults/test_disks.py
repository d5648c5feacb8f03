"""Disks break as they say, and are whole again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

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
