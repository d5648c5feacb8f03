"""Channels from the orchestrator to servers that it started: telemetry, health and the answers after the traffic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from servers.metadata import INFERENCE_SERVICE

CHANNEL_OPTIONS = (
    # A proxy from the environment must not stand between this process and an arm on loopback.
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", 64 << 20),
)


class _Bearer(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):  # type: ignore[misc]
    def __init__(self, token: str) -> None:
        self._header = ("authorization", f"Bearer {token}")

    def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: object) -> Any:
        return continuation(details._replace(metadata=[*(details.metadata or ()), self._header]), request)

    intercept_unary_stream = intercept_unary_unary


def arm_channel(target: str, *, token: str = "") -> grpc.Channel:
    """A channel to an arm on this machine; every call shows `token` unless it is empty."""
    channel = grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
    return grpc.intercept_channel(channel, _Bearer(token)) if token else channel


def is_serving(channel: grpc.Channel) -> bool:
    """Whether the server behind `channel` says that it is ready."""
    try:
        answer = _health(channel)
    except grpc.RpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def is_gone(channel: grpc.Channel) -> bool:
    """Whether nobody listens behind `channel`. One that is silent, as in a compile, is not gone."""
    try:
        _health(channel)
    except grpc.RpcError as error:
        return bool(error.code() is grpc.StatusCode.UNAVAILABLE)  # type: ignore[attr-defined]
    return False


def _health(channel: grpc.Channel) -> health_pb2.HealthCheckResponse:
    request = health_pb2.HealthCheckRequest(service=INFERENCE_SERVICE)
    return health_pb2_grpc.HealthStub(channel).Check(request, timeout=2.0)
