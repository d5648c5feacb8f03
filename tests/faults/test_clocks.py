"""Clocks of a process that was started with them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults.clocks import environment, step, why_no_clocks

pytestmark = pytest.mark.skipif(bool(why := why_no_clocks()), reason=why or "it has")
_TELL = """
import sys, time, datetime
for _ in sys.stdin:
    time.sleep(0.01)
    print(time.time(), time.monotonic(), datetime.datetime.now().timestamp(), flush=True)
"""


def test_the_wall_clock_steps_while_a_process_runs_and_no_other_clock_does(tmp_path: Path) -> None:
    given = {**os.environ, **environment(tmp_path)}
    command = [sys.executable, "-c", _TELL]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=given) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for shift in (0, 3600, -3600, 0):
            step(tmp_path, shift)
            process.stdin.write("\n")
            process.stdin.flush()
            wall, monotonic, date = map(float, process.stdout.readline().split())
            assert wall - time.time() == pytest.approx(shift, abs=30)
            assert date - time.time() == pytest.approx(shift, abs=30)
            assert monotonic - time.monotonic() == pytest.approx(0, abs=30)
        process.stdin.close()
