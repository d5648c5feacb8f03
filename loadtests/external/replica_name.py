"""Whether the replica at an address is one of the arm that it is given as."""

from __future__ import annotations

from dataclasses import replace

import grpc

from loadtests.external.addresses import parse_target
from loadtests.external.client_security import OPEN, SecurityConfig
from loadtests.external.grpc_channel import open_channel
from servers.complaint import ConfigError
from servers.rpc import telemetry_pb2, telemetry_pb2_grpc

_ASKING_S = 5.0


def check_replica(arm: str, address: str, security: SecurityConfig = OPEN, *, tls: bool = False) -> bool:
    """Return whether the replica at `address` answers as `arm` or reports no name, and False while it is not there.

    Raises ConfigError where it answers as another arm, since clients would refuse each of its answers.
    """
    where = replace(parse_target(address), tls=tls)
    with open_channel(where, security, [("grpc.enable_http_proxy", 0)]) as channel:
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
