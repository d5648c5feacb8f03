"""Where servers listen: the addresses of external arms and of tailgate's own. Nothing here opens a connection."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from servers.address import host_port, joined
from servers.complaint import ConfigError

Kind = Literal["openai", "oip"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_SCHEMES: dict[str, dict[str, bool]] = {
    "openai": {"http": False, "https": True},
    "oip": {"http": False, "grpc": False, "https": True, "grpcs": True},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a server listens. `path` has no slash at its end and is empty for gRPC. `host` may have an IPv6 zone."""

    host: str
    port: int
    tls: bool = False
    path: str = ""

    @property
    def target(self) -> str:
        """host:port, as a gRPC target writes it."""
        return joined(self.host, self.port)

    @property
    def host_header(self) -> str:
        """As a Host header says it: without a zone, and without the scheme's own port, which some gateways do not
        know."""
        return joined(self.host.partition("%")[0], self.port).removesuffix(":443" if self.tls else ":80")


def parse_address(text: str, kind: Kind) -> Address:
    """The parts of `http://host:port/v1` or `grpc://host:port`. Raises ConfigError when the protocol has no such
    address."""
    schemes = _SCHEMES[kind]
    example = "http://host:8000/v1" if kind == "openai" else "grpc://host:8001"
    scheme, separator, rest = text.strip().partition("://")
    if not separator:
        if kind == "openai":
            raise ConfigError(f'address "{text}" has no scheme: write http:// or https://, such as {example}')
        scheme, rest = "grpc", text.strip()
    if scheme.lower() not in schemes:
        raise ConfigError(f'address "{text}" has the scheme "{scheme}": use {" or ".join(schemes)}, such as {example}')
    tls = schemes[scheme.lower()]
    if set(rest) & set("?# ") or not rest.isprintable() or not rest.isascii():
        raise ConfigError(
            f"an address has a query, a fragment, a space or other odd characters: write one such as {example}"
        )
    authority, slash, path = rest.partition("/")
    _refuse_password(authority)
    if kind == "oip" and path:
        raise ConfigError(f'address "{text}" has the path "/{path}", and gRPC has none: such as {example}')
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+(?:%25[A-Za-z0-9._~-]+)?\]|[A-Za-z0-9._-]+)(?::(\d{1,5}))?", authority)
    if match is None:
        raise ConfigError(f'address "{text}" names no host: such as {example}')
    host, number = match[1].strip("[]").replace("%25", "%"), match[2]
    if number is None and kind == "oip":
        raise ConfigError(f'address "{text}" names no port: such as {example}')
    port = int(number) if number is not None else 443 if tls else 80
    if not 0 < port < 65_536:
        raise ConfigError(f'address "{text}" has the port {port}: give one from 1 to 65535')
    return Address(host=host, port=port, tls=tls, path=f"/{path}".rstrip("/") if slash else "")


def parse_target(text: str) -> Address:
    """The parts of `host:port` or `[v6]:port`, also behind a scheme of gRPC, for arms of tailgate itself.

    ConfigError for anything else.
    """
    scheme, separator, rest = text.strip().partition("://")
    if not separator:
        scheme, rest = "grpc", text.strip()
    elif scheme.lower() not in _SCHEMES["oip"]:
        raise ConfigError(f'target "{text}" has the scheme "{scheme}": use host:port, http:// or https://')
    _refuse_password(rest)
    otherwise = f'target "{text}" is not host:port with a port from 1 to 65535: try localhost:50051'
    host, port = host_port(rest.rstrip("/"), otherwise)
    return Address(host=host, port=port, tls=_SCHEMES["oip"][scheme.lower()])


def _refuse_password(text: str) -> None:
    """The address holds none: it is written to records and errors, which this one does not repeat it in."""
    if "@" in text:
        raise ConfigError('an address carries a user or password before "@": leave it out and use token_env')
