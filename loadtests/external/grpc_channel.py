"""Channels of stock grpcio to servers, and whether the replica behind one is of the arm that it is given as."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from tailgate.loadtests.external.addresses import parse_target
from tailgate.loadtests.external.client_security import OPEN, SecurityConfig, bearer_token, client_context
from tailgate.servers.complaint import ConfigError
from tailgate.servers.rpc import telemetry_pb2, telemetry_pb2_grpc

_ASKING_S = 5.0
_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    # A proxy from the environment must not stand between this process and an arm on loopback.
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", 64 << 20),
)


class _Bearer(
    grpc.UnaryUnaryClientInterceptor,  # type: ignore[misc]
    grpc.UnaryStreamClientInterceptor,  # type: ignore[misc]
    grpc.StreamStreamClientInterceptor,  # type: ignore[misc]
):
    def __init__(self, token: str) -> None:
        self._header = ("authorization", f"Bearer {token}")

    def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: object) -> Any:
        return continuation(details._replace(metadata=[*(details.metadata or ()), self._header]), request)

    intercept_unary_stream = intercept_stream_stream = intercept_unary_unary


def open_channel(target: str, security: SecurityConfig = OPEN) -> grpc.Channel:
    """Return a channel of its own to `target`; every call carries the token. Raises ConfigError for a bad file."""
    address, options = parse_target(target), list[tuple[str, int | str]](_OPTIONS)
    if address.tls:
        client_context(security)  # the same errors for the same files
        if security.tls_server_name:
            options.append(("grpc.ssl_target_name_override", security.tls_server_name))
        files = (security.tls_ca, security.tls_key, security.tls_certificate)
        pem = [Path(path).read_bytes() if path else None for path in files]
        channel = grpc.secure_channel(address.target, grpc.ssl_channel_credentials(*pem), options)
    else:
        channel = grpc.insecure_channel(address.target, options)
    token = bearer_token(security)
    return grpc.intercept_channel(channel, _Bearer(token)) if token else channel


def check_replica(arm: str, address: str) -> bool:
    """Return whether the replica at `address` answers as `arm` or reports no name, and False while it is not there.

    Raises ConfigError where it answers as another arm, since clients would refuse each of its answers.
    """
    with open_channel(address) as channel:
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
