"""Messages to the front, in the order in which they were put; a thread of their own sends them over the pipe."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from multiprocessing.connection import Connection


class Outbox(queue.SimpleQueue[object]):
    """`put` takes messages from any thread, without a wait; `send` is the body of the thread that sends them."""

    def __init__(self) -> None:
        super().__init__()
        self._flushes: deque[threading.Event] = deque()  # each is in the queue too, behind what it waits for

    def flush(self, timeout_s: float) -> bool:
        """Whether everything put until now is in the pipe, which took at most `timeout_s`.

        The calling thread gives the interpreter to the one that sends: after the call it may keep it for long.
        """
        sent = threading.Event()
        self._flushes.append(sent)
        self.put(sent)
        return sent.wait(timeout_s)

    def close(self) -> None:
        """Nothing more comes: the thread ends once it has sent what is there."""
        self.put(None)

    def send(self, connection: Connection) -> None:
        """Everything is sent until the outbox is closed or the front is gone."""
        with contextlib.suppress(OSError):
            more = True
            while more:
                messages = [self.get()]
                while not self.empty():
                    messages.append(self.get())
                if not (more := messages[-1] is not None):
                    messages.pop()
                flushed = []
                if self._flushes:  # rarely: not every message is to be looked at
                    flushed = [item for item in messages if isinstance(item, threading.Event)]
                    messages = [item for item in messages if not isinstance(item, threading.Event)]
                connection.send(messages)
                for event in flushed:
                    self._flushes.popleft()
                    event.set()
