"""Where something listens, as text: "host:port", with an IPv6 host in brackets."""

from __future__ import annotations

import re

from tailgate.servers.complaint import ConfigError

FREE_PORT = "free"  # where 0 means none
LOWEST_PORT = 1024  # to listen on: those below belong to services of the system


def host_port(text: str, otherwise: str = "", *, listens: bool = False) -> tuple[str, int]:
    """Return (host, port) of `host:port` or `[v6]:port`; to listen on, port is `LOWEST_PORT` or more, or 0. Raises
    ConfigError(`otherwise`) if malformed."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    is_host = host and host.isascii() and host.isprintable() and not set(host) & set("/ ")
    known = int(port) if re.fullmatch("[0-9]{1,5}", port) else -1
    if not is_host or not ((listens and known == 0) or (LOWEST_PORT if listens else 1) <= known <= 65535):
        limit = f", with 0 or a port from {LOWEST_PORT} to 65535" if listens else ""
        raise ConfigError((otherwise or f'address "{text}" is not host:port: give one such as 127.0.0.1:50051') + limit)
    return host, known


def joined(host: str, port: int) -> str:
    """Return the text that `host_port` parses."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
