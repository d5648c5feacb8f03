"""A command that ends with the process that started it, even by kill -9."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

# Runs between this process and the program, in a process of its own: subprocess's preexec_fn is not safe beside
# threads. It asks Linux for a signal at the parent's end and becomes the program. A parent that ended before that is
# seen by its process id.
_LAUNCHER = """\
import os, sys
parent, number, more_files, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1", sys.argv[4:]
if more_files:
    import resource
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


def launched(
    command: Sequence[str], *, death_signal: signal.Signals = signal.SIGKILL, more_files: bool = False
) -> list[str]:
    """The command line that becomes `command`, which gets `death_signal` when this process ends.

    Linux ties the signal to the thread that forks: start it from one that lives as long as the child. With `more_files`
    the limit of open files is as high as it may be.
    """
    launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), str(int(death_signal))]
    return [*launcher, str(int(more_files)), *command]
