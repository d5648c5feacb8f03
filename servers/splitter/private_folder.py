"""A folder that only this user may enter, for sockets, which is gone with this process whatever ends it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# Nobody writes to its stdin: it ends when this process closes it, or is gone.
_REMOVER = "import shutil, sys; sys.stdin.read(); shutil.rmtree(sys.argv[1], ignore_errors=True)"
_LONGEST_PLACE = 70  # bytes; the path of a socket may have 107


class PrivateFolder:
    """A new folder at `path` among the temporary files, with a path short enough for a socket in it."""

    def __init__(self) -> None:
        place = tempfile.gettempdir()
        short = place if len(os.fsencode(place)) < _LONGEST_PLACE else "/tmp"
        self.path = Path(tempfile.mkdtemp(prefix="tailgate-envoy-", dir=short))
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
        """The folder is gone. A second call does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._remover.kill()
        self._remover.communicate()
