"""The splitter knows an arm by the name by which its servers answer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from loadtests.commands.split import check_name
from servers.fields import ConfigError
from servers.rpc import telemetry_pb2, telemetry_pb2_grpc
from servers.splitter.envoy_config import ArmTarget, SplitterConfig


class Named(telemetry_pb2_grpc.TelemetryServicer):  # type: ignore[misc]
    def Snapshot(self, request: Any, context: Any) -> Any:  # noqa: N802
        return telemetry_pb2.SnapshotResponse(arm="compiled-padded", replica="compiled-padded-0")


def config_of(address: str, arm: str) -> SplitterConfig:
    return SplitterConfig(arms=(ArmTarget(name=arm, backends=(address,)),))


def test_an_arm_that_answers_by_another_name_is_refused_with_both() -> None:
    server = grpc.server(ThreadPoolExecutor(2))
    telemetry_pb2_grpc.add_TelemetryServicer_to_server(Named(), server)  # type: ignore[no-untyped-call]
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    assert check_name(config_of(address, "compiled-padded"), "compiled-padded", address)
    with pytest.raises(ConfigError) as refused:
        check_name(config_of(address, "compiled"), "compiled", address)
    for words in (f"compiled={address}", f"--arm compiled-padded={address}", "--name compiled"):
        assert words in str(refused.value)
    server.stop(0)


def test_a_server_without_telemetry_does_not_say_and_one_that_is_not_there_is_asked_again() -> None:
    server = grpc.server(ThreadPoolExecutor(2))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    assert check_name(config_of(address, "vllm"), "vllm", address)
    server.stop(0)
    assert not check_name(config_of(address, "vllm"), "vllm", address)
