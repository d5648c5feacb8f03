"""What every call records on any wire: when it was sent, when its tokens came and how it ended."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from typing import Any

from gevent import get_hub

from tailgate.loadtests.external.client_security import without_token
from tailgate.servers.clock import now_ns
from tailgate.servers.complaint import one_line


class Call:
    """One request: complete once `status` is set. Times are ns since the epoch on the client's clock.

    `status` is a gRPC status name for all kinds of arms. `token_ns` has one receive time per token. `on_done` runs
    once, inside the reader, and may run before the call is returned to its starter: it must neither block nor raise.
    `token` is the bearer token of the request, which some servers repeat and no error may hold.
    A subclass tells the wire of a cancel (`_withdraw`) and frees what only a running call needs (`_release`).
    """

    def __init__(
        self, *, timeout_s: float | None = None, on_done: Callable[[Any], None] | None = None, tag: Any = None
    ) -> None:
        self.start_ns = self.sent_ns = now_ns()
        self.end_ns = 0
        self.token_ns = array("q")
        self.status = ""
        self.error = ""
        self.token = ""
        self.initial_metadata: Mapping[str, str] = {}
        self.trailing_metadata: dict[str, str] = {}
        self.tag = tag
        self.deadline_ns = 0  # 0: none
        self._on_done = on_done
        self._timer: Any = None
        if timeout_s is not None:
            self.deadline_ns = self.start_ns + int(timeout_s * 1e9)
            self._timer = get_hub().loop.timer(max(0.0, timeout_s))
            # From now on, not from when the loop last woke: a busy loop would end calls early.
            self._timer.start(self._on_deadline, update=True)

    @property
    def first_token_ns(self) -> int | None:
        return self.token_ns[0] if self.token_ns else None

    @property
    def output_tokens(self) -> int:
        return len(self.token_ns)

    def add_tokens(self, count: int, at_ns: int) -> None:
        self.token_ns.extend([at_ns] * count)

    def cancel(self, status: str = "CANCELLED", error: str = "cancelled by the client") -> None:
        """End the call with `status` and tell the server. Do nothing to a call that has ended."""
        if not self.status:
            self.finish(status, error, now_ns())
            self._withdraw()

    def finish(self, status: str, error: str, at_ns: int) -> None:
        """End the call at `at_ns` and run `on_done`. Do nothing to a call that has ended."""
        if self.status:
            return
        # What a server says of its error may have any length, hold any character, and repeat the token.
        error = one_line(without_token(error, self.token)) if error else ""
        self.status, self.error, self.end_ns = status, error, at_ns
        if self._timer is not None:
            self._timer.close()
            self._timer = None
        self._release()
        on_done, self._on_done = self._on_done, None
        if on_done is not None:
            on_done(self)

    def _withdraw(self) -> None:
        """Tell the server that this call is cancelled."""

    def _release(self) -> None:
        """Free what only a running call needs."""

    def _on_deadline(self) -> None:
        self.cancel("DEADLINE_EXCEEDED", "the deadline passed")
