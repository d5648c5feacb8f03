"""A command and a temporary folder that end with the process that started them, even by kill -9."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

# Runs between this process and the program, in a process of its own: subprocess's preexec_fn is not safe beside
# threads. It raises the limit of open files, asks Linux for a signal at the parent's end and becomes the program. A
# parent that ended before that is known by its process id.
_LAUNCHER = """\
import os, resource, sys
parent, number, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
try:
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
except (ValueError, OSError):
    pass
if sys.platform == "linux":
    import ctypes
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
if os.getppid() != parent:
    sys.exit("the process that started this one is gone")
os.execvp(command[0], command)
"""
# Nothing is written to its stdin, which ends with the process that holds the other end. Children that outlive that one
# for a moment may still write: the second time is for them.
_REMOVER = 'cat >/dev/null; rm -rf "$0"; sleep 1; rm -rf "$0"'
_LONGEST_PLACE = 70  # bytes; the path of a socket may have 107


def launched(command: Sequence[str], *, death_signal: signal.Signals = signal.SIGKILL) -> list[str]:
    """Return the command line that becomes `command`, which gets `death_signal` when this process ends.

    Linux ties the signal to the thread that forks: start it from one that lives as long as the child.
    """
    launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), str(int(death_signal))]
    return [*launcher, *command]


class TemporaryFolder:
    """A new folder at `path` that this user alone may enter. With `for_sockets` its path is short enough for one."""

    def __init__(self, prefix: str, *, for_sockets: bool = False) -> None:
        place = tempfile.gettempdir()
        if for_sockets and len(os.fsencode(place)) >= _LONGEST_PLACE:
            place = "/tmp"
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
        try:
            self._remover = subprocess.Popen(
                ["/bin/sh", "-c", _REMOVER, str(self.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # what ends this process may be meant for its whole group
            )
        except OSError:
            self.path.rmdir()
            raise

    def remove(self) -> None:
        """Remove the folder, but for what cannot be removed. A second call does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._remover.kill()
        self._remover.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()
