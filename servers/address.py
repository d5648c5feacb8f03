"""Where something listens, as text: "host:port", with an IPv6 host in brackets."""

from __future__ import annotations

import re

from tailgate.servers.complaint import ConfigError

FREE_PORT = "free"  # where 0 means none


def host_port(text: str, otherwise: str = "", *, lowest: int = 1) -> tuple[str, int]:
    """Return (host, port) of `host:port` or `[v6]:port`, port ≥ `lowest`. Raises ConfigError(`otherwise`) if
    malformed."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    is_host = host and host.isascii() and host.isprintable() and not set(host) & set("/ ")
    if not is_host or not re.fullmatch("[0-9]{1,5}", port) or not lowest <= int(port) <= 65535:
        raise ConfigError(otherwise or f'address "{text}" is not host:port: give one such as 127.0.0.1:50051')
    return host, int(port)


def joined(host: str, port: int) -> str:
    """Return the text that `host_port` parses."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
