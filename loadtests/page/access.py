"""Who may see the page: anybody on this machine, and from elsewhere those who hold the token."""

from __future__ import annotations

import hmac
import os
import re
import secrets
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie
from ipaddress import ip_address

from servers.fields import ConfigError

TOKEN_VARIABLE = "TAILGATE_PAGE_TOKEN"
FEWEST_CHARACTERS = 16
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens on `host`."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def page_token(host: str, *, environment: Mapping[str, str] = os.environ) -> tuple[str, bool]:
    """Return (token, whether it is a new one) of a page on `host`; an empty token where only this machine reaches it.

    Raises ConfigError for a token in `environment` that is too short, or that no cookie holds.
    """
    if is_loopback(host):
        return "", False
    token = environment.get(TOKEN_VARIABLE, "").strip()
    if not token:
        return secrets.token_hex(16), True
    if len(token) < FEWEST_CHARACTERS:
        raise ConfigError(
            f"{TOKEN_VARIABLE} holds {len(token)} characters; the least is {FEWEST_CHARACTERS}: make one with "
            "`openssl rand -hex 16`"
        )
    if not re.fullmatch(r"[A-Za-z0-9._-]+", token):
        raise ConfigError(
            f"{TOKEN_VARIABLE} holds other characters than letters, digits, -, _ and .: make one with "
            "`openssl rand -hex 16`"
        )
    return token, False


class Access:
    """Decides from the headers of a request.

    Without a token, only requests to a name of this machine are answered: a foreign page whose name was bound anew to
    127.0.0.1 still sends its own name as Host.
    """

    def __init__(self, token: str, *, port: int) -> None:
        self._token = token
        # Cookies are shared by all ports of a host, and several runs may be watched.
        self._cookie = f"tailgate_page_{port}"

    def knows_host(self, host: str | None) -> bool:
        """Whether the Host header is one under which this page is served."""
        if self._token:
            return True  # the token tells, and under which names this host is known nobody can list
        name = (host or "").strip().lower()
        name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
        return name in _LOCAL_NAMES

    def allows(self, *, cookie: str | None, authorization: str | None) -> bool:
        """Whether the request carries the token, or none is asked for."""
        if not self._token:
            return True
        if self.is_token(_bearer(authorization)):
            return True
        try:
            held = SimpleCookie(cookie or "").get(self._cookie)
        except CookieError:
            return False
        return held is not None and self.is_token(held.value)

    def is_token(self, given: str) -> bool:
        """Whether it is the token, where there is one; takes as long for any text of one length."""
        return bool(self._token) and hmac.compare_digest(given.encode(), self._token.encode())

    def set_cookie(self) -> str:
        """The Set-Cookie header with which a browser sends the token from now on."""
        return f"{self._cookie}={self._token}; HttpOnly; SameSite=Strict; Path=/"


def _bearer(authorization: str | None) -> str:
    """The token that an Authorization header carries; empty for any other header."""
    scheme, _, given = (authorization or "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else ""
