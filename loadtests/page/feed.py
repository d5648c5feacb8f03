"""The state of the run, told to every browser that listens: all of it at first, then what changed."""

from __future__ import annotations

import json
import queue
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from loadtests.page.preview import Preview
from loadtests.page.state import RunState

MOST_LISTENERS = 64
END = b""  # after the last message
_BEHIND = 8  # messages that a browser may leave lying; one that leaves more asks anew, and gets all


class Listener:
    """One browser: messages wait in it. `lost` once it fell behind."""

    def __init__(self) -> None:
        self.lost = False
        self.began = False
        self._waiting: queue.Queue[bytes] = queue.Queue(maxsize=_BEHIND)

    def put(self, message: bytes) -> None:
        """The message waits, or the listener is lost."""
        try:
            self._waiting.put_nowait(message)
        except queue.Full:
            self.lost = True

    def next(self, timeout_s: float) -> bytes | None:
        """The next message; None when none came in time."""
        try:
            return self._waiting.get(timeout=timeout_s)
        except queue.Empty:
            return None


class Feed:
    """Reads the run directory every `every_s` while somebody listens, and not at all while nobody does; nor is there a
    `preview` then."""

    def __init__(self, state: RunState, *, preview: Preview | None = None, every_s: float = 1.0) -> None:
        self._state = state
        self._preview = preview
        self._every_s = every_s
        self._listeners: list[Listener] = []
        self._changed = threading.Condition()
        self._ending = self._complained = False
        self.ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)
        self._thread.start()

    @contextmanager
    def listening(self) -> Iterator[Listener | None]:
        """A listener until the end of the block; None where there are too many."""
        listener = Listener()
        with self._changed:
            full = len(self._listeners) >= MOST_LISTENERS
            if not full:
                self._listeners.append(listener)
                self._changed.notify()
        try:
            yield None if full else listener
        finally:
            with self._changed:
                if listener in self._listeners:
                    self._listeners.remove(listener)

    @property
    def listeners(self) -> int:
        """How many listen now."""
        return len(self._listeners)

    def finish(self) -> None:
        """Whoever listens is told the last state; `ended` is set once that is on its way."""
        with self._changed:
            self._ending = True
            self._changed.notify()

    def _run(self) -> None:
        last_s = 0.0
        while True:
            self._want_preview()
            with self._changed:
                self._changed.wait_for(lambda: self._listeners or self._ending)
                ending = self._ending
                if not ending:
                    # A browser that comes is answered at once, unless the directory was just read.
                    fresh = any(not listener.began for listener in self._listeners)
                    rest = last_s + self._every_s * (0.2 if fresh else 1.0) - time.monotonic()
                    if rest > 0 and self._changed.wait(rest):
                        continue
                listeners = list(self._listeners)
            if listeners:
                self._tell(listeners, last=ending)
            last_s = time.monotonic()
            if ending:
                self._want_preview()
                self.ended.set()
                return

    def _want_preview(self) -> None:
        if self._preview is None:
            return
        try:
            self._preview.want(bool(self._listeners) and not self._ending and self._state.wants_preview)
        except OSError:
            traceback.print_exc()
            self._preview = None

    def _tell(self, listeners: list[Listener], *, last: bool) -> None:
        try:
            self._state.refresh()
        except Exception:  # what was known before is still shown
            if not self._complained:
                self._complained = True
                traceback.print_exc()
        change = encoded(self._state.changes(), last=last)
        whole: bytes | None = None
        for listener in listeners:
            if listener.began:
                listener.put(change)
            else:
                whole = whole or encoded(self._state.whole(), last=last)
                listener.began = True
                listener.put(whole)
            if last:
                listener.put(END)


def encoded(message: dict[str, object], *, last: bool) -> bytes:
    """The message as a server-sent event."""
    text = json.dumps({**message, "last": last}, separators=(",", ":"), allow_nan=False)
    return f"data: {text}\n\n".encode()
