"""A folder among the temporary files that is gone with the process that made it, whatever ends that."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

# Nobody writes to its stdin, which ends with the process that holds the other end. Children that outlive that one for
# a moment may still write: the second time is for them.
_REMOVER = """\
import shutil, sys, time
sys.stdin.read()
shutil.rmtree(sys.argv[1], ignore_errors=True)
time.sleep(1)
shutil.rmtree(sys.argv[1], ignore_errors=True)
"""
_LONGEST_PLACE = 70  # bytes; the path of a socket may have 107


class TemporaryFolder:
    """A new folder at `path` that this user alone may enter. With `for_sockets` its path is short enough for one."""

    def __init__(self, prefix: str, *, for_sockets: bool = False) -> None:
        place = tempfile.gettempdir()
        if for_sockets and len(os.fsencode(place)) >= _LONGEST_PLACE:
            place = "/tmp"
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
        try:
            self._remover = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _REMOVER, str(self.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # what ends this process may be meant for its whole group
            )
        except OSError:
            self.path.rmdir()
            raise

    def remove(self) -> None:
        """The folder is gone, but for what cannot be removed. A second call does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._remover.kill()
        self._remover.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()
