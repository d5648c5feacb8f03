"""Channels of stock grpcio to servers, with the transport security that is configured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from loadtests.external.addresses import Address
from loadtests.external.client_security import SecurityConfig, client_context


def open_channel(address: Address, security: SecurityConfig, options: Sequence[tuple[str, Any]] = ()) -> grpc.Channel:
    """A channel of its own to `address`, not one that others of this process share. ConfigError for a bad file."""
    own = [("grpc.use_local_subchannel_pool", 1), *options]
    if not address.tls:
        return grpc.insecure_channel(address.target, own)
    client_context(security)  # the same errors for the same files
    if security.tls_server_name:
        own.append(("grpc.ssl_target_name_override", security.tls_server_name))
    files = (security.tls_ca, security.tls_key, security.tls_certificate)
    pem = [Path(path).read_bytes() if path else None for path in files]
    return grpc.secure_channel(address.target, grpc.ssl_channel_credentials(*pem), own)
