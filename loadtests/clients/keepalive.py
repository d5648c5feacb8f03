"""Whether a silent server is still there: a PING after a while, and the end of the connection without an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gevent import get_hub

from servers.clock import now_ns

if TYPE_CHECKING:
    from loadtests.clients.connection import Connection
    from loadtests.clients.inference import InferenceClient


class Keepalive:
    """Watches one connection, only while calls are open, since servers count idle pings as abuse.

    Any byte that comes counts as an answer.
    """

    def __init__(self, connection: Connection, client: InferenceClient) -> None:
        self._connection = connection
        self._client = client  # whose interval grows when a server calls the pings too many
        self._timer: Any = None
        self.pinged_ns = 0  # when the last PING left; 0: it was answered
        self._check_in(client.keepalive_s)

    def stop(self) -> None:
        """The connection is not watched any more."""
        if self._timer is not None:
            self._timer.stop()
            self._timer.close()
            self._timer = None

    def check(self) -> None:
        """A silent server was sent a PING; where the last one was not answered in time, the connection is closed."""
        connection, at_ns = self._connection, now_ns()
        interval_s, timeout_s = self._client.keepalive_s, self._client.keepalive_timeout_s
        silent_s = (at_ns - connection.last_read_ns) / 1e9
        if self.pinged_ns and connection.last_read_ns < self.pinged_ns:
            waited_s = (at_ns - self.pinged_ns) / 1e9
            if waited_s >= timeout_s and not connection.has_bytes_to_read():
                connection.close("UNAVAILABLE", f"the server was silent for {silent_s:.1f} s and answered no ping")
            else:
                self._check_in(min(interval_s, max(0.0, timeout_s - waited_s)))
            return
        self.pinged_ns = 0
        if silent_s < interval_s:
            self._check_in(interval_s - silent_s)
        elif connection.streams:
            self.pinged_ns = at_ns
            connection.ping()
            self._check_in(min(interval_s, timeout_s))
        else:
            self._check_in(interval_s)

    def _check_in(self, seconds: float) -> None:
        self.stop()
        self._timer = get_hub().loop.timer(max(0.001, seconds))
        self._timer.start(self.check)
