"""Messages to the engine process, sent without waiting: it may stand still while its pipe is full.

A front that waited could answer neither health checks nor signals.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import select
import threading
from multiprocessing.connection import Connection

# The kernel calls a socket writable while at most a quarter of its buffer (208 KiB by default) is used.
_FITS_BYTES = 64 << 10


class Sender:
    """Sends in order: at once where the pipe has room, otherwise from a thread that waits for it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._poll = select.poll()
        self._poll.register(connection.fileno(), select.POLLOUT)
        self._late: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._waiting = 0  # messages given to the thread that are not in the pipe yet
        self._lock = threading.Lock()
        threading.Thread(target=self._send_late, name="sender", daemon=True).start()

    def send(self, message: object) -> None:
        """The message is in the pipe or will be, in the order of the calls; lost if the engine is gone."""
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        with self._lock:
            if self._waiting or len(body) > _FITS_BYTES or not self._has_room():
                self._waiting += 1
                self._late.put(body)
            else:
                self._write(body)

    def _has_room(self) -> bool:
        return any(events & select.POLLOUT for _, events in self._poll.poll(0))

    def _write(self, body: bytes) -> None:
        with contextlib.suppress(OSError):
            self._connection.send_bytes(body)

    def _send_late(self) -> None:
        while True:
            self._write(self._late.get())
            with self._lock:
                self._waiting -= 1
