"""Child processes: started, heard, stopped and logged. None outlives the process that started it, even by kill -9.

`Child` is the one way to run a child process.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# Runs between this process and the program, in a process of its own: subprocess's preexec_fn is not safe with
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
    """Return the command line that becomes `command`, which gets `death_signal` when this process ends."""
    launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), str(int(death_signal))]
    return [*launcher, *command]


def say(message: DataclassInstance) -> None:
    """Print the message, a dataclass, as one JSON line for the process that started this one."""
    print(json.dumps({type(message).__name__: asdict(message)}), flush=True)


def messages_of(*kinds: type[object]) -> Callable[[bytes], object]:
    """Return what makes one of these dataclasses of a line that `say` printed, and None of any other line; it raises
    ValueError where one does not have its fields."""
    from pydantic import TypeAdapter  # the children that only speak do not pay for it

    adapters = {kind.__name__: TypeAdapter(kind) for kind in kinds}

    def parse(line: bytes) -> object:
        if not line.startswith(b'{"'):
            return None
        name, fields = next(iter(json.loads(line).items()))
        return adapters[name].validate_python(fields) if name in adapters else None

    return parse


_children: set[Child] = set()


def kill_children() -> None:
    """Send SIGKILL to every child of this process with its whole group. Safe in a signal handler."""
    for child in tuple(_children):
        child.kill_now()


class Child:
    """One started program, the leader of its own session, so that a Ctrl-C of the terminal reaches its parent alone.

    `log_path` gets what it prints, without the messages: the lines of stdout from which `parse` makes one. Without a
    path it prints where this process does, and has no messages. With `commands` it reads lines from its stdin. It gets
    `death_signal` when this process ends; the kernel ties that to the thread that forks, so start it from the main
    thread.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log_path: Path | None,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        commands: bool = False,
        parse: Callable[[bytes], object] | None = None,
        death_signal: signal.Signals = signal.SIGKILL,
    ) -> None:
        self.name = name
        self._log_path = log_path
        self._messages: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._reader: threading.Thread | None = None
        with contextlib.ExitStack() as stack:
            log = None
            if log_path is not None:
                log_path.parent.mkdir(parents=True, exist_ok=True)
                log = stack.enter_context(log_path.open("ab", buffering=0))
            self._process = subprocess.Popen(
                launched(command, death_signal=death_signal),
                stdin=subprocess.PIPE if commands else subprocess.DEVNULL,
                stdout=subprocess.PIPE if parse is not None else log,
                stderr=log,
                env=None if environment is None else dict(environment),
                cwd=folder,
                start_new_session=True,
            )
            _children.add(self)
            if parse is not None and log is not None:
                stack.pop_all()  # the reader closes it
                self._reader = threading.Thread(
                    target=self._read, args=(parse, log), name=f"{name}-stdout", daemon=True
                )
                self._reader.start()

    def _read(self, parse: Callable[[bytes], object], log: IO[bytes]) -> None:
        with log:
            for line in cast("IO[bytes]", self._process.stdout):  # a pipe was asked for
                message = None
                with contextlib.suppress(ValueError):
                    message = parse(line)
                if message is not None:
                    self._messages.put(message)
                else:
                    with contextlib.suppress(OSError):  # a full disk keeps no message from its reader
                        log.write(line)

    @property
    def pid(self) -> int:
        """The process id, which is also the id of the process group."""
        return self._process.pid

    @property
    def log_path(self) -> Path:
        assert self._log_path is not None
        return self._log_path

    def poll(self) -> int | None:
        """Return the exit code (negative: the signal), or None while the process runs."""
        return self._process.poll()

    def receive(self, timeout_s: float = 0.0) -> tuple[list[object], int | None]:
        """Return the messages since the last call, and the exit code where the process has ended: then none follows.

        Wait for the first message up to `timeout_s`.
        """
        code = self.poll()
        if code is not None and self._reader is not None:
            self._reader.join(timeout=1.0)  # a descendant may hold the pipe open: it is waited for once
            self._reader = None
        messages: list[object] = []
        with contextlib.suppress(queue.Empty):
            wait_s = timeout_s if code is None else 0.0
            messages.append(self._messages.get(timeout=wait_s) if wait_s else self._messages.get_nowait())
            while True:
                messages.append(self._messages.get_nowait())
        return messages, code

    def command(self, line: str) -> None:
        """Write the line to its stdin, if it still runs; it was started with `commands`."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return the exit code once the process has ended, or None when it still runs after `timeout_s`."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def ask_to_stop(self) -> None:
        """Send SIGTERM to the process, if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def stop(self, grace_s: float) -> int:
        """End the process and its whole group: SIGTERM to the leader, SIGKILL to the group after `grace_s`."""
        self.ask_to_stop()
        self.wait(grace_s)
        return self.kill()

    def kill_now(self) -> None:
        """Send SIGKILL to the process and its whole group. Safe in a signal handler."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def kill(self) -> int:
        """End the process and its whole group at once, and return the exit code."""
        self.kill_now()
        code = self._process.wait()
        _children.discard(self)
        if self._reader is not None:
            self._reader.join(timeout=1.0)
        return code

    def log_tail(self, lines: int = 5) -> str:
        return log_tail(self.log_path, lines)

    def ending(self, code: int, lines: int = 2) -> str:
        """Return "ended with exit code 1: …" with the last lines of its log."""
        return f"ended with {describe_exit(code)}: {self.log_tail(lines)}"


def log_tail(path: Path, lines: int = 5) -> str:
    """Return the last `lines` non-empty lines of a log file, joined with " | "; say so when there are none."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - 16_384))
            text = log.read().decode(errors="replace")
    except OSError:
        return "no log"
    kept = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("Traceback (")]
    return " | ".join(kept[-lines:]) or "its log is empty"


def describe_exit(code: int) -> str:
    """Return "exit code 1", or "SIGKILL" for a process that a signal ended."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


@contextlib.contextmanager
def temporary_folder(prefix: str, *, for_sockets: bool = False) -> Iterator[Path]:
    """Yield a new folder that this user alone may enter. With `for_sockets` its path is short enough for one.

    It is removed at the end of the block, and soon after a kill of this process.
    """
    place = tempfile.gettempdir()
    if for_sockets and len(os.fsencode(place)) >= _LONGEST_PLACE:
        place = "/tmp"
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
    try:
        remover = subprocess.Popen(
            ["/bin/sh", "-c", _REMOVER, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # what ends this process may be meant for its whole group
        )
    except OSError:
        path.rmdir()
        raise
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        remover.kill()
        remover.communicate()


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """A replica listens. `tailgate serve` prints the same fields as its JSON line."""

    port: int
    pid: int
    metrics_port: int = 0
    further_ports: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The reference is loaded and waits for a line on its stdin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the reference measured, or why it did not."""

    at_ns: int
    values: Mapping[str, Any]
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """How far a measurement of parity is."""

    name: str
    done: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a measurement of parity has loaded."""

    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Why a measurement of parity cannot be made."""

    why: str
