"""Copy a file that grows on one host to another host, over Locust's channel.

The sender reads a piece from its disk, so that what waits for the network takes no memory. It sends the next one once
the receiver has answered with the size that it has written. A piece or an answer that was lost is sent again; what
comes twice is known by the byte at which it starts. So the copy is always the beginning of the file. Its last line
states rows and checksum (analysis/records/tables.py): a copy that lacks a byte shows it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gevent
from gevent.event import Event
from gevent.threadpool import ThreadPool

from tailgate.loadtests.generator.recorder import Spool, made
from tailgate.servers.complaint import ConfigError

PIECE_BYTES = 1 << 20
RESEND_AFTER_S = 5.0
_CHECK_EVERY_S = 0.1  # at a file that had nothing new


class FileSender:
    """Send what `path` holds and will hold, until `close`. `send` takes one message."""

    def __init__(self, path: Path, *, send: Callable[[dict[str, Any]], None]) -> None:
        self.path = path
        self._send = send
        self._confirmed = 0
        self._news = Event()
        self._thread = ThreadPool(1)
        self._greenlet = gevent.spawn(self._send_loop)

    def confirm(self, size: int) -> None:
        """Note that the other host has the first `size` bytes."""
        self._confirmed = max(self._confirmed, size)
        self._news.set()

    @property
    def missing_bytes(self) -> int:
        """How much of the file the other host may lack."""
        try:
            return self.path.stat().st_size - self._confirmed
        except OSError:
            return 0  # not made yet

    def wait_complete(self, timeout_s: float) -> bool:
        """Return whether the other host had the whole file within `timeout_s`."""
        with gevent.Timeout(timeout_s, False):
            while self.missing_bytes:
                gevent.sleep(0.02)
        return not self.missing_bytes

    def close(self) -> None:
        """Send nothing more."""
        self._greenlet.kill(block=False)

    def _send_loop(self) -> None:
        while True:
            self._news.clear()
            at = self._confirmed
            piece = self._thread.apply(_read, (self.path, at, PIECE_BYTES))
            if piece:
                self._send({"at": at, "bytes": piece})
            self._news.wait(RESEND_AFTER_S if piece else _CHECK_EVERY_S)


class FileReceiver:
    """Write a copy to the new file `path`. `confirm` is called with the size that is written.

    Raises ConfigError where the file exists or cannot be made.
    """

    def __init__(self, path: Path, *, confirm: Callable[[int], None]) -> None:
        self._confirm = confirm
        self._copy = made(path, lambda: path.open("xb"))
        self._file = Spool(self._append, end=self._copy.close, on_written=confirm)
        self._expected = 0

    def take(self, at: int, piece: bytes) -> None:
        """Append the piece that starts at byte `at`, if it is the next one."""
        if at == self._expected and self._file.offer(piece, len(piece)):
            self._expected += len(piece)
        elif at < self._expected:
            self._confirm(self._file.size)

    def close(self) -> None:
        """Write what came."""
        self._file.close()

    def _append(self, piece: bytes) -> None:
        self._copy.write(piece)
        self._copy.flush()


def folder_for(keep: Path, name: str) -> Path:
    """Make the folder under `keep` for the trial called `name`, such as "20260101T120000Z-demo/trial-01".

    The name came over the network: only its plain parts count, so that nothing outside `keep` is written.
    """
    path = keep.joinpath(*(part for part in re.findall(r"[A-Za-z0-9._-]+", name) if part.strip(".")))
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f'"{path}" cannot be made ({error.strerror or error}): give another --keep') from None
    return path


def _read(path: Path, at: int, most: int) -> bytes:
    """Return up to `most` bytes from `at`; none of a file that is not there or cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(at)
            return file.read(most)
    except OSError:
        return b""
