"""A temporary folder is gone with the process that made it, also after kill -9."""

from __future__ import annotations

import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from servers.temporary_folder import TemporaryFolder
from tests.fakes.patience import wait_for

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
