"""How errors read."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servers.complaint import LONGEST, fault, one_line, unwritten
from servers.config import ModelConfig
from servers.fields import ConfigError


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
