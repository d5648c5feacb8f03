"""Processes of a run are known by their mark and their command line, whoever started them."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.faults.processes import MARK, by_role, marked


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
