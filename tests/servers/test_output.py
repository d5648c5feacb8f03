"""How errors read."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import servers.rpc
from servers import stdout
from servers.complaint import LONGEST, fault, one_line, unwritten
from servers.config import ModelConfig
from servers.fields import ConfigError
from servers.host_memory import host_memory
from servers.rpc.generate import PACKAGE, generate
from servers.temporary_folder import TemporaryFolder
from tests.fakes.patience import wait_for


@given(st.text(max_size=50) | st.text(alphabet=st.characters(codec=None), max_size=50))
def test_every_message_becomes_one_printable_line(text: str) -> None:
    assert one_line(text).isprintable()


def test_a_long_value_is_left_out_and_the_remedy_stays() -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig(dtype="x" * 20_000)  # type: ignore[arg-type]
    said = str(caught.value)
    assert said.startswith("model.dtype is 'xxx")
    assert "characters left out" in said
    assert said.endswith("use one of auto, float32, float16, bfloat16")
    assert len(said) < LONGEST + 100


def raised() -> ZeroDivisionError:
    try:
        1 / 0  # noqa: B018
    except ZeroDivisionError as error:
        return error
    raise AssertionError


def test_a_fault_is_one_line_that_names_the_file_with_its_traceback(tmp_path: Path) -> None:
    said = fault(raised(), tmp_path)
    (path,) = tmp_path.iterdir()
    assert f"ZeroDivisionError: division by zero: its traceback is in {path}" in said
    assert "in raised" in path.read_text()


def test_a_fault_is_told_where_no_folder_can_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    assert "could not be written; it was raised at" in fault(raised(), tmp_path / "gone")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    said = fault(MemoryError(), tmp_path / "gone")
    assert said.startswith("out of memory")
    assert str(os.getpid()) in said


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free the disk"),
        (errno.EROFS, "let it be written to"),
        (errno.ENOMEM, "free memory"),
        (errno.EIO, "look after the disk"),
        (errno.ENOENT, "leave its folder where it is"),
    ],
)
def test_a_disk_that_takes_nothing_has_the_remedy_of_its_reason(number: int, remedy: str) -> None:
    error = OSError(number, os.strerror(number))
    assert unwritten(error) == f"[Errno {number}] {os.strerror(number)}: {remedy}"


def test_a_thread_that_cannot_start_is_no_fault_of_tailgate(tmp_path: Path) -> None:
    assert fault(RuntimeError("can't start new thread"), tmp_path).startswith("out of memory")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "as_json", "lines"),
    [
        (Terminal, False, ["words"]),
        (Terminal, True, ['{"found": 1}']),
        (io.StringIO, False, ["words", '{"found": 1}']),
        (io.StringIO, True, ['{"found": 1}']),
    ],
)
def test_a_terminal_is_shown_words_and_a_program_one_object_last(
    stream: type[io.StringIO], as_json: bool, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", shown := stream())
    stdout.write("words", {"found": 1}, as_json=as_json)
    assert shown.getvalue().splitlines() == lines


def test_an_object_without_words_is_one_line_for_a_program_and_none_at_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdout", piped := io.StringIO())
    stdout.write("", {"port": 1})
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    stdout.write("", {"port": 1})
    assert (json.loads(piped.getvalue()), terminal.getvalue()) == ({"port": 1}, "")


def test_what_json_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        stdout.write("", {"ratio": float("nan")}, as_json=True)


@pytest.mark.parametrize(("terminal", "columns"), [(80, 80), (20, 60), (500, 140)])
def test_tables_are_as_wide_as_the_terminal_within_limits(
    terminal: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(terminal))
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert stdout.columns() == columns
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert stdout.columns() == stdout.PIPE_COLUMNS


def test_colours_take_no_room_on_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys, "stdout", shown := Terminal())
    row = " ".join(f"\x1b[1;31m{number:4}\x1b[0m" for number in range(11))
    stdout.write(row, {})
    assert shown.getvalue() == f"{row}\n"


_MAKER = """
import sys, time
from servers.temporary_folder import TemporaryFolder
folder = TemporaryFolder("of-this-test-")
print(folder.path, flush=True)
time.sleep(600)
"""


def test_it_is_this_users_alone_and_goes_when_it_is_removed() -> None:
    with TemporaryFolder("of-this-test-") as folder:
        pass
    assert not folder.path.exists()
    folder = TemporaryFolder("of-this-test-")
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    (folder.path / "admin").touch()
    folder.remove()
    folder.remove()
    assert not folder.path.exists()


def test_its_path_is_short_where_that_of_temporary_files_is_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = TemporaryFolder("of-this-test-", for_sockets=True)
    folder.remove()
    assert len(str(folder.path / "admin")) <= 107


def test_after_kill_9_of_its_process_it_is_gone() -> None:
    maker = subprocess.Popen([sys.executable, "-c", _MAKER], stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    path = Path(maker.stdout.readline().strip())
    assert path.is_dir()
    maker.kill()
    maker.communicate()
    wait_for(lambda: not path.exists())


def test_memory_is_told_in_bytes(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  16 kB\nMemFree: 1 kB\nMemAvailable:  4 kB\nHugePages_Total:  0\n")
    assert host_memory(tmp_path) == (16384, 4096)


def test_committed_stubs_are_what_the_pinned_generator_writes(tmp_path: Path) -> None:
    for fresh in generate(tmp_path):
        committed = PACKAGE / fresh.name
        assert committed.read_text() == fresh.read_text(), f"{fresh.name} is stale: run make proto"


def test_the_stated_floors_are_those_of_the_generator() -> None:
    project = (Path(servers.rpc.__file__).parents[2] / "pyproject.toml").read_text()
    grpc_floor = re.search(r"GRPC_GENERATED_VERSION = '([\d.]+)'", (PACKAGE / "inference_pb2_grpc.py").read_text())
    protobuf_floor = re.search(r"# Protobuf Python Version: (\d+\.\d+)", (PACKAGE / "inference_pb2.py").read_text())
    assert grpc_floor is not None
    assert protobuf_floor is not None
    assert f'"grpcio>={grpc_floor[1]}"' in project
    assert f'"protobuf>={protobuf_floor[1]}"' in project
