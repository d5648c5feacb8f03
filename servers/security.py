"""Certificates and bearer tokens as both sides need them.

Configurations carry names of files and of environment variables alone, so that they can be printed and kept.
"""

from __future__ import annotations

import hmac
import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tailgate.servers.complaint import ConfigError

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# What RFC 6750, 2.1 calls b64token, the only thing that may stand behind "Bearer".
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
_SECRET = re.compile(r"[A-Za-z0-9._-]{16,}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTls:
    """What a listener shows: its certificate chain and key (PEM files)."""

    certificate: str
    key: str


def server_tls(certificate: str, key: str) -> ServerTls | None:
    """Return the files, or None if neither is given. Raises ConfigError where they are not a readable pair of PEM."""
    if not (certificate or key):
        return None
    if not certificate or not key:
        missing, given = ("key", "certificate") if certificate else ("certificate", "key")
        raise ConfigError(f"a TLS {missing} is missing for the {given}: give both as PEM files")
    _check_readable("TLS certificate", certificate)
    _check_readable("TLS key", key)
    load_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), certificate, key)
    return ServerTls(certificate=certificate, key=key)


def load_pair(context: ssl.SSLContext, certificate: str, key: str) -> None:
    """Load the certificate into `context`. Raises ConfigError."""
    try:
        # Without a password function, OpenSSL would ask on the terminal for the one of an encrypted key.
        context.load_cert_chain(certificate, key, password=lambda: "")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f'TLS key "{key}" does not belong to certificate "{certificate}": give its own') from None
        raise ConfigError(
            f'TLS certificate "{certificate}" with key "{key}" cannot be used ({error.reason or "not PEM"}): '
            "give PEM files, the key without a password"
        ) from None


def check_authority(path: str) -> None:
    """Check that the file holds at least one PEM certificate. Raises ConfigError."""
    _check_readable("TLS authority", path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError as error:
        raise ConfigError(
            f'TLS authority "{path}" holds no certificate ({error.reason or "not PEM"}): give a PEM file'
        ) from None


def _check_readable(what: str, path: str) -> None:
    try:
        with Path(path).open("rb"):
            pass
    except OSError as error:
        raise ConfigError(f'{what} "{path}" cannot be read ({error.strerror}): give a PEM file') from None


def check_named(values: Mapping[str, str | None]) -> None:
    """Raise ConfigError for a flag that was given empty: `--token-env "$NAME"` with an unset variable must not open a
    server that was meant to be closed."""
    for flag, value in values.items():
        if value is not None and not value.strip():
            raise ConfigError(f"{flag} is empty: give what it is to use, or leave it out to go without")


def check_variable(name: str, *, key: str) -> None:
    """Check that `name` can name an environment variable. The error omits it: it may be the secret itself."""
    if not _VARIABLE.fullmatch(name):
        raise ConfigError(f"{key} is not the name of an environment variable: give the name, never the token itself")


def token_from_variable(name: str, *, key: str) -> str:
    """Return the token in the environment variable `name`. Raises ConfigError, which never shows the value."""
    check_variable(name, key=key)
    value = os.environ.get(name, "")
    if not value:
        raise ConfigError(f"{key} names the environment variable {name}, which is not set: export {name}=...")
    token = value.strip()
    if not _TOKEN.fullmatch(token):
        raise ConfigError(
            f"the environment variable {name} holds no bearer token: give letters, digits and -._~+/ with = at the "
            "end only"
        )
    return token


def secret_in(variable: str) -> str:
    """Return the secret that lets others in, "" where the environment variable holds none.

    Raises ConfigError, which never shows it, for one that is too short or fits no header.
    """
    secret = os.environ.get(variable, "").strip()
    if secret and not _SECRET.fullmatch(secret):
        raise ConfigError(
            f"{variable} holds {len(secret)} characters; the least is 16, of letters, digits, -, _ and . alone: make "
            "one with `openssl rand -hex 16`"
        )
    return secret


def is_bearer(header: str | bytes | None, token: str) -> bool:
    """Return whether an `authorization` header carries `token`, compared in constant time."""
    given = header.encode() if isinstance(header, str) else header or b""
    scheme, _, rest = given.partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(rest.strip(), token.encode())
