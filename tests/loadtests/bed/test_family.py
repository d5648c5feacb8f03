"""A process and its descendants, as the kernel shows them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from loadtests.bed.family import cpu_seconds, family_of, stat_of
from tests.fakes.patience import wait_for


@pytest.mark.process
def test_work_of_a_process_counts_with_that_of_its_children() -> None:
    busy = "import os; os.fork(); [None for _ in iter(int, 1)]"
    process = subprocess.Popen([sys.executable, "-c", busy], start_new_session=True)
    try:
        wait_for(lambda: (cpu_seconds(process.pid) or 0.0) >= 1.0)
        alone = stat_of(process.pid).cpu_ticks / os.sysconf("SC_CLK_TCK")
        assert (cpu_seconds(process.pid) or 0.0) > 1.3 * alone
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert cpu_seconds(process.pid) is None


def test_where_the_kernel_shows_no_process_there_is_no_family(tmp_path: Path) -> None:
    assert [*family_of(os.getpid(), tmp_path)] == []
