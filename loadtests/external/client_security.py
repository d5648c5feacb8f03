"""Transport security of the load: whom to trust, which certificate and token to show, what a failed handshake means.

What is named in `SecurityConfig` may be written to a run directory: it holds names of files and variables, no secrets.
"""

from __future__ import annotations

import ssl
from typing import Final, Self

from pydantic import model_validator

from tailgate.servers.complaint import ConfigError
from tailgate.servers.fields import Settings
from tailgate.servers.security import check_authority, check_variable, load_pair, token_from_variable

# The error numbers of OpenSSL's certificate check that have a remedy of their own (x509_vfy.h).
_EXPIRED: Final = 10
_NOT_YET_VALID: Final = 9
_WRONG_NAME: Final = (62, 64)  # of a host, of an IP address
ENDED_HANDSHAKE: Final = "it ended the TLS handshake without a word: use the port that speaks TLS"


class TlsPair(Settings):
    """A certificate to show and its key (PEM files), or neither."""

    tls_certificate: str = ""
    """Certificate chain to show (PEM file). Relative to the experiment's file. Needs `tls_key`."""
    tls_key: str = ""
    """Key of `tls_certificate` (PEM file)."""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if bool(self.tls_certificate) != bool(self.tls_key):
            given = "tls_certificate" if self.tls_certificate else "tls_key"
            raise ValueError(f"{given} is set alone: give tls_certificate and tls_key, or neither")
        return self


class SecurityConfig(TlsPair):
    """How clients trust servers and prove who they are. Files and variables are named; no secret is written here."""

    tls_ca: str = ""
    """PEM file of the authorities that may sign the server's certificate. Default: those of the system."""
    tls_server_name: str = ""
    """Name that the server's certificate must carry. Default: the host of the address."""
    token_env: str = ""
    """Environment variable that holds the bearer token."""

    @model_validator(mode="after")
    def _security_fits(self) -> Self:
        if self.token_env:
            check_variable(self.token_env, key="token_env")
        return self

    @property
    def tls(self) -> bool:
        """Whether anything says how TLS is to be done."""
        return bool(self.tls_ca or self.tls_server_name or self.tls_certificate)

    def check(self, where: str) -> None:
        """Raise ConfigError, which begins with `where`, for a file or variable that is missing or of no use."""
        try:
            client_context(self)
            bearer_token(self)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None


OPEN: Final = SecurityConfig()


def bearer_token(security: SecurityConfig) -> str:
    """Return the token to show, "" when none is configured. Raises ConfigError, which never holds the token."""
    return token_from_variable(security.token_env, key="token_env") if security.token_env else ""


def without_token(text: str, token: str) -> str:
    """Return `text` without the token, which some servers repeat in error messages."""
    return text.replace(token, "***") if token else text


def client_context(
    security: SecurityConfig, *, protocols: tuple[str, ...] = ("h2",), kind: type[ssl.SSLContext] = ssl.SSLContext
) -> ssl.SSLContext:
    """Return a context that checks certificate and name and offers `protocols` (ALPN). Raises ConfigError for a bad
    file. `kind` is gevent's where sockets are."""
    context = kind(ssl.PROTOCOL_TLS_CLIENT)
    if security.tls_ca:
        check_authority(security.tls_ca)
        context.load_verify_locations(security.tls_ca)
    else:
        context.load_default_certs()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_flags = ssl.create_default_context().verify_flags
    context.set_alpn_protocols(list(protocols))
    if security.tls_certificate:
        load_pair(context, security.tls_certificate, security.tls_key)
    return context


def explain(problem: ssl.SSLError, name: str) -> str:
    """Return what went wrong between this client and the server called `name`, in one line with the remedy."""
    reason = (problem.reason or "").upper()
    if isinstance(problem, ssl.SSLCertVerificationError):
        if problem.verify_code in _WRONG_NAME:
            return f'its certificate is for another name than "{name}": set tls_server_name to a name it carries'
        if problem.verify_code in (_EXPIRED, _NOT_YET_VALID):
            return f"its {problem.verify_message}: renew it, or set the clocks right"
        return f"its certificate is not trusted ({problem.verify_message}): give its authority's PEM file as tls_ca"
    if any(word in reason for word in ("CERTIFICATE_REQUIRED", "HANDSHAKE_FAILURE", "BAD_CERTIFICATE", "UNKNOWN_CA")):
        return f"it refused this client ({_tls_reason(reason)}): give tls_certificate and tls_key that it trusts"
    if "APPLICATION_PROTOCOL" in reason:
        return no_http2(None)
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE"):
        return "it does not speak TLS: use http:// or the port that does"
    if isinstance(problem, ssl.SSLEOFError):
        return ENDED_HANDSHAKE
    return f"TLS failed ({_tls_reason(reason) or problem}): see the server's log"


def no_http2(agreed: str | None) -> str:
    """Return why a server that agreed on `agreed` by ALPN is of no use."""
    offered = f'"{agreed}"' if agreed else "nothing"
    return f'it agreed on {offered} by ALPN and not on HTTP/2: make the server (or what ends TLS before it) offer "h2"'


def _tls_reason(reason: str) -> str:
    return reason.replace("_", " ").lower()
