"""The baseline: a run, or a folder of earlier runs, of which the newest is compared and all say how days differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from analysis.records.run_list import joins_runs
from analysis.records.tables import RecordError, one_line
from analysis.releases.conditions import obstacles
from analysis.releases.release import Release, is_run, read_release, write_release
from analysis.results.file import part_of


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Earlier runs in order of time; the newest is the baseline. `unread`: why others in the folder are none."""

    releases: tuple[Release, ...]
    unread: tuple[str, ...] = ()

    @property
    def newest(self) -> Release:
        return self.releases[-1]

    def alike(self, candidate: Release, arms: Mapping[str, str]) -> tuple[Release, ...]:
        """Those with all of the arms under the conditions of the candidate: what its figures may be laid beside."""
        return tuple(
            release
            for release in self.releases
            if arms.keys() <= release.arms.keys() and not obstacles(release, candidate, arms)
        )

    def repeats(self, arms: Mapping[str, str], alike: Sequence[Release]) -> tuple[Release, ...]:
        """Those among `alike` that ran the very build of the newest, which is the last: one commit, one set of
        versions, one configuration of the arms, and no doubt of what they did."""
        earlier = [release for release in alike if release is not self.newest and not _doubted(release, arms)]
        return (*(release for release in earlier if is_same_build(release, self.newest, arms)), self.newest)


def is_same_build(one: Release, other: Release, arms: Iterable[str]) -> bool:
    """Whether both ran the same code in the same configuration. A commit that is unknown, or was changed, tells not."""
    commit = one.environment.get("git_commit")
    return (
        isinstance(commit, str)
        and not commit.endswith("+changes")
        and all(one.environment.get(key) == other.environment.get(key) for key in ("git_commit", "versions", "python"))
        and all(one.arms[arm].config == other.arms[arm].config for arm in arms)
    )


def _doubted(release: Release, arms: Iterable[str]) -> bool:
    return any(release.arms[arm].doubts for arm in arms)


def read_history(path: Path) -> History:
    """The runs at `path`: a run directory, a record, or a folder of either. It may hold none.

    RecordError where `path` is not there, or where it is one run that cannot be read.
    """
    if not part_of(path)[0].exists():
        raise RecordError(f"{path} does not exist: give a run directory, or a folder of records (--accept makes one)")
    if not path.is_dir() or is_run(path) or joins_runs(path):
        return History(releases=(read_release(path),))
    found: list[Release] = []
    unread = []
    for entry in sorted(path.iterdir()):
        if not (entry.suffix == ".json" or is_run(entry)):
            continue
        try:
            release = read_release(entry)
        except (RecordError, OSError) as error:
            unread.append(one_line(error))
            continue
        if not any(release.is_same_run(other) for other in found):
            found.append(release)
    return History(releases=by_time(found), unread=tuple(unread))


def by_time(releases: Sequence[Release]) -> tuple[Release, ...]:
    """The releases in order of their first request."""
    return tuple(sorted(releases, key=lambda release: (release.created_ns, release.run_id)))


def days(releases: Iterable[Release]) -> list[tuple[Release, ...]]:
    """The releases in order of time, those together that ran at one time on one machine: they had one day of it."""
    found: list[list[Release]] = []
    for release in by_time(tuple(releases)):
        shared = next((day for day in found if any(release.ran_beside(other) for other in day)), None)
        if shared is None:
            found.append([release])
        else:
            shared.append(release)
    return [tuple(day) for day in found]


def before(history: History, candidate: Release) -> History:
    """What of the history came before the candidate, and is not the candidate itself."""
    earlier = [
        release
        for release in history.releases
        if release.created_ns <= candidate.created_ns and not release.is_same_run(candidate)
    ]
    return History(releases=tuple(earlier), unread=history.unread)


def accept(candidate: Release, folder: Path) -> Path:
    """`folder` holds the candidate's record, so that it is the next baseline; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{candidate.run_id}.json"
    write_release(candidate, path)
    return path
