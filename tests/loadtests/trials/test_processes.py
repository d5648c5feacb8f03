import os
import sys
from pathlib import Path

import pytest

from loadtests.trials.processes import Child, child_environment, describe_exit, log_tail, thread_variables
from servers.clock import ANCHOR_NS, ANCHOR_VARIABLE
from servers.config import ArmConfig, EngineConfig, ModelConfig
from tests.fakes.patience import PATIENCE_S, wait_for


def is_gone(pid: str) -> bool:
    """Whether the process ended; a zombie that only waits to be reaped by init has."""
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def test_a_stopped_child_takes_its_whole_group_along(tmp_path: Path) -> None:
    # the leader ends at once on SIGTERM; what it started ignores the signal
    script = (
        "import subprocess, sys, time\n"
        "code = 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); '\n"
        "code += 'print(1, flush=True); time.sleep(600)'\n"
        "inner = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE)\n"
        "inner.stdout.readline()\n"
        "print(inner.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    child = Child("family", [sys.executable, "-c", script], log_path=tmp_path / "family.log")
    line = child.line(PATIENCE_S)
    assert line is not None
    assert describe_exit(child.stop(5.0)) == "SIGTERM"
    wait_for(lambda: is_gone(line))


def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib\n"
        "from loadtests.trials.processes import Child\n"
        f"child = Child('x', [sys.executable, '-c', 'import time; print(1, flush=True); time.sleep(600)'],"
        f" log_path=pathlib.Path({str(tmp_path / 'x.log')!r}))\n"
        "child.line(20)\n"
        "print(child.pid, flush=True)\n"
        "import os, signal\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = str(Path(__file__).resolve().parents[3])
    parent = Child(
        "parent",
        [sys.executable, "-c", script],
        log_path=tmp_path / "parent.log",
        environment={**os.environ, "PYTHONPATH": root},
    )
    line = parent.line(PATIENCE_S)
    assert line is not None, log_tail(tmp_path / "parent.log")
    assert parent.wait(PATIENCE_S) == -9
    wait_for(lambda: is_gone(line))


def test_a_log_without_lines_says_so(tmp_path: Path) -> None:
    assert log_tail(tmp_path / "none.log") == "no log"
    (tmp_path / "empty.log").write_text("\n\n")
    assert log_tail(tmp_path / "empty.log") == "its log is empty"
    (tmp_path / "full.log").write_text("a\nb\n\nc\n")
    assert log_tail(tmp_path / "full.log", 2) == "b | c"


def test_children_share_the_clock_and_not_locusts_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCUST_USERS", "7")
    environment = child_environment()
    assert environment[ANCHOR_VARIABLE] == str(ANCHOR_NS)
    assert "LOCUST_USERS" not in environment


def test_threads_of_an_arm_on_the_cpu_are_set_before_it_starts() -> None:
    def variables(device: str, threads: int) -> dict[str, str]:
        return thread_variables(ArmConfig(model=ModelConfig(device=device), engine=EngineConfig(threads=threads)))

    assert variables("cpu", 3) == {"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3"}
    assert variables("cuda:1", 3) == variables("cpu", 0) == {}
