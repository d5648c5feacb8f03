"""Two processes that hash and thread differently write the same summary of a run."""

import os
import subprocess
import sys
from pathlib import Path

from tests.fakes.runs import EAGER, Compile, FakeArm, FakeRun, write_run

ROOT = Path(__file__).resolve().parents[2]
NAIVE = FakeArm(name="naive", compiles=[Compile(at_s=5 + 10 * step, seconds=3 + step) for step in range(3)])
CODE = (
    "import sys; from pathlib import Path; from analysis.summary.summary import analyze, write_summary; "
    "write_summary(analyze(Path(sys.argv[1])), Path(sys.argv[2]))"
)


def test_the_same_records_give_the_same_bytes_in_any_process(tmp_path: Path) -> None:
    run = FakeRun(gates={"draws": 99}, duration_s=60, rate=1, arms=(EAGER, NAIVE))
    directory = write_run(tmp_path / "run", run)
    for number in (1, 2):
        threads = {name: str(number) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "ARROW_IO_THREADS")}
        environment = {**os.environ, **threads, "PYTHONHASHSEED": str(number), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", CODE, str(directory), str(tmp_path / f"{number}.json")]
        subprocess.run(command, env=environment, check=True)
    assert (tmp_path / "1.json").read_bytes() == (tmp_path / "2.json").read_bytes()
