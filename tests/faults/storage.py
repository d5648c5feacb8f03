"""Storage: the disk under a run gets full, hangs or becomes read-only (Linux, root), or its folders are removed."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.faults.fault import Fault, Live, Moment, Setup, Situation, some_instant

FULL, HANGS, READ_ONLY = "a full disk", "a disk that hangs", "a disk that is read-only"
REMOVED, TRIAL_REMOVED = "the run directory removed", "the trial's folder removed"
DISKS = (FULL, HANGS, READ_ONLY)
FOLDERS = (REMOVED, TRIAL_REMOVED)
MIB = 1 << 20
_SIZE_MIB = 96
_FILLER = ".filler"


class Disk:
    """A small ext4 in an unlinked file, mounted at `path`."""

    def __init__(self, path: Path, *, size_mib: int) -> None:
        self.path = path
        self._size = size_mib * MIB
        self._frozen = False

    @contextlib.contextmanager
    def mounted(self) -> Iterator[Disk]:
        self.path.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile(suffix=".img") as image:
            image.truncate(self._size)
            # No block is reserved for root, and an error makes it read-only.
            _do("mkfs.ext4", "-q", "-F", "-m", "0", "-e", "remount-ro", "-O", "^has_journal", image.name)
            _do("mount", "-o", "loop", image.name, str(self.path))
        try:
            (self.path / "lost+found").rmdir()
            yield self
        finally:
            self.thaw()
            _do("umount", "--lazy", str(self.path))

    def fill(self) -> None:
        with contextlib.suppress(OSError), (self.path / _FILLER).open("ab", buffering=0) as file:
            while (space := self._space()) > 0:
                file.write(bytes(min(space, MIB)))

    def free(self) -> None:
        """Free what `fill` took."""
        with contextlib.suppress(OSError):  # it may be read-only by now
            (self.path / _FILLER).unlink(missing_ok=True)

    def freeze(self) -> None:
        """Block writers until `thaw`; not even a kill ends the wait."""
        _do("fsfreeze", "--freeze", str(self.path))
        self._frozen = True

    def thaw(self) -> None:
        if self._frozen:
            _do("fsfreeze", "--unfreeze", str(self.path))
            self._frozen = False

    def fail(self) -> None:
        """Make the file system read-only by an error, also for open files."""
        device = self.path.stat().st_dev
        name = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve().name
        Path(f"/sys/fs/ext4/{name}/trigger_fs_error").write_text("injected")

    def _space(self) -> int:
        state = os.statvfs(self.path)
        return state.f_bavail * state.f_frsize


@functools.cache
def why_no_disks() -> str:
    """Return why this machine has no disks to break; empty where it has."""
    if os.geteuid() != 0:
        return "only root mounts file systems"
    with tempfile.TemporaryDirectory() as folder:
        try:
            with Disk(Path(folder) / "disk", size_mib=8).mounted():
                return ""
        except (OSError, subprocess.CalledProcessError) as error:
            return f"no file system can be mounted: {getattr(error, 'stderr', error)}"


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)


class Storage(Fault):
    """A disk of DISKS that holds the results, or a folder of FOLDERS that is removed."""

    def __init__(self, what: str) -> None:
        super().__init__(name=what, ends_records=True, removes_records=what in FOLDERS)

    def arrange(self, setup: Setup) -> None:
        if self.name in DISKS and setup.disk is None:
            setup.disk = setup.closing.enter_context(_kept(Disk(setup.folder / "out", size_mib=_SIZE_MIB)))

    def inject(self, live: Live) -> str:
        if self.name in DISKS:
            disk: Disk = live.setup.disk
            {FULL: disk.fill, HANGS: disk.freeze, READ_ONLY: disk.fail}[self.name]()
            return "the disk"
        folder = live.run_dir()
        target = folder if self.name == REMOVED else next(iter(folder.glob("trial-*")), None) if folder else None
        if target is None:
            return ""
        shutil.rmtree(target, ignore_errors=True)
        return target.name

    def lift(self, live: Live) -> None:
        if live.setup.disk is not None:
            live.setup.disk.thaw()  # first: to free a frozen disk would wait
            live.setup.disk.free()


@contextlib.contextmanager
def _kept(disk: Disk) -> Iterator[Disk]:
    """Mount the disk; afterwards its files lie in its place."""
    aside = disk.path.with_name("disk")
    with disk.mounted():
        yield disk
        disk.thaw()
        disk.free()
        shutil.copytree(disk.path, aside, symlinks=True)
    disk.path.rmdir()
    aside.rename(disk.path)


def draw(rng: random.Random, situation: Situation) -> Moment | None:
    """Draw a fault of the folder; a disk that fails does not recover, so that such plans are of safety."""
    what = rng.choice(DISKS + FOLDERS)
    if what in DISKS and why_no_disks():
        return None
    if situation.liveness and what != HANGS:
        return None
    phase, after_s = some_instant(rng, situation, "starting arms")
    lasts_s = round(rng.uniform(0.3, 2.0), 1) if what == HANGS or (what == FULL and rng.random() < 0.5) else None
    return Moment(phase=phase, after_s=after_s, fault=Storage(what), lasts_s=lasts_s)
