"""What a replica's listener shows and whom it trusts: its PEM files, as they are when a client comes."""

from __future__ import annotations

import logging
from pathlib import Path

import grpc

from servers.fields import ConfigError
from servers.security import ServerTls, check_authority, check_pair

log = logging.getLogger("tailgate.serve")


def server_credentials(tls: ServerTls) -> grpc.ServerCredentials:
    """Each new connection meets the files as they are then; those that are there keep what they met.

    Files that cannot be read or are of no use, as between the changes of two, are logged once, and the last good ones
    stay. Raises OSError where the first ones cannot be read.
    """
    files = _Files(tls)
    return grpc.dynamic_ssl_server_credentials(
        _configuration(files.shown), files.changed, require_client_authentication=bool(tls.client_ca)
    )


class _Files:
    """`shown` is (key, certificate, authority) of the last configuration that was of use."""

    def __init__(self, tls: ServerTls) -> None:
        self._tls = tls
        self._complaint = ""
        self.shown = self._read()

    def _read(self) -> tuple[bytes, ...]:
        names = (self._tls.key, self._tls.certificate, self._tls.client_ca)
        return tuple(Path(name).read_bytes() if name else b"" for name in names)

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """The new configuration; None where there is none of use. Called by grpc in a thread of its own."""
        try:
            read = self._read()
            if read == self.shown:
                return None
            check_pair(self._tls.certificate, self._tls.key)
            if self._tls.client_ca:
                check_authority(self._tls.client_ca)
            if read != self._read():
                return None  # they change just now: the next connection asks again
        except (ConfigError, OSError) as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                log.warning("the certificate stays as it was: %s", error)
            return None
        self.shown, self._complaint = read, ""
        log.info("new connections meet the certificate that is in %s now", self._tls.certificate)
        return _configuration(read)


def _configuration(files: tuple[bytes, ...]) -> grpc.ServerCertificateConfiguration:
    key, certificate, authority = files
    return grpc.ssl_server_certificate_configuration([(key, certificate)], authority or None)
