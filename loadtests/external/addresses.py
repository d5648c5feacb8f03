"""Where servers listen: the addresses of external arms and of tailgate's own. Nothing here opens a connection."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from tailgate.servers.address import host_port, joined
from tailgate.servers.complaint import ConfigError

Kind = Literal["openai", "oip"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_USES_TLS = {"http": False, "grpc": False, "https": True, "grpcs": True}
_URL = re.compile(
    r"(https?)://(\[[0-9a-f:.]+\]|[\w.-]+)(?::(\d{1,5}))?(/[\w.~%/:+,;=&!$'()*-]*)?", re.ASCII | re.IGNORECASE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a server listens. `path` has no slash at its end and is empty for gRPC."""

    host: str
    port: int
    tls: bool = False
    path: str = ""

    @property
    def target(self) -> str:
        return joined(self.host, self.port)

    @property
    def host_header(self) -> str:
        """The address as a Host header has it: as some gateways need it, without the scheme's own port."""
        return self.target.removesuffix(":443" if self.tls else ":80")


def parse_address(text: str, kind: Kind) -> Address:
    """Return the parts of `http://host:port/v1` or `grpc://host:port`. Raises ConfigError when the protocol of `kind`
    has no such address."""
    if kind == "oip":
        return parse_target(text, what="address")
    _refuse_secret(text)
    url = _URL.fullmatch(text.strip())
    port = int(url[3] or (443 if url[1].lower() == "https" else 80)) if url else 0
    if url is None or not 0 < port < 65_536:
        raise ConfigError(
            f'address "{text}" is not http:// or https:// with a host and a port from 1 to 65535: give one such as '
            "http://host:8000/v1"
        )
    return Address(host=url[2].strip("[]"), port=port, tls=_USES_TLS[url[1].lower()], path=(url[4] or "").rstrip("/"))


def parse_target(text: str, *, what: str = "target") -> Address:
    """Return the parts of `host:port` or `[v6]:port`, also behind a scheme of gRPC. ConfigErrors call it `what`."""
    _refuse_secret(text)
    scheme, separator, rest = text.strip().rpartition("://")
    if separator and scheme.lower() not in _USES_TLS:
        raise ConfigError(f'{what} "{text}" has the scheme "{scheme}": use host:port, http:// or https://')
    otherwise = f'{what} "{text}" is not host:port with a port from 1 to 65535: give one such as localhost:50051'
    host, port = host_port(rest.rstrip("/"), otherwise)
    return Address(host=host, port=port, tls=_USES_TLS.get(scheme.lower(), False))


def _refuse_secret(text: str) -> None:
    """Refuse a password or key in an address, which records and errors repeat. The message does not."""
    if set(text) & set("@?#"):
        raise ConfigError('an address carries "@", "?" or "#": leave out user, password and query and use token_env')
