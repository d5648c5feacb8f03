from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.analysis.records.test_robustness import GATES, SLO
from tests.fakes.runs import EAGER, Compile, FakeArm, FakeRun, write_run

NAIVE = FakeArm(name="naive", compiles=[Compile(at_s=5 + 10 * step, seconds=3 + step) for step in range(3)])


def test_processes_that_hash_and_thread_differently_write_the_same_bytes(tmp_path):
    run = FakeRun(slo=SLO, gates=GATES, duration_s=60, rate=1, arms=(EAGER, NAIVE))
    directory = write_run(tmp_path / "run", run)
    code = (
        "import sys; from pathlib import Path; from analysis.summary.summary import analyze, write_summary; "
        "write_summary(analyze(Path(sys.argv[1])), Path(sys.argv[2]))"
    )
    root = Path(__file__).resolve().parents[2]
    processes = []
    for number in (1, 2):
        threads = {name: str(number) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "ARROW_IO_THREADS")}
        environment = {**os.environ, **threads, "PYTHONHASHSEED": str(number), "PYTHONPATH": str(root)}
        command = [sys.executable, "-c", code, str(directory), str(tmp_path / f"{number}.json")]
        processes.append(subprocess.Popen(command, env=environment))
    assert [process.wait() for process in processes] == [0, 0]
    assert (tmp_path / "1.json").read_bytes() == (tmp_path / "2.json").read_bytes()
