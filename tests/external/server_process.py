"""Servers of other projects, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.fakes.processes import wait_for


def answers(url: str) -> bool:
    """Return whether a GET of `url` is answered with 2xx."""
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except OSError:
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
    """Run `command` until the block ends, which begins once it is ready."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=variables, stdout=file, stderr=file)

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text()[-5000:]
        return ready()

    try:
        wait_for(is_ready, timeout_s, every_s=0.1, otherwise=lambda: log.read_text()[-5000:])
        yield
    finally:
        process.terminate()
        process.wait(60)
