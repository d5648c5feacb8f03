"""The events that wait for one subscriber of the telemetry: those retained, then new ones, up to a limit."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

E = TypeVar("E")

# More than is ever retained: a subscriber further behind has stopped reading, and would fill this process's memory.
MOST_WAITING = 500_000


class Watcher(Generic[E]):
    """A queue of events with an end. `fell_behind` says that the end came because the subscriber did not read."""

    def __init__(self, kinds: tuple[type, ...], retained: Iterable[E], *, limit: int = MOST_WAITING) -> None:
        self.fell_behind = False
        self._kinds = kinds
        self._events: deque[E] = deque(retained)
        self._limit = limit
        self._changed = asyncio.Event()
        self._closed = False

    def put(self, event: E) -> None:
        """The subscriber will get `event`, if it is of a kind that it watches."""
        if self._closed or not isinstance(event, self._kinds):
            return
        if len(self._events) >= self._limit:
            self.fell_behind = True
            self._events.clear()
            self.close()
            return
        self._events.append(event)
        self._changed.set()

    def close(self) -> None:
        """Nothing more comes."""
        self._closed = True
        self._changed.set()

    async def get(self) -> E | None:
        """The next event, once there is one; None at the end."""
        while not self._events and not self._closed:
            self._changed.clear()
            await self._changed.wait()
        return self._events.popleft() if self._events else None

    def empty(self) -> bool:
        """Whether nothing waits now."""
        return not self._events
