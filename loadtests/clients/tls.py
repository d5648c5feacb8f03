"""Sockets to servers, and TLS of HTTP/2 connections without a socket: bytes in, bytes out, never waiting.

So the reader of a connection still needs one read and one time stamp for each wake-up.
"""

from __future__ import annotations

import errno
import ssl
from typing import Any, Final

import gevent.socket

from tailgate.loadtests.external.addresses import Address
from tailgate.loadtests.external.client_security import ENDED_HANDSHAKE, explain, no_http2

_READ_BYTES: Final = 65_536
_LOCAL_LIMITS: Final = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL)


def connected(address: Address, timeout_s: float) -> Any:
    """Return a socket to `address` that waits for `timeout_s` at most. Raises OSError."""
    try:
        sock = gevent.socket.create_connection((address.host, address.port), timeout=timeout_s)
    except OSError as problem:
        if problem.errno in _LOCAL_LIMITS:
            limits = f"this machine can open no more connections ({problem.strerror})"
            raise OSError(f"{limits}: raise its limits (ulimit -n)") from None
        raise
    sock.setsockopt(gevent.socket.IPPROTO_TCP, gevent.socket.TCP_NODELAY, 1)
    return sock


class TlsError(OSError):
    """A secure connection failed or broke. One line with the remedy."""


class TlsStream:
    """One connection's TLS, client side. The server must agree on HTTP/2 by ALPN."""

    def __init__(self, context: ssl.SSLContext, name: str) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._name = name
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=name)

    @property
    def has_output(self) -> bool:
        """Whether `encrypted` would return something even for no bytes: the answer to a change of keys, or an alert."""
        return bool(self._outgoing.pending)

    def shake_hands(self, sock: Any) -> None:
        """Do the handshake over `sock`, which waits. Raises TlsError with the remedy, or another OSError."""
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                sock.sendall(self._outgoing.read())
                if not (received := sock.recv(_READ_BYTES)):
                    raise TlsError(ENDED_HANDSHAKE) from None
                self._incoming.write(received)
            except ssl.SSLError as problem:
                raise TlsError(explain(problem, self._name)) from None
        agreed = self._tls.selected_alpn_protocol()
        if agreed != "h2":  # the server must not take the handshake for done
            raise TlsError(no_http2(agreed))
        sock.sendall(self._outgoing.read())

    def decrypted(self, received: bytes) -> bytes:
        """Return all plain bytes that are there after `received`; none is left waiting for more to come."""
        if received:
            self._incoming.write(received)
        read, pieces = self._tls.read, []
        try:
            while piece := read(_READ_BYTES):
                pieces.append(piece)
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):  # after its last words the peer ends the connection
            pass
        except ssl.SSLError as problem:
            raise TlsError(explain(problem, self._name)) from None
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def encrypted(self, plain: bytes) -> bytes:
        """Return the bytes to send for `plain`, and those that TLS itself has to send."""
        if plain:
            self._tls.write(plain)
        return self._outgoing.read()
