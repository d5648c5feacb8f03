"""Processes of a run are known by their mark and their command line, whoever started them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.faults.processes import MARK, Process, ancestry, by_role, marked, role


def process(pid: int, command: str, parent: int = 1) -> Process:
    return Process(pid=pid, parent=parent, words=tuple(command.split()), started=pid)


def test_only_marked_processes_are_found_and_their_children_with_them() -> None:
    mark = f"test-of-processes-{os.getpid()}"  # tests that run beside this one have theirs
    shell = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {'input()'!r}], stdin=0)"
    started = subprocess.Popen([sys.executable, "-c", shell], env={**os.environ, MARK: mark}, stdin=subprocess.PIPE)
    try:
        while len(found := marked(mark)) < 2:
            assert started.poll() is None
        assert started.pid in found
        assert {item.parent for pid, item in found.items() if pid != started.pid} == {started.pid}
        assert by_role(mark, started.pid)["orchestrator"] == [started.pid]
        assert not marked(f"{mark}0")
    finally:
        started.communicate(b"\n")


@pytest.mark.parametrize(
    ("command", "known"),
    [
        ("python tests/fakes/arm.py --config x.json --replica eager-0", "control"),
        ("python -P -m servers.front.serve --replica compiled-padded-0", "candidate"),
        ("python -P -m servers.front.serve --replica eager-padded-0", "candidate"),
        ("/opt/envoy/_bin/envoy --config-path envoy.json", "envoy"),
        ("python -P -m locust -f chat.py --headless", "load"),
        ("python -P -m loadtests.bed", "watcher"),
        ("python -P -m loadtests.page out/1", "page"),
        ("python -P -m loadtests.users out/1", "users"),
        ("python -P -m analysis.looks out/1", "judge"),
        ("python -P -m analysis.looks out/1 --preview", "preview"),
        ("python -m loadtests.commands.main worker --master 127.0.0.1:1", "remote worker"),
        ("python -m loadtests.commands.main split --port 1", "split"),
        ("python -m tests.faults.external_server log", "server"),
        ("python -m something.else", ""),
    ],
)
def test_a_role_is_read_from_the_command_line(command: str, known: str) -> None:
    assert role(process(5, command), {}, 1) == known


def test_children_are_known_by_their_parent() -> None:
    every = {
        item.pid: item
        for item in (
            process(10, "python -P -m locust --master"),
            process(11, "python -P -m locust --master", parent=10),
            process(20, "python -m loadtests.commands.main worker"),
            process(21, "python -P -m locust --worker", parent=20),
            process(30, "python -m servers.front.serve --replica eager-0"),
            process(31, "python -c from multiprocessing.spawn import spawn_main;", parent=30),
        )
    }
    assert ancestry(every[21], every) == {20, 21}
    roles = {pid: role(item, every, 1) for pid, item in every.items()}
    assert [roles[pid] for pid in (10, 11, 21, 31)] == ["load", "worker", "worker", "engine of control"]
