"""Envoy's admin interface: a request and its answer."""

from __future__ import annotations

import contextlib
import http.client
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from servers.address import host_port
from servers.complaint import ConfigError

LARGEST_BYTES: Final = 64 << 20  # of an answer


class SplitterError(RuntimeError):
    """Envoy did not start, died or did not answer. The message is one line and says where to look."""


@dataclass(frozen=True, slots=True)
class Admin:
    """The admin interface at `address`: "host:port", or the path of a Unix socket. `silence` words the error for an
    Envoy that does not answer."""

    address: str
    silence: Callable[[Exception], str] | None = None

    def get(self, path: str) -> str:
        """Return the answer to a question. Raises SplitterError."""
        return self._answer("GET", path)

    @contextlib.contextmanager
    def answering(self, what: str) -> Iterator[None]:
        """Raise SplitterError where an answer that is read within the block is not `what` of a split."""
        try:
            yield
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise SplitterError(
                f"{self.address} answered no {what} ({type(error).__name__}): is it a split's admin port?"
            ) from None

    def post(self, path: str) -> str:
        """Return the answer to a change. Raises SplitterError."""
        return self._answer("POST", path)

    def fetch(self, method: str, path: str, *, timeout_s: float = 10.0) -> tuple[int, str]:
        """Return (HTTP status, body). Raises OSError or HTTPException when there is no answer."""
        # http.client, not urllib: a proxy from the environment must not stand in between.
        if self.address.startswith("/"):
            connection: http.client.HTTPConnection = _SocketConnection(self.address, timeout_s)
        else:
            connection = http.client.HTTPConnection(*host_port(self.address), timeout=timeout_s)
        try:
            connection.request(method, path)
            response = connection.getresponse()
            body = response.read(LARGEST_BYTES + 1)
            if len(body) > LARGEST_BYTES:
                raise http.client.HTTPException(f"an answer of more than {LARGEST_BYTES >> 20} MiB")
            return response.status, body.decode(errors="replace")
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


def admin_address(text: str, otherwise: str = "") -> str:
    """Return the address, "host:port" or an absolute path. Raises ConfigError, in the words of `otherwise`, for any
    other text."""
    if not text.startswith("/"):
        host_port(text, otherwise)
    elif not text.isprintable():
        raise ConfigError(otherwise or f"the path {text!r} is not printable: give another")
    return text


class _SocketConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
