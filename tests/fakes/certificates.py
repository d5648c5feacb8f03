"""Throw-away authorities and certificates as PEM files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Certificates:
    """Paths of PEM files: an authority, a server and a client that it signed, and an authority that signed nothing."""

    ca: str
    other_ca: str
    certificate: str
    key: str
    client_certificate: str
    client_key: str


def make_certificates(folder: Path, *names: str) -> Certificates:
    authority, other = trustme.CA(), trustme.CA()
    server = authority.issue_cert(*(names or ("127.0.0.1", "localhost")))
    client = authority.issue_cert("load@tailgate.test")

    def write(blob: trustme.Blob, name: str) -> str:
        blob.write_to_path(str(folder / name))
        return str(folder / name)

    def chain(leaf: trustme.LeafCert, name: str) -> str:
        (folder / name).write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
        return str(folder / name)

    return Certificates(
        ca=write(authority.cert_pem, "ca.pem"),
        other_ca=write(other.cert_pem, "other-ca.pem"),
        certificate=chain(server, "server.pem"),
        key=write(server.private_key_pem, "server-key.pem"),
        client_certificate=chain(client, "client.pem"),
        client_key=write(client.private_key_pem, "client-key.pem"),
    )
