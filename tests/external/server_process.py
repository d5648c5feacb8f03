"""Servers of other projects, each a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def answers(url: str) -> bool:
    """A GET of `url` is answered with 2xx."""
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except (urllib.error.URLError, OSError):
        return False
    return True


@contextmanager
def running(
    command: Sequence[str],
    *,
    log: Path,
    ready: Callable[[], bool],
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """`command` runs and is ready, until the end. What it prints is in `log`."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}, stdout=file, stderr=file
        )
    try:
        deadline = time.monotonic() + timeout_s
        while not ready():
            assert process.poll() is None, log.read_text()[-5000:]
            assert time.monotonic() < deadline, f"not ready after {timeout_s:g} s: {log.read_text()[-5000:]}"
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait(60)
