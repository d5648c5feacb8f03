"""The TLS of a listener on the command line: what serve and split share."""

from __future__ import annotations

import argparse

from servers.security import ServerTls, check_named, server_tls


def add_listener_tls(parser: argparse.ArgumentParser) -> None:
    """--tls-certificate, --tls-key and --tls-client-ca."""
    parser.add_argument("--tls-certificate", default=None, metavar="FILE", help="serve TLS with this chain (PEM)")
    parser.add_argument("--tls-key", default=None, metavar="FILE", help="the key of --tls-certificate (PEM)")
    parser.add_argument(
        "--tls-client-ca",
        default=None,
        metavar="FILE",
        help="let in only clients with a certificate of this authority (PEM)",
    )


def listener_tls(options: argparse.Namespace) -> ServerTls | None:
    """What --tls-* say, checked."""
    flags = ("tls_certificate", "tls_key", "tls_client_ca")
    check_named({f"--{name.replace('_', '-')}": getattr(options, name) for name in flags})
    return server_tls(*(getattr(options, name) or "" for name in flags))
