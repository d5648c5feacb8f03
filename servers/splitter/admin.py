"""Envoy's admin interface: a request and its answer."""

from __future__ import annotations

import http.client
from collections.abc import Callable
from dataclasses import dataclass

from servers.address import joined


class SplitterError(RuntimeError):
    """Envoy did not start, died or did not answer. The message is one line and says where to look."""


@dataclass(frozen=True, slots=True)
class Admin:
    """The admin interface at host:port. `silence` words the error for an Envoy that does not answer."""

    host: str
    port: int
    silence: Callable[[Exception], str] | None = None

    @property
    def address(self) -> str:
        """Where it listens, "host:port"."""
        return joined(self.host, self.port)

    def get(self, path: str) -> str:
        """The answer to a question. Raises SplitterError."""
        return self._answer("GET", path)

    def post(self, path: str) -> str:
        """The answer to a change. Raises SplitterError."""
        return self._answer("POST", path)

    def fetch(self, method: str, path: str) -> tuple[int, str]:
        """(HTTP status, body). Raises OSError or HTTPException when there is no answer."""
        # http.client, not urllib: a proxy from the environment must not stand between this process and Envoy.
        connection = http.client.HTTPConnection(self.host, self.port, timeout=10.0)
        try:
            connection.request(method, path)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def _answer(self, method: str, path: str) -> str:
        try:
            status, body = self.fetch(method, path)
        except (OSError, http.client.HTTPException) as error:
            words = f"no split answers at {self.address} ({error}): give the admin address that it printed"
            raise SplitterError(words if self.silence is None else self.silence(error)) from None
        if status != 200:
            excerpt = " ".join(body.split())[:200]
            raise SplitterError(
                f"{self.address} answered {status} to {path.partition('?')[0]} ({excerpt}): is it a split's admin port?"
            )
        return body
