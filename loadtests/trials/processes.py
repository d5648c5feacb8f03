"""Child processes of a run, and their environment: each in a session of its own, logged to a file, and never outliving
its parent."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, cast

from loadtests.page.serving import TOKEN_VARIABLE as PAGE_TOKEN_VARIABLE
from loadtests.provider.server import TOKEN_VARIABLE as PROVIDER_TOKEN_VARIABLE
from loadtests.workers.channel_token import TOKEN_VARIABLE
from servers.clock import anchored_environment
from servers.config import ArmConfig
from servers.launcher import launched


def child_environment() -> dict[str, str]:
    """This process's environment with the shared clock, without variables of Locust and without the secrets of its
    channel, of the live page and of those who ask about a candidate."""
    secrets = {TOKEN_VARIABLE, PAGE_TOKEN_VARIABLE, PROVIDER_TOKEN_VARIABLE}
    kept = {key: value for key, value in os.environ.items() if not key.startswith("LOCUST_") and key not in secrets}
    return {**kept, **anchored_environment()}


def thread_variables(arm: ArmConfig) -> dict[str, str]:
    """What sizes the thread pools of an arm on the CPU. They are sized once, when torch is imported."""
    threads = arm.engine.threads
    if not threads or arm.model.device.startswith("cuda"):
        return {}
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


class Child:
    """One started process, the leader of its own process group, with its output in `log_path`.

    `environment` is the whole environment, this process's by default. With `commands` it reads lines from its stdin.
    Start it from the main thread: the kernel ties the death signal to the thread that forked.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        log_path: Path,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        commands: bool = False,
    ) -> None:
        self.name = name
        self.log_path = log_path
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                launched(argv),
                stdin=subprocess.PIPE if commands else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=None if environment is None else dict(environment),
                cwd=folder,
                start_new_session=True,  # the terminal's Ctrl-C reaches the orchestrator alone, which stops in order
            )
        stdout = cast("IO[bytes]", self._process.stdout)  # a pipe was asked for
        self._reader = threading.Thread(target=self._read, args=(stdout,), name=f"{name}-stdout", daemon=True)
        self._reader.start()

    def _read(self, stream: IO[bytes]) -> None:
        with self.log_path.open("ab") as log:
            for line in stream:
                if not line.startswith(b"{"):  # the log leaves out what is for programs
                    log.write(line)
                    log.flush()
                self._lines.put(line.decode(errors="replace").rstrip("\n"))

    @property
    def pid(self) -> int:
        """The process id, which is also the id of the process group."""
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code (negative: the signal), or None while the process runs."""
        return self._process.poll()

    def line(self, timeout_s: float) -> str | None:
        """The next line that the process printed on stdout, or None when none came in time."""
        try:
            return self._lines.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def command(self, line: str) -> None:
        """The process was sent the line on its stdin, if it still runs; it was started with `commands`."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def wait(self, timeout_s: float) -> int | None:
        """The exit code once the process ended, or None when it still runs after `timeout_s`."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def ask_to_stop(self) -> None:
        """The process was sent SIGTERM, if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def stop(self, grace_s: float) -> int:
        """The process and its whole group are gone: SIGTERM to the leader, SIGKILL to the group after `grace_s`."""
        self.ask_to_stop()
        self.wait(grace_s)
        return self.kill()

    def kill_now(self) -> None:
        """The process and its whole group were sent SIGKILL. Safe in a signal handler."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def kill(self) -> int:
        """The process and its whole group are gone at once; returns the exit code."""
        self.kill_now()
        code = self._process.wait()
        self._reader.join(timeout=1.0)
        return code

    def log_tail(self, lines: int = 5) -> str:
        """The last non-empty lines of the log on one line, or a note that it is empty."""
        return log_tail(self.log_path, lines)


def log_tail(path: Path, lines: int = 5) -> str:
    """The last `lines` non-empty lines of a log file, joined with " | "; says so when there are none."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - 16_384))
            text = log.read().decode(errors="replace")
    except OSError:
        return "no log"
    kept = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(kept[-lines:]) or "its log is empty"


def describe_exit(code: int) -> str:
    """ "exit code 1", or "SIGKILL" for a process that a signal ended."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
