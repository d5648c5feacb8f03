"""Messages to the front, in the order in which they were put; a thread of their own sends them over the pipe."""

from __future__ import annotations

import contextlib
import queue
import threading
from multiprocessing.connection import Connection


class Outbox:
    """Takes messages from any thread, without a wait; `send` is the body of the thread that sends them."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[object] = queue.SimpleQueue()

    def put(self, message: object) -> None:
        """The message will be sent."""
        self._messages.put(message)

    def flush(self, timeout_s: float) -> bool:
        """Whether everything put until now is in the pipe, which took at most `timeout_s`.

        The calling thread gives the interpreter to the one that sends: after the call it may keep it for long.
        """
        sent = threading.Event()
        self._messages.put(sent)
        return sent.wait(timeout_s)

    def close(self) -> None:
        """Nothing more comes: the thread ends once it has sent what is there."""
        self._messages.put(None)

    def send(self, connection: Connection) -> None:
        """Everything is sent until the outbox is closed or the front is gone."""
        with contextlib.suppress(OSError):
            more = True
            while more:
                items = [self._messages.get()]
                while not self._messages.empty():
                    items.append(self._messages.get())
                if not (more := items[-1] is not None):
                    items.pop()
                if messages := [item for item in items if not isinstance(item, threading.Event)]:
                    connection.send(messages)
                for item in items:
                    if isinstance(item, threading.Event):
                        item.set()
