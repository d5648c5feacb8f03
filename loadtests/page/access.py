"""Who may see the page: anybody on this machine, and from elsewhere whoever holds the token. Who may change weights on
it: whoever holds the token, always."""

from __future__ import annotations

import hmac
import os
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
    """(token, whether it was made just now) of a page on `host`; an empty token where only this machine reaches it.

    Raises as `run_token` does.
    """
    return ("", False) if is_loopback(host) else run_token(environment=environment)


def run_token(*, environment: Mapping[str, str] = os.environ) -> tuple[str, bool]:
    """(token, whether it was made just now): the user's, or else a new one.

    Raises ConfigError for one in `environment` that is too short, or that no cookie holds.
    """
    token = environment.get(TOKEN_VARIABLE, "").strip()
    if not token:
        return secrets.token_hex(16), True
    if len(token) < FEWEST_CHARACTERS:
        raise ConfigError(
            f"{TOKEN_VARIABLE} holds {len(token)} characters; the least is {FEWEST_CHARACTERS}: make one with "
            "`openssl rand -hex 16`"
        )
    if not (token.isascii() and all(letter.isalnum() or letter in "-_." for letter in token)):
        raise ConfigError(
            f"{TOKEN_VARIABLE} holds other characters than letters, digits, -, _ and .: make one with "
            "`openssl rand -hex 16`"
        )
    return token, False


class Access:
    """Decides from the headers of a request. Without a token, only requests to a name of this machine are answered:
    a foreign page whose name was bound anew to 127.0.0.1 still sends its own name as Host. `change_token` is the one
    with which weights are changed; without it nobody changes any."""

    def __init__(self, token: str, *, port: int, change_token: str = "") -> None:
        self._token = token
        self._change_token = change_token
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

    def may_change(self, *, authorization: str | None) -> bool:
        """Whether the request itself carries the token. A cookie does not do: browsers send it by themselves."""
        return _same(_bearer(authorization), self._change_token)

    def is_token(self, given: str) -> bool:
        """Whether it is the token."""
        return _same(given, self._token)

    def set_cookie(self) -> str:
        """The Set-Cookie header with which a browser sends the token from now on."""
        return f"{self._cookie}={self._token}; HttpOnly; SameSite=Strict; Path=/"


def _same(given: str, token: str) -> bool:
    """Whether it is the token, where there is one; takes as long for any text of one length."""
    return bool(token) and hmac.compare_digest(given.encode(), token.encode())


def _bearer(authorization: str | None) -> str:
    """The token that an Authorization header carries; empty for any other header."""
    scheme, _, given = (authorization or "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else ""


def is_own_page(*, host: str | None, origin: str | None, fetch_site: str | None) -> bool:
    """Whether this page, or a program that is no browser, sent the request: browsers say in Origin and Sec-Fetch-Site
    which page did."""
    if fetch_site not in (None, "same-origin"):
        return False
    return origin is None or origin.lower() == f"http://{(host or '').strip().lower()}"
