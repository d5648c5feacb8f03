"""Locust's channel between master and workers, encrypted, and closed to processes without the secret.

Locust's own channel takes any process: a stranger's gets a share of the load and of the schedule. ZeroMQ's CURVE
(https://rfc.zeromq.org/spec/26/) needs the master's public key for the first message. Here both sides make all keys
from the secret, and none of them is ever sent, so that a message without it is never read.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from loadtests.workers.channel_token import TOKEN_VARIABLE, channel_token
from servers.clock import now_ns


def close_channel(environment: Mapping[str, str] = os.environ) -> None:
    """Every socket that Locust opens from now on speaks only with processes that have the secret in `environment`.

    Without the variable Locust is left as it is. A second call does nothing. Raises ConfigError for an empty or short
    secret.
    """
    if TOKEN_VARIABLE not in environment:
        return
    import zmq
    from locust.rpc import zmqrpc
    from zmq.utils import z85

    rpc: Any = zmqrpc
    if getattr(rpc.BaseSocket, "tailgate_closed", False):
        return
    token = channel_token("Locust's channel", environment=environment)

    def pair(side: str) -> tuple[bytes, bytes]:
        # Slow on purpose, some 50 ms: a recorded greeting may be used to try words as secrets.
        key = hashlib.scrypt(token.encode(), salt=f"tailgate {side}".encode(), n=2**14, r=8, p=1, dklen=32)
        secret = z85.encode(key)
        return zmq.curve_public(secret), secret

    master, worker = pair("master"), pair("worker")
    open_socket = rpc.BaseSocket.__init__

    def open_closed(self: Any, sock_type: Any, ipv4_only: bool) -> None:
        open_socket(self, sock_type, ipv4_only)
        is_master = sock_type == zmq.ROUTER
        public, secret = master if is_master else worker
        self.socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self.socket.setsockopt(*((zmq.CURVE_SERVER, 1) if is_master else (zmq.CURVE_SERVERKEY, master[0])))

    # Locust gives no way to say how its sockets are opened.
    rpc.BaseSocket.__init__ = open_closed
    rpc.BaseSocket.tailgate_closed = True


def keep_channel() -> None:
    """A worker keeps its master through a step of the wall clock.

    Locust (2.47) takes a master for lost whose last heartbeat is a minute old by the wall clock, also where that clock
    has just been set.
    """
    from locust import runners

    module: Any = runners
    module.time = SimpleNamespace(time=lambda: now_ns() / 1e9)
