"""Channels of stock grpcio to servers, and whether the replica behind one is of the arm that it is given as."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import grpc

from tailgate.loadtests.external.addresses import Address, parse_target
from tailgate.loadtests.external.client_security import OPEN, SecurityConfig, client_context
from tailgate.servers.complaint import ConfigError
from tailgate.servers.rpc import telemetry_pb2, telemetry_pb2_grpc

_ASKING_S = 5.0


def open_channel(address: Address, security: SecurityConfig) -> grpc.Channel:
    """Return a channel of its own to `address`, past any HTTP proxy. Raises ConfigError for a bad file."""
    options: list[tuple[str, int | str]] = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    if not address.tls:
        return grpc.insecure_channel(address.target, options)
    client_context(security)  # the same errors for the same files
    if security.tls_server_name:
        options.append(("grpc.ssl_target_name_override", security.tls_server_name))
    files = (security.tls_ca, security.tls_key, security.tls_certificate)
    pem = [Path(path).read_bytes() if path else None for path in files]
    return grpc.secure_channel(address.target, grpc.ssl_channel_credentials(*pem), options)


def check_replica(arm: str, address: str, security: SecurityConfig = OPEN, *, tls: bool = False) -> bool:
    """Return whether the replica at `address` answers as `arm` or reports no name, and False while it is not there.

    Raises ConfigError where it answers as another arm, since clients would refuse each of its answers.
    """
    with open_channel(replace(parse_target(address), tls=tls), security) as channel:
        stub = telemetry_pb2_grpc.TelemetryStub(channel)  # type: ignore[no-untyped-call]
        try:
            answered = stub.Snapshot(telemetry_pb2.SnapshotRequest(), timeout=_ASKING_S).arm
        except grpc.RpcError as error:
            # A server that is still to come is asked again. One without telemetry, or that wants a token, does not say.
            return error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    if answered != arm:
        raise ConfigError(
            f'--arm "{arm}={address}" leads to a replica that answers as "{answered}": write --arm '
            f"{answered}={address}, or serve it with --name {arm}"
        )
    return True
