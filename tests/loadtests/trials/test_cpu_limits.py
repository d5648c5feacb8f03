"""Limits on real processes and their threads; cgroup v2 is a folder of plain files here, and real where it may be."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtests.bed.family import family_of
from loadtests.trials.cpu_limits import CpuLimit, limit_all
from loadtests.trials.processes import Child
from tests.fakes.patience import PATIENCE_S

NOWHERE = Path("/nonexistent")
GONE = 2**22 + 1  # no process has this number
# A parent with a thread, and a child process with one too.
TREE = """
import json, subprocess, sys, threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
if len(sys.argv) == 1:
    child = subprocess.Popen([sys.executable, "-c", sys.stdin.read(), "leaf"], stdout=subprocess.PIPE)
    child.stdout.readline()
print(json.dumps({"ready": True}), flush=True)
time.sleep(60)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[int]:
    program = TREE.replace("sys.stdin.read()", "open(sys.argv[0]).read()")
    (tmp_path / "tree.py").write_text(program)
    child = Child("tree", [sys.executable, str(tmp_path / "tree.py")], log_path=tmp_path / "tree.log")
    line = child.line(PATIENCE_S)
    assert line is not None, child.log_tail()
    assert json.loads(line) == {"ready": True}
    yield child.pid
    child.kill()


def affinities(pid: int) -> list[set[int]]:
    return [
        os.sched_getaffinity(int(task.name))
        for member, _ in family_of(pid)
        for task in Path(f"/proc/{member}/task").iterdir()
    ]


def test_every_thread_of_a_process_and_its_children_is_bound_and_set_free_again(tree: int) -> None:
    before = affinities(tree)
    assert len(before) >= 4
    (limit,) = limit_all([tree], 0.5, groups=NOWHERE)
    assert limit is not None
    first = min(os.sched_getaffinity(0))
    assert affinities(tree) == [{first}] * len(before)
    assert limit.facts() == {"method": "affinity", "processors": [first]}
    limit.lift()
    assert affinities(tree) == before


def test_processes_get_processors_of_their_own_or_all_the_same_ones(tree: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bound: dict[int, tuple[int, ...]] = {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5, 7})
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, processors: bound.update({thread: tuple(processors)}))
    apart = limit_all([tree, os.getppid()], 2.0, groups=NOWHERE)
    assert [limit and limit.processors for limit in apart] == [(2, 3), (5, 7)]
    together = limit_all([tree, os.getppid(), os.getpid()], 1.5, groups=NOWHERE)
    assert [limit and limit.processors for limit in together] == [(2, 3)] * 3


def lift(limits: list[CpuLimit | None]) -> None:
    for limit in limits:
        if limit is not None:
            limit.lift()


@pytest.mark.parametrize("by", ["affinity", "cgroup"])
def test_a_process_that_is_gone_leaves_the_others_limited(by: str, tree: int, tmp_path: Path) -> None:
    groups, proc = groups_of(tree, tmp_path)
    before = affinities(tree)
    limits = limit_all([GONE, tree], 1.0, groups=groups if by == "cgroup" else NOWHERE, proc=proc)
    assert [limit and limit.method for limit in limits] == [None, by]
    lift(limits)
    assert affinities(tree) == before


def test_processes_that_are_bound_are_set_free_where_another_cannot_be(
    tree: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, bind, leaf = affinities(tree), os.sched_setaffinity, [*family_of(tree)][1][0]

    def refused(thread: int, processors: set[int]) -> None:
        if thread == leaf and len(processors) == 1:
            raise PermissionError(1, "not yours")
        bind(thread, processors)

    monkeypatch.setattr(os, "sched_setaffinity", refused)
    with pytest.raises(PermissionError):
        limit_all([tree], 1.0, groups=NOWHERE)
    assert affinities(tree) == before


def test_a_group_that_an_earlier_limit_left_is_taken_again(tree: int, tmp_path: Path) -> None:
    groups, proc = groups_of(tree, tmp_path)
    (groups / "session" / "work" / f"tailgate-{tree}").mkdir()
    (limit,) = limit_all([tree], 1.0, groups=groups, proc=proc)
    assert limit is not None
    assert (groups / "session" / "work" / f"tailgate-{tree}" / "cpu.max").exists()


def groups_of(tree: int, folder: Path) -> tuple[Path, Path]:
    """(groups, proc): a tree of groups in plain files, with the process in session/work."""
    groups, proc = folder / "groups", folder / "proc"
    (groups / "session" / "work").mkdir(parents=True)
    (groups / "cgroup.controllers").write_text("cpu memory")
    (proc / str(tree)).mkdir(parents=True)
    (proc / str(tree) / "cgroup").write_text("1:name=systemd:/old\n0::/session/work\n")
    return groups, proc


def test_where_groups_may_be_made_each_process_has_a_quota_of_its_own(tree: int, tmp_path: Path) -> None:
    groups, proc = groups_of(tree, tmp_path)
    before = affinities(tree)
    (limit,) = limit_all([tree], 1.5, groups=groups, proc=proc)
    assert limit is not None
    group = groups / "session" / "work" / f"tailgate-{tree}"
    assert (group / "cpu.max").read_text() == "150000 100000"
    last = [*family_of(tree)][-1][0]
    assert (group / "cgroup.procs").read_text() == str(last)  # a plain file keeps the last one
    assert limit.facts() == {"method": "cgroup"}
    assert affinities(tree) == before
    limit.lift()
    assert (groups / "session" / "work" / "cgroup.procs").read_text() == str(last)


def test_a_group_that_cannot_hold_others_has_one_made_beside_it(tree: int, tmp_path: Path) -> None:
    groups, proc = groups_of(tree, tmp_path)
    (groups / "session" / "work" / f"tailgate-{tree}").write_text("in the way")
    limit_all([tree], 1.0, groups=groups, proc=proc)
    assert (groups / "session" / f"tailgate-{tree}" / "cpu.max").read_text() == "100000 100000"


def test_all_are_bound_where_one_cannot_have_a_group(tree: int, tmp_path: Path) -> None:
    groups, proc = groups_of(tree, tmp_path)
    child = [*family_of(tree)][1][0]  # of it the files know nothing
    limits = limit_all([tree, child], 1.0, groups=groups, proc=proc)
    assert [limit and limit.method for limit in limits] == ["affinity", "affinity"]
    assert (groups / "session" / "work" / "cgroup.procs").exists()  # given back
    lift(limits)
