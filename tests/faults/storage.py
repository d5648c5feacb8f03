"""Storage: the disk under a run gets full, hangs or is read-only, and its folders are removed."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

from tests.faults.disks import Disk, why_no_disks
from tests.faults.fault import Fault, Live, Moment, Setup, Situation, some_instant

FULL, HANGS, READ_ONLY = "a full disk", "a disk that hangs", "a disk that is read-only"
REMOVED, TRIAL_REMOVED = "the run directory removed", "the trial's folder removed"
DISKS = (FULL, HANGS, READ_ONLY)
FOLDERS = (REMOVED, TRIAL_REMOVED)
_SIZE_MIB = 96


@dataclass(frozen=True)
class Storage(Fault):
    """What happens to the folder of a run."""

    what: str

    @property
    def name(self) -> str:
        """What happens."""
        return self.what

    @property
    def ends_records(self) -> bool:
        """Nothing more can be written, or it is gone."""
        return True

    @property
    def removes_records(self) -> bool:
        """A folder goes with what is in it."""
        return self.what in FOLDERS

    def arrange(self, setup: Setup) -> None:
        """The run's results lie on a disk of its own, which is gone afterwards and leaves them."""
        if self.what in DISKS and setup.disk is None:
            out = setup.folder / "out"
            setup.disk = setup.closing.enter_context(_kept(Disk(out, size_mib=_SIZE_MIB)))

    def inject(self, live: Live) -> str:
        """It has happened."""
        disk, folder = live.setup.disk, live.run_dir()
        match self.what:
            case "a full disk" if disk is not None:
                disk.fill()
                return "all blocks"
            case "a disk that hangs" if disk is not None:
                disk.freeze()
                return "all writers"
            case "a disk that is read-only" if disk is not None:
                disk.fail()
                return "all files"
        target = folder if self.what == REMOVED else next(iter(folder.glob("trial-*")), None) if folder else None
        if target is None:
            return ""
        shutil.rmtree(target, ignore_errors=True)
        return target.name

    def lift(self, live: Live) -> None:
        """There is room again; writers go on."""
        if live.setup.disk is not None:
            live.setup.disk.thaw()  # first: to free a frozen disk would wait
            live.setup.disk.free()


@contextlib.contextmanager
def _kept(disk: Disk) -> Iterator[Disk]:
    """The disk, whose files lie in its place once it is gone."""
    aside = disk.path.with_name("disk")
    with disk:
        yield disk
        disk.thaw()
        disk.free()
        shutil.copytree(disk.path, aside, symlinks=True)
    disk.path.rmdir()
    aside.rename(disk.path)


_no_disks: list[str] = []


def draw(rng: random.Random, situation: Situation) -> Moment | None:
    """Something happens to the folder once it is there. A disk that fails has no second life: those are of safety."""
    if not _no_disks:
        _no_disks.append(why_no_disks())
    what = rng.choice(DISKS + FOLDERS)
    if situation.kind == "users' ramp" or (what in DISKS and _no_disks[0]):
        return None
    if situation.liveness and what != HANGS:
        return None
    phase, after_s = some_instant(rng, situation, "starting arms")
    lasts_s = round(rng.uniform(0.3, 2.0), 1) if what == HANGS or (what == FULL and rng.random() < 0.5) else None
    return Moment(phase=phase, after_s=after_s, fault=Storage(what), lasts_s=lasts_s)
