"""File systems of their own that get full, hang, and become read-only, as disks do (Linux, root)."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

MIB = 1 << 20
_FILLER = ".filler"


class Disk:
    """A small ext4 in a file, mounted at `path` while entered. The file has no name, so that nothing is left of it."""

    def __init__(self, path: Path, *, size_mib: int = 48) -> None:
        self.path = path
        self._size = size_mib * MIB
        self._frozen = False

    def __enter__(self) -> Self:
        self.path.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile(suffix=".img") as image:
            image.truncate(self._size)
            # Every block is for whoever writes, and an error makes it read-only.
            _do("mkfs.ext4", "-q", "-F", "-m", "0", "-e", "remount-ro", "-O", "^has_journal", image.name)
            _do("mount", "-o", "loop", image.name, str(self.path))
        (self.path / "lost+found").rmdir()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.thaw()
        _do("umount", "--lazy", str(self.path))

    def fill(self, *, leave: int = 0) -> None:
        """No more than `leave` bytes have room, in whole blocks."""
        with contextlib.suppress(OSError), (self.path / _FILLER).open("ab", buffering=0) as file:
            while (room := self.room() - leave) > 0:
                file.write(bytes(min(room, MIB)))

    def free(self) -> None:
        """What `fill` took has room again."""
        with contextlib.suppress(OSError):  # it may be read-only by now
            (self.path / _FILLER).unlink(missing_ok=True)

    def room(self) -> int:
        """Bytes that have room."""
        state = os.statvfs(self.path)
        return state.f_bavail * state.f_frsize

    def freeze(self) -> None:
        """Whoever writes waits until `thaw`; not even a kill ends the wait."""
        _do("fsfreeze", "--freeze", str(self.path))
        self._frozen = True

    def thaw(self) -> None:
        """Whoever waits goes on."""
        if self._frozen:
            _do("fsfreeze", "--unfreeze", str(self.path))
            self._frozen = False

    def fail(self) -> None:
        """The file system met an error and is read-only from now on, also for files that are open."""
        device = self.path.stat().st_dev
        name = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve().name
        Path(f"/sys/fs/ext4/{name}/trigger_fs_error").write_text("injected")


def why_no_disks() -> str:
    """Why this machine has no disks to break; empty where it has."""
    if os.geteuid() != 0:
        return "only root mounts file systems"
    with tempfile.TemporaryDirectory() as folder:
        try:
            with Disk(Path(folder) / "disk", size_mib=8):
                return ""
        except (OSError, subprocess.CalledProcessError) as error:
            return f"no file system can be mounted: {getattr(error, 'stderr', error)}"


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
