"""`tailgate split` that is killed takes Envoy and its temporary files with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fakes.listening import command_of, family

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.process
def test_after_kill_9_neither_envoy_nor_a_temporary_file_is_left(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    split = subprocess.Popen(
        [sys.executable, "-m", "loadtests.commands.main", "split", "--arm", "eager=127.0.0.1:1", "--json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert split.stdout is not None
    assert json.loads(split.stdout.readline())["port"]
    children = family(split.pid)[1:]
    assert any("envoy" in command_of(pid) for pid in children)
    assert list(temporary.iterdir())
    split.kill()
    split.communicate()
    deadline = time.monotonic() + 60
    while any(command_of(pid) for pid in children) or list(temporary.iterdir()):
        assert time.monotonic() < deadline, list(temporary.iterdir())
        time.sleep(0.05)
