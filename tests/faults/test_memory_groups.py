"""Groups of memory hold a process, and are gone afterwards."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.faults.memory_groups import MemoryGroup, why_no_groups

pytestmark = pytest.mark.skipif(bool(why_no_groups()), reason=f"no groups of memory: {why_no_groups()}")
_TAKES = "import sys; sys.stdin.readline(); held = bytearray(b'1') * (32 << 20); print(len(held))"


@pytest.mark.parametrize("lifted", [False, True])
def test_a_process_is_killed_for_what_it_takes_beyond_its_group(lifted: bool) -> None:
    group = MemoryGroup(2 << 20)
    process = subprocess.Popen([sys.executable, "-c", _TAKES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    group.take(process.pid)
    if lifted:
        group.lift()
    out, _ = process.communicate("\n", timeout=30)
    assert (process.returncode, out) == ((0, f"{32 << 20}\n") if lifted else (-signal.SIGKILL, ""))
    group.close()
    assert not group.path.exists()
