"""Child processes: what they say is heard, their ends take everything along, and none outlives its parent."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tailgate.servers.processes import Child, describe_exit, log_tail, messages_of, temporary_folder
from tests.fakes.processes import PATIENCE_S, wait_for

pytestmark = pytest.mark.process


@dataclass(frozen=True, slots=True)
class Done:
    """A message."""

    count: int
    why: str = ""


SPEAKER = """
import sys
from dataclasses import dataclass
from tailgate.servers.processes import say
@dataclass
class Done:
    count: int
    why: str = "all"
@dataclass
class Other:
    count: int
print("a library greets", flush=True)
say(Other(3))
print('{"Done": {"count": "many"}}', flush=True)
say(Done(int(sys.stdin.readline())))
sys.stderr.write("the end\\n")  # at once: another line may come between what print writes and its end
sys.exit(7)
"""


def test_messages_are_typed_and_every_other_line_is_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "speaker.log"
    child = Child("speaker", [sys.executable, "-c", SPEAKER], log_path=log, commands=True, parse=messages_of(Done))
    child.command("12")
    assert child.wait(PATIENCE_S) == 7
    # What it said right before its end is heard with its end.
    assert child.receive() == ([Done(12, "all")], 7)
    assert child.receive() == ([], 7)
    assert child.kill() == 7
    assert child.ending(7).startswith("ended with exit code 7: ")
    lines = {"a library greets", '{"Other": {"count": 3}}', '{"Done": {"count": "many"}}', "the end"}
    assert set(log.read_text().splitlines()) == lines


def is_gone(pid: int) -> bool:
    """Whether the process ended; a zombie that only waits to be reaped by init has."""
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


# The leader ends at once on SIGTERM; what it started ignores the signal.
FAMILY = """
import subprocess, sys, time
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
inner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
inner.stdout.readline()
print(inner.pid, flush=True)
time.sleep(600)
"""


def test_a_stopped_child_takes_its_whole_group_along(tmp_path: Path) -> None:
    child = Child("family", [sys.executable, "-c", FAMILY], log_path=tmp_path / "family.log", parse=int)
    (inner,), _ = child.receive(PATIENCE_S)
    assert describe_exit(child.stop(5.0)) == "SIGTERM"
    wait_for(lambda: is_gone(int(str(inner))))


PARENT = """
import sys, threading
from pathlib import Path
from tailgate.loadtests.commands.exits import stopping
from tailgate.servers.processes import Child
with stopping(lambda: None, print):
    child = Child("family", [sys.executable, "-c", sys.argv[1]], log_path=Path(sys.argv[2]), parse=int)
    (inner,), _ = child.receive(100)
    print(child.pid, inner, flush=True)
    threading.Event().wait()
"""


@pytest.mark.parametrize("numbers", [[signal.SIGKILL], [signal.SIGINT, signal.SIGINT]])
def test_no_child_outlives_a_killed_parent_or_a_second_ctrl_c(numbers: list[int], tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, FAMILY, str(tmp_path / "family.log")]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    leader, inner = map(int, parent.stdout.readline().split())
    for number in numbers:
        parent.send_signal(number)
        parent.stdout.readline()  # "stopping in order", or its end
    parent.communicate(timeout=PATIENCE_S)
    wait_for(lambda: is_gone(leader))
    if signal.SIGKILL in numbers:
        os.kill(inner, signal.SIGKILL)  # the kernel ends the child, and not what the child started
    else:
        wait_for(lambda: is_gone(inner))


def test_the_tail_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    assert log_tail(log) == "no log"
    log.write_text("\n\n")
    assert log_tail(log) == "its log is empty"
    log.write_text("a\nb\n\nc\n")
    assert log_tail(log, 2) == "b | c"


def test_a_temporary_folder_is_private_and_can_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with temporary_folder("of-this-test-") as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "admin").touch()
    assert not folder.exists()
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with temporary_folder("of-this-test-", for_sockets=True) as folder:
        assert len(str(folder / "admin")) <= 107
